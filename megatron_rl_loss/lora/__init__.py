"""LoRA adapters on Megatron-Core models, dense and mixture-of-experts; see docs/lora.md."""

from .adapter import Adapter, Sharding
from .apply import apply_lora
from .checkpoint import load_adapter, load_adapter_weights, save_adapter
from .config import LoRAConfig
from .disabled import disabled
from .handles import AdapterHandle, adapters
from .merge import merged
from .peft_export import save_peft
from .peft_import import load_peft
from .report import Report, report
from .store import AdapterStore

__all__ = [
    "Adapter",
    "AdapterHandle",
    "AdapterStore",
    "LoRAConfig",
    "Report",
    "Sharding",
    "adapters",
    "apply_lora",
    "disabled",
    "load_adapter",
    "load_adapter_weights",
    "load_peft",
    "merged",
    "report",
    "save_adapter",
    "save_peft",
]
