"""Loads a PEFT folder, of this package or made elsewhere, into a model's adapters.

Query, key and value share one A here, as do gate and up. Where a folder has different ones they
are stacked, with B block by block: rank r of each becomes rank 3 r (2 r) of the fused layer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import WeightsError
from ..mcore.hf_files import SafetensorsFolder, listed
from ..mcore.model_spec import ModelSpec
from ..mcore.weights_gather import find_owners
from ..mcore.weights_map import WeightRule
from .handles import AdapterHandle, adapters, check_has_lora, whole_shapes
from .init import initial_a
from .names import unwrapped
from .peft_export import ADAPTER_FILE, CONFIG_FILE, PREFIX
from .peft_tensors import FUSED_KINDS, adapter_rules

_KEY = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight")
# Settings that change what A and B mean, or train something else; the value is the only one read.
_ONLY = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
}


def load_peft(folder: str | Path, model_chunks: Sequence[Any], spec: ModelSpec) -> None:
    """Copies a PEFT folder's adapters (layout "per_expert") into the model's.

    Everything is checked before anything changes. Call it before the optimizer is built: it
    copies the adapters into its fp32 master weights. A rank that the folder does not fill is
    free to train: its rows of A are as `apply_lora` made them, its columns of B are 0. Scales
    that differ from the model's go into B.

    Args:
        folder: with `adapter_model.safetensors` and `adapter_config.json`.
        model_chunks: this rank's chunks, after `apply_lora`.
        spec: the model's architecture.

    Raises:
        ConfigError: the model has no adapters.
        WeightsError: something is missing, unexpected, of another shape, or does not fit the
            adapters' rank; the message names all of it, on every rank, and nothing has changed.

    Communicates: small gathers of names and problems over the ranks.
    """
    check_has_lora(model_chunks)
    rules = adapter_rules(spec)
    own = list(adapters(model_chunks))
    ranks = {handle.name: whole_shapes(handle)[0][0] for handle in own}
    owners = find_owners(ranks)
    source, problems = _open(Path(folder))
    if source is not None:
        problems += list(source.problems(rules, set(owners)))
    if source is not None and not problems:
        problems += [p for h in own for p in _rank_problem(source.parts(rules[h.name]), h)]
    _raise_everywhere(folder, problems)
    assert source is not None
    config = next(unwrapped(chunk).lora_config for chunk in model_chunks)
    with torch.no_grad():
        for handle in own:
            _fill(handle, rules[handle.name], source.parts(rules[handle.name]), config)


@dataclass(frozen=True)
class Part:
    """The adapter of one of the layers that are fused here.

    Attributes:
        a, b: [r, in] and [out, r].
        scale: what B (A x) is multiplied by.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class PeftFolder:
    """A PEFT folder; tensors are read when they are asked for.

    Attributes:
        config: of `adapter_config.json`.
        tensors: of `adapter_model.safetensors`.
    """

    config: Mapping[str, Any]
    tensors: SafetensorsFolder

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Returns r and the scale of a layer, by PEFT's rules for patterns."""
        rank = self._pattern("rank_pattern", module, self.config["r"])
        alpha = self._pattern("alpha_pattern", module, self.config["lora_alpha"])
        return rank, alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _pattern(self, name: str, module: str, default: Any) -> Any:
        for key, value in (self.config.get(name) or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        return default

    def parts(self, rule: WeightRule) -> list[Part | None]:
        """Returns the adapters of a rule's layers, None for layers that have none."""
        return [self._part(name.removesuffix(".weight")) for name in rule.hf_shapes]

    def _part(self, module: str) -> Part | None:
        a, b = (f"{PREFIX}{module}.lora_{letter}.weight" for letter in "AB")
        if a not in self.tensors:
            return None
        return Part(self.tensors[a], self.tensors[b], self.rank_and_scale(module)[1])

    def problems(self, rules: Mapping[str, WeightRule], adapted: set[str]) -> Iterator[str]:
        """Says how the folder differs from what the model's adapters need.

        Args:
            rules: of all layers that can have an adapter.
            adapted: global names of those that have one, over all ranks.
        """
        yield from self._config_problems()
        shapes = {
            hf_name.removesuffix(".weight"): (name, shape)
            for name, rule in rules.items()
            for hf_name, shape in rule.hf_shapes.items()
        }
        found = self._modules()
        here = {module for module in found if module in shapes}
        unknown = [n for m, names in found.items() if m not in shapes for n in names]
        yield from _listed("unexpected, as no layer of that name takes an adapter", unknown)
        yield from _listed(
            "the model has no adapter for", [m for m in here if shapes[m][0] not in adapted]
        )
        yield from _listed("missing", self._missing(here | set(self._targets(shapes)), found))
        filled = {shapes[module][0] for module in here}
        yield from _listed("nothing for these adapters of the model", adapted - filled)
        for module in sorted(here):
            yield from self._shape_problems(module, shapes[module][1], found[module])

    def _config_problems(self) -> Iterator[str]:
        for name, values in _ONLY.items():
            if name in self.config and self.config[name] not in values:
                yield f"{CONFIG_FILE}: {name}={self.config[name]!r} is not supported"
        init = self.config.get("init_lora_weights")
        if isinstance(init, str) and re.match("pissa|olora|corda|loftq", init.lower()):
            yield f"{CONFIG_FILE}: init_lora_weights={init!r} changed the base model's weights"

    def _modules(self) -> dict[str, list[str]]:
        """Returns the tensors' names by layer; a name of another form counts as a layer."""
        modules: dict[str, list[str]] = {}
        for name in self.tensors:
            match = _KEY.fullmatch(name)
            modules.setdefault(match[1] if match else name, []).append(name)
        return modules

    def _targets(self, shapes: Mapping[str, Any]) -> Iterator[str]:
        """Yields the layers that the config says have adapters."""
        targets = self.config.get("target_modules") or []
        if isinstance(targets, str) or self.config.get("layers_to_transform") is not None:
            return
        excluded = self.config.get("exclude_modules") or []
        for module in shapes:
            if _named(module, targets) and not _named(module, excluded):
                yield module

    @staticmethod
    def _missing(modules: set[str], found: Mapping[str, list[str]]) -> list[str]:
        wanted = [f"{PREFIX}{m}.lora_{letter}.weight" for m in modules for letter in "AB"]
        there = {name for names in found.values() for name in names}
        return [name for name in wanted if name not in there]

    def _shape_problems(
        self, module: str, shape: tuple[int, ...], names: Sequence[str]
    ) -> Iterator[str]:
        rank, _ = self.rank_and_scale(module)
        wanted = {"A": (rank, shape[1]), "B": (shape[0], rank)}
        for name in names:
            letter = name.removesuffix(".weight")[-1]
            actual, dtype = self.tensors.header(name)
            if actual != wanted[letter]:
                hint = " (transposed)" if actual == wanted[letter][::-1] else ""
                yield f"{name} has shape {actual}{hint}, expected {wanted[letter]}"
            if not isinstance(dtype, torch.dtype):
                yield f"{name} has dtype {dtype}; only plain floating-point numbers load"


def _named(module: str, targets: Sequence[str]) -> bool:
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _listed(what: str, names: Any) -> Iterator[str]:
    if names:
        yield f"{what}: {listed(sorted(names))}"


def _open(folder: Path) -> tuple[PeftFolder | None, list[str]]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        tensors = SafetensorsFolder(folder, single_file=ADAPTER_FILE)
    except (OSError, ValueError, WeightsError) as error:
        return None, [f"cannot be read: {error}"]
    lacking = [name for name in ("r", "lora_alpha") if name not in config]
    if lacking:
        return None, [f"{CONFIG_FILE} lacks {', '.join(lacking)}"]
    return PeftFolder(config, tensors), []


def _raise_everywhere(folder: str | Path, problems: list[str]) -> None:
    """Raises on every rank if any rank has a problem."""
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, problems)
    lines = list(dict.fromkeys(problem for part in everybodys for problem in part))
    if lines:
        raise WeightsError(f"{folder} was not loaded:\n  " + "\n  ".join(lines))


def _is_shared(parts: Sequence[Part]) -> bool:
    return all(torch.equal(part.a, parts[0].a) for part in parts)


def _needed_rank(parts: Sequence[Part]) -> int:
    if _is_shared(parts):
        return parts[0].a.shape[0]
    return sum(part.a.shape[0] for part in parts)


def _rank_problem(parts: Sequence[Part | None], handle: AdapterHandle) -> Iterator[str]:
    needed, rank = _needed_rank([part for part in parts if part]), whole_shapes(handle)[0][0]
    if needed > rank:
        yield (
            f"{handle.name} needs rank {needed} (layers that are fused here have different A), the "
            f"model's adapter has {rank}; set lora.rank (for experts lora.expert_rank) to {needed}"
        )


def _fill(
    handle: AdapterHandle, rule: WeightRule, parts: Sequence[Part | None], config: Any
) -> None:
    """Puts a layer's adapters into the model's; they fit."""
    (rank, columns), _ = whole_shapes(handle)
    a = initial_a(handle.name, (rank, columns), init=config.init, seed=config.seed)
    bs = [torch.zeros(shape[0], rank) for shape in rule.hf_shapes.values()]
    shared = _is_shared([part for part in parts if part])
    start = 0
    for part, b in zip(parts, bs, strict=True):
        if part is None:
            continue
        rows = slice(start, start + part.a.shape[0])
        a[rows] = part.a.float()
        b[:, rows] = part.b.float() * (part.scale / handle.scale)
        start = 0 if shared else rows.stop
    sharding = handle.sharding
    if sharding.a_dim is not None:
        a = a.chunk(sharding.size, sharding.a_dim)[sharding.rank]
    handle.a.copy_(a)
    handle.b.copy_(_own_b(handle, rule, bs))


def _own_b(handle: AdapterHandle, rule: WeightRule, bs: Sequence[Tensor]) -> Tensor:
    """Returns this rank's part of B."""
    sharding = handle.sharding
    if sharding.b_dim == 0:
        return rule.layout.shard(bs, sharding.rank, sharding.size)
    b = rule.layout.shard(bs, 0, 1) if handle.kind in FUSED_KINDS else bs[0]
    return b if sharding.b_dim is None else b.chunk(sharding.size, 1)[sharding.rank]
