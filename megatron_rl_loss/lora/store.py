"""Several adapters for one base model, one of them live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .handles import check_has_lora
from .optimizer_state import ParameterState, parameter_states


@dataclass
class _Saved:
    """What belongs to one parameter of an adapter that is not live; on the CPU."""

    value: Tensor
    gradient: Tensor | None = None
    main: Tensor | None = None
    state: dict[str, Any] = field(default_factory=dict)
    step: int = 0


_Slot = dict[str, _Saved]


class AdapterStore:
    """Keeps several adapters of the same shapes and swaps one of them into the model.

    A swap moves everything that training has of an adapter: parameters, gradients that wait for
    the next step, fp32 master weights, Adam's moments and step counts. The others wait on the CPU.
    Training A and B in turns gives what training each alone gives, if each has a learning-rate
    scheduler of its own.

    Args:
        model_chunks: with `apply_lora`, in DDP.
        optimizer: Megatron's, for these chunks; no step may have been made.
        name: of the adapter that is in the model now.

    Raises:
        ConfigError: the model has no adapters, or the optimizer trains other parameters too.
    """

    def __init__(self, model_chunks: Sequence[Any], optimizer: Any, *, name: str = "default"):
        check_has_lora(model_chunks)
        _check_gathered(model_chunks)
        self._states = parameter_states(model_chunks, optimizer)
        if any(state.state for state in self._states):
            raise ConfigError(
                "the optimizer has made steps already, so there is no pristine adapter to start "
                "others from; make the AdapterStore right after the optimizer."
            )
        self._pristine = {s.name: _pristine(s) for s in self._states}
        self._slots: dict[str, _Slot | None] = {name: None}
        self._active = name

    @property
    def active(self) -> str:
        """The adapter that is in the model."""
        return self._active

    @property
    def names(self) -> list[str]:
        return list(self._slots)

    def add(self, name: str) -> None:
        """Adds an adapter as it was when the store was made: A's first values, B = 0 if it was,
        no moments, no gradients. It is not live yet."""
        if name in self._slots:
            raise ConfigError(f"there is an adapter {name!r} already; remove it first.")
        self._slots[name] = dict(self._pristine)

    def remove(self, name: str) -> None:
        """Forgets an adapter that is not live."""
        self._check_known(name)
        if name == self._active:
            raise ConfigError(f"adapter {name!r} is live; activate another one first.")
        del self._slots[name]

    @torch.no_grad()
    def activate(self, name: str) -> None:
        """Swaps the adapter into the model, and the live one out. Call it on every rank."""
        self._check_known(name)
        if name == self._active:
            return
        self._slots[self._active] = {state.name: _save(state) for state in self._states}
        slot = self._slots[name]
        assert slot is not None, "only the live adapter has no slot"
        for state in self._states:
            _restore(state, slot[state.name])
        self._slots[name] = None
        self._active = name

    def _check_known(self, name: str) -> None:
        if name not in self._slots:
            raise ConfigError(f"no adapter {name!r}; there are {', '.join(self._slots)}.")


def _check_gathered(model_chunks: Sequence[Any]) -> None:
    for chunk in model_chunks:
        if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            raise ConfigError(
                "overlap_param_gather is on: parameters are only whole in the next forward pass, "
                "too late for a swap. Switch it off."
            )


def _pristine(state: ParameterState) -> _Saved:
    saved = _save(state)
    saved.gradient = None
    saved.step = 0
    return saved


def _save(state: ParameterState) -> _Saved:
    gradient = getattr(state.parameter, "main_grad", state.parameter.grad)
    main = state.main if state.has_main_copy else None
    return _Saved(
        _copy(state.parameter),
        None if gradient is None else _copy(gradient),
        None if main is None else _copy(main),
        {k: _copy(v) if isinstance(v, Tensor) else v for k, v in state.state.items()},
        state.step,
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _restore(state: ParameterState, saved: _Saved) -> None:
    state.parameter.copy_(saved.value)
    if hasattr(state.parameter, "main_grad"):
        # after a step of the fp32 optimizer it is main_grad itself, which the next backward pass
        # would then add to itself
        state.parameter.grad = None
    if state.main is not None and saved.main is not None:
        state.main.copy_(saved.main)
    gradient = getattr(state.parameter, "main_grad", state.parameter.grad)
    if gradient is not None:
        gradient.zero_() if saved.gradient is None else gradient.copy_(saved.gradient)
    state.set_state({k: _moved(k, v, state) for k, v in saved.state.items()})
    state.set_step(saved.step)


def _moved(name: str, value: Any, state: ParameterState) -> Any:
    """Returns new memory for the optimizer; torch's Adam keeps its step counts on the CPU."""
    if not isinstance(value, Tensor):
        return value
    assert state.main is not None, "only a main tensor has a state"
    device = value.device if name == "step" else state.main.device
    return value.to(device, copy=True)
