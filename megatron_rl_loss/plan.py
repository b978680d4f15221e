"""The memory plan: megatron-rl-loss plan CONFIG [more.yaml key=value ...] [--gpus N]

Counts parameters and bytes per GPU of a config's model and layout, from the model's config.json
alone: no weights, no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from .config.load import load_config
from .config.schema import Config
from .errors import ConfigError, InputError, LayoutError, MegatronRLLossError
from .mcore.memory import Adapters, Layout, Memory, Training, count_parameters, memory
from .mcore.model_spec import ModelSpec, model_spec_from_hf

GB = 1e9
KINDS = {
    "weights": "weights",
    "adapters": "adapters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "reference": "reference model",
    "critic": "critic",
    "activations": "activations (estimate)",
}
NOT_COUNTED = (
    "Not counted: CUDA context and communication buffers (about 5 GB), fragments, an embedded "
    "sampler's model."
)
# (tp, ep, pp) that --table compares, as far as they fit the model and the GPUs
TABLE_LAYOUTS = ((1, 8, 1), (2, 8, 1), (4, 8, 1), (8, 8, 1), (1, 4, 2), (2, 4, 2), (1, 1, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 2 for an error of the user's."""
    options = _parser().parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides, checked=False)
        print("\n".join(_lines(config, options)))
    except MegatronRLLossError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-rl-loss plan", description=__doc__)
    parser.add_argument("config", help="YAML file; a part of a run's config is enough")
    parser.add_argument("overrides", nargs="*", help="more YAML files, section.key=value")
    parser.add_argument("--gpus", type=int, help="all GPUs; by default the layout's fewest")
    parser.add_argument("--gpu-gb", type=float, help="memory of one GPU, to compare with")
    parser.add_argument(
        "--tokens",
        type=int,
        help="tokens in a micro-batch; by default batch.max_tokens_per_microbatch",
    )
    parser.add_argument("--table", action="store_true", help="compare layouts and what is trained")
    return parser


def _lines(config: Config, options: argparse.Namespace) -> Iterator[str]:
    for name in ("gpus", "gpu_gb", "tokens"):
        _check_above_0("--" + name.replace("_", "-"), getattr(options, name))
    spec = read_spec(config.model.path)
    layout = layout_of(config, options.gpus)
    adapters, training = adapters_of(config), training_of(config, options.tokens)
    layout.check(spec)
    yield from _parameter_lines(spec, adapters, training)
    yield ""
    yield from _memory_lines(memory(spec, layout, adapters, training), layout, options.gpu_gb)
    if options.table:
        yield ""
        yield from table_lines(spec, layout.world, adapters, training)
    yield ""
    yield NOT_COUNTED


def _check_above_0(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{option} must be above 0 and finite, got {value}.")


def read_spec(path: str | Path) -> ModelSpec:
    """Returns the architecture of a folder that has at least a `config.json`.

    Raises:
        InputError: there is none.
        ConfigError: it is not supported.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise InputError(
            f"model.path: {file} does not exist; the plan reads the config.json of a Hugging Face "
            "checkpoint (configs/model has some without weights)."
        )
    try:
        hf_config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}.") from error
    return model_spec_from_hf(hf_config)


def layout_of(config: Config, gpus: int | None) -> Layout:
    """Returns the config's layout on `gpus` GPUs, or on the fewest that it needs."""
    sizes = config.parallel
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    cp, ep = sizes.context_parallel_size, sizes.expert_model_parallel_size
    etp = sizes.expert_tensor_parallel_size or tp
    fewest = pp * max(tp * cp, ep * etp)
    return Layout(gpus or fewest, tp, pp, cp, ep, etp, sizes.sequence_parallel)


def adapters_of(config: Config) -> Adapters | None:
    """Returns which layers have adapters, None if all weights are trained."""
    lora = config.lora
    if lora.rank is None:
        return None
    if isinstance(lora.targets, str) and lora.targets not in ("attention", "all-linear"):
        raise ConfigError(
            f"lora.targets must be attention, all-linear, or a list of layer names: "
            f"{lora.targets!r}."
        )
    return Adapters(lora.rank, lora.targets, lora.expert_rank, tuple(lora.exclude))


def training_of(config: Config, tokens: int | None) -> Training:
    """Returns how the config trains, as far as memory goes."""
    budget = config.loss.memory_budget_bytes
    return Training(
        dtype=config.model.dtype,
        distributed_optimizer=config.optimizer.use_distributed_optimizer,
        reference=bool(config.loss.kl_coef or config.reward.kl_coef),
        critic=config.advantage.estimator == "gae",
        recompute=config.model.recompute,
        tokens=tokens or config.batch.max_tokens_per_microbatch,
        logits_budget=2 * 2**30 if budget is None else budget,
    )


def _parameter_lines(
    spec: ModelSpec, adapters: Adapters | None, training: Training
) -> Iterator[str]:
    alone = Layout()
    found = count_parameters(spec, alone, adapters)
    yield f"{spec.architecture}: {found.base.total / 1e9:.3f} B parameters" + (
        f", {found.base.dense / 1e9:.3f} B outside the experts" if spec.moe else ""
    )
    if adapters is None:
        return
    file = count_parameters(spec, alone, adapters, split=True).adapters.total
    yield (
        f"adapters: {found.adapters.total / 1e6:.1f} M parameters trained, attention and dense "
        f"{found.adapters.dense / 1e6:.1f} M, experts {found.adapters.experts / 1e6:.1f} M; "
        f"as a PEFT file {file / 1e6:.1f} M, {file * 2 / GB:.2f} GB in bf16"
    )


def _memory_lines(found: Memory, layout: Layout, gpu_gb: float | None) -> Iterator[str]:
    yield (
        f"{layout.world} GPUs: TP {layout.tp}, PP {layout.pp}, CP {layout.cp}, EP {layout.ep}, "
        f"expert-TP {layout.etp}"
    )
    yield "GB (1e9 bytes) on the fullest GPU:"
    for name, title in KINDS.items():
        value = getattr(found, name)
        if value is None:
            yield f"  {title:<24} unknown: pass --tokens"
        elif value or name == "weights":
            yield f"  {title:<24} {value / GB:8.2f}"
    yield f"  {'total':<24} {found.total / GB:8.2f}"
    if gpu_gb is not None:
        left = gpu_gb - found.total / GB
        verdict = "left" if left >= 0 else "too much"
        yield f"  {'of ' + format(gpu_gb, 'g') + ' GB':<24} {abs(left):8.2f} {verdict}"


def table_lines(
    spec: ModelSpec, world: int, adapters: Adapters | None, training: Training
) -> Iterator[str]:
    """Yields a table of weights and training states per GPU, without activations.

    One line for each layout that fits; the base model, what adapters add to it for three choices
    of targets (of the config's rank, 32 without one), and training all weights.
    """
    rank = 32 if adapters is None else adapters.rank
    top_k = spec.moe.top_k if spec.moe else 1
    choices = {f"+attention r{rank}": Adapters(rank), f"+all-linear r{rank}": Adapters(
        rank, "all-linear"
    )}  # fmt: skip
    if spec.moe:
        small = max(1, rank // top_k)
        choices[f"+all-linear r{rank}/experts r{small}"] = Adapters(rank, "all-linear", small)
    plain = replace(training, tokens=None, reference=False, critic=False)
    plain = replace(plain, distributed_optimizer=True)
    titles = ["layout", "base", *choices, "all weights"]
    rows = [titles]
    for layout in _table_layouts(spec, world):
        base = memory(spec, layout, Adapters(1, ()), plain).weights
        cells = [f"TP{layout.tp} EP{layout.ep} PP{layout.pp}", f"{base / GB:.1f}"]
        for choice in choices.values():
            cells.append(f"{(memory(spec, layout, choice, plain).states - base) / GB:.2f}")
        cells.append(f"{memory(spec, layout, None, plain).states / GB:.0f}")
        rows.append(cells)
    yield (
        f"GB per GPU on {world} GPUs, {plain.dtype}, distributed optimizer, expert-TP 1, no "
        "activations:"
    )
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _table_layouts(spec: ModelSpec, world: int) -> Iterator[Layout]:
    for tp, ep, pp in TABLE_LAYOUTS:
        layout = Layout(world, tp, pp, 1, ep if spec.moe else 1, 1, tp > 1)
        if (ep > 1) != (world > 1 and spec.moe is not None):
            continue
        try:
            layout.check(spec)
        except LayoutError:
            continue
        yield layout


if __name__ == "__main__":
    raise SystemExit(main())
