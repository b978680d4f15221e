"""Where a Megatron optimizer keeps the state of each adapter parameter.

Megatron's optimizers differ in what they step: the parameter itself (fp32), an fp32 copy of it
(bf16), or this data-parallel rank's flat part of it (distributed optimizer). All end in a torch
optimizer, whose state belongs to that "main" tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from .handles import adapter_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class ParameterState:
    """An adapter parameter with its optimizer state on this rank.

    Attributes:
        name: global name, `...linear_qkv.lora_a`.
        parameter: the model's.
        main: what the inner optimizer steps: the parameter, its fp32 copy, or this rank's flat
            part of either; None if other ranks have it all.
        inner: the torch optimizer.
        group: the inner optimizer's parameter group.
        span: the part's begin and end in the flat parameter; None if `main` is all of it.
        data_group: ranks that share the parts.
    """

    name: str
    parameter: torch.nn.Parameter
    main: Tensor | None = None
    inner: torch.optim.Optimizer | None = None
    group: dict[str, Any] | None = None
    span: tuple[int, int] | None = None
    data_group: Any = None

    @property
    def is_cut(self) -> bool:
        return self.data_group is not None

    @property
    def has_main_copy(self) -> bool:
        """Tells whether there are fp32 values apart from the parameter's own."""
        return self.is_cut or self.main is not self.parameter

    @property
    def state(self) -> dict[str, Any]:
        if self.inner is None:
            return {}
        return self.inner.state.get(self.main, {})

    def set_state(self, state: dict[str, Any]) -> None:
        """Replaces the moments (and a step count per parameter); empty: as before any step."""
        if self.inner is None:
            return
        self.inner.state.pop(self.main, None)
        if state:
            self.inner.state[self.main] = state

    @property
    def step(self) -> int:
        """Optimizer steps so far; torch counts them per parameter, fused Adams per group."""
        own = self.state.get("step", (self.group or {}).get("step", 0))
        return int(own)

    def set_step(self, step: int) -> None:
        if self.group is not None and "step" in self.group:
            self.group["step"] = step


def parameter_states(model_chunks: Sequence[Any], optimizer: Any) -> list[ParameterState]:
    """Returns the adapters' optimizer states, in the order of the layers.

    Raises:
        ConfigError: the optimizer trains something else, or not all adapters, or it is of a kind
            that this code does not know.
    """
    found = {id(p): ParameterState(name, p) for name, p in adapter_parameters(model_chunks)}
    known: set[int] = set()
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(member, "is_stub_optimizer", False):
            continue
        for parameter, values in _members(member):
            if id(parameter) not in found:
                raise ConfigError(
                    f"the optimizer trains a parameter of shape {tuple(parameter.shape)} that is "
                    "no adapter's; call apply_lora before the optimizer is built."
                )
            known.add(id(parameter))
            for name, value in values.items():
                setattr(found[id(parameter)], name, value)
    missing = [state.name for key, state in found.items() if key not in known]
    if missing:
        raise ConfigError(
            f"the optimizer does not train {', '.join(missing[:4])}; build it after apply_lora, "
            "for the same chunks."
        )
    return list(found.values())


def _members(member: Any) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
    if hasattr(member, "model_param_group_index_map"):
        yield from _distributed(member)
        return
    inner = member.optimizer
    copies = {
        id(main): parameter
        for parameters, mains in zip(
            getattr(member, "float16_groups", []), getattr(member, "fp32_from_float16_groups", [])
        )
        for parameter, main in zip(parameters, mains)
    }
    for group in inner.param_groups:
        for main in group["params"]:
            parameter = copies.get(id(main), main)
            yield parameter, {"main": main, "inner": inner, "group": group}


def _distributed(member: Any) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
    if getattr(member.config, "use_precision_aware_optimizer", False):
        raise ConfigError(
            "use_precision_aware_optimizer keeps its states in a form that is not supported for "
            "adapters; set it to False."
        )
    for parameter in (p for buffer in member.buffers for p in buffer.params):
        values: dict[str, Any] = {"data_group": member.data_parallel_group}
        if parameter in member.model_param_group_index_map:
            index, order = member.model_param_group_index_map[parameter]
            group = member.optimizer.param_groups[index]
            part = member._get_model_param_range_map(parameter)["param"]
            values |= {
                "main": group["params"][order],
                "inner": member.optimizer,
                "group": group,
                "span": (part.start, part.end),
            }
        yield parameter, values


def whole_of(state: ParameterState, part: Tensor | None) -> Tensor:
    """Returns values of the parameter's shape, fp32 or wider, from this rank's part of them.

    Communicates: with the distributed optimizer, one all-reduce over its data-parallel ranks.
    """
    if not state.is_cut:
        assert part is not None, "an uncut parameter has its values here"
        return part.detach().view_as(state.parameter)
    flat = torch.zeros(state.parameter.numel(), device=state.parameter.device)
    if state.span is not None and part is not None:
        flat[state.span[0] : state.span[1]] = part.detach().float().flatten()
    dist.all_reduce(flat, group=state.data_group)
    return flat.view_as(state.parameter)


def part_of(state: ParameterState, whole: Tensor) -> Tensor | None:
    """Returns this rank's part of values of the parameter's shape, shaped like `main`."""
    if state.main is None:
        return None
    if state.span is not None:
        whole = whole.flatten()[state.span[0] : state.span[1]]
    return whole.to(state.main.device).reshape(state.main.shape)
