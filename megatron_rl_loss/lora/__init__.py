"""LoRA adapters on Megatron-Core models, dense and mixture-of-experts; see docs/lora.md."""

from .adapter import Adapter, Sharding
from .apply import apply_lora
from .config import LoRAConfig
from .disabled import disabled
from .handles import AdapterHandle, adapters
from .merge import merged
from .report import Report, report

__all__ = [
    "Adapter",
    "AdapterHandle",
    "LoRAConfig",
    "Report",
    "Sharding",
    "adapters",
    "apply_lora",
    "disabled",
    "merged",
    "report",
]
