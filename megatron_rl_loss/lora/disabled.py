"""The model without its adapters, for a while: the reference policy without a second copy."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from ..errors import ConfigError
from .adapter import Adapter
from .names import unwrapped

# how many `disabled` blocks a foreign wrapper is in
_depths: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def disabled(model: Any) -> Iterator[None]:
    """Runs the block with the base model's weights alone, bit for bit.

    Blocks nest, and an error inside leaves the adapters as they were before. A backward pass that
    belongs to a forward pass in the block must run in the block too, if layers are recomputed.

    Works for `apply_lora` and, by duck typing, for models that Megatron-Bridge's PEFT wrapped:
    every module with methods `disable_adapter_layers()` and `enable_adapter_layers()`.

    Args:
        model: the model, wrapped or not, or the list of its chunks.

    Raises:
        ConfigError: there is nothing to disable: the block would run the trained model.
    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    modules = [module for chunk in chunks for module in chunk.modules()]
    own = [module for module in modules if isinstance(module, Adapter)]
    foreign = [module for module in modules if _is_foreign(module)]
    if not own and not foreign:
        _check_may_be_bare(chunks)
    with contextlib.ExitStack() as stack:
        for adapter in own:
            stack.enter_context(_one_off(adapter))
        for wrapper in foreign:
            stack.enter_context(_foreign_off(wrapper))
        yield


def _is_foreign(module: Any) -> bool:
    names = ("disable_adapter_layers", "enable_adapter_layers")
    return all(callable(getattr(module, name, None)) for name in names)


@contextlib.contextmanager
def _one_off(adapter: Adapter) -> Iterator[None]:
    adapter.num_disabled += 1
    try:
        yield
    finally:
        adapter.num_disabled -= 1


@contextlib.contextmanager
def _foreign_off(wrapper: Any) -> Iterator[None]:
    depth = _depths.get(wrapper, 0)
    # Megatron-Bridge's flag; what was off before stays off afterwards
    was_on = depth == 0 and getattr(wrapper, "_adapter_enabled", True)
    _depths[wrapper] = depth + 1
    if was_on:
        wrapper.disable_adapter_layers()
    try:
        yield
    finally:
        _depths[wrapper] = depth
        if was_on:
            wrapper.enable_adapter_layers()


def _check_may_be_bare(chunks: Sequence[Any]) -> None:
    """A stage of a pipeline may be without adapters; a whole model may not."""
    marked = any(hasattr(unwrapped(chunk), "lora_config") for chunk in chunks)
    if marked or parallel_state.get_pipeline_model_parallel_world_size() > 1:
        return
    raise ConfigError(
        "the model has no adapters to disable, so this would be the trained model itself. Call "
        "apply_lora first, or use a second, frozen copy of the model as the reference."
    )
