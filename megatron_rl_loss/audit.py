"""The audit: megatron-rl-loss audit [CONFIG] [key=value ...]

Trains nothing. It runs a small made-up mini-batch through Megatron's own schedule, in the layout
of the config and on the ranks it is started on (alone, or under torchrun), and compares every
gradient with one that no scaling of Megatron's has touched. Exit status: 0 all right, 1 something
is wrong (or, with --self-test, a planted mistake was not named), 2 an error.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .config.load import load_config
from .config.schema import Config
from .config.validate import check_layout
from .errors import ConfigError, InputError, MegatronRLLossError

if TYPE_CHECKING:
    from .mcore.audit_run import Audit
    from .mcore.audit_verdict import Cut, Finding
    from .mcore.model_spec import ModelSpec

TIMEOUT_S = 120
# A wrong factor is off by a third or more; bf16 rounds each gradient by about a hundredth.
TOLERANCES = {"fp32": 1e-3, "bf16": 5e-2}
_WITHOUT_CONFIG = ("rollouts.source=files", "rollouts.path=none", "rollouts.per_step=8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    config_file, settings = _config_and_settings(options.settings)
    try:
        config = load_config(config_file, settings)
        check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
        if options.self_test and (options.model or options.forward_step):
            raise ConfigError("--self-test takes the stand-in model and the package's own step.")
        run = self_test if options.self_test else audit
        text, status = run(config, use_model=options.model, forward_step=options.forward_step)
    except MegatronRLLossError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if int(os.environ.get("RANK", "0")) == 0:
        print(text, flush=True)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-rl-loss audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "settings", nargs="*", metavar="CONFIG | key=value", help="as for megatron-rl-loss train"
    )
    parser.add_argument(
        "--model", action="store_true", help="the config's model, not a tiny stand-in"
    )
    parser.add_argument(
        "--forward-step",
        metavar="my_pkg.my_mod:fn",
        help="audit fn(data_iterator, model) instead of the package's forward step",
    )
    parser.add_argument(
        "--self-test", action="store_true", help="plant each known mistake and show its verdict"
    )
    return parser


def _config_and_settings(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Without a config file, rollouts need not come from anywhere."""
    if words and "=" not in words[0]:
        return words[0], list(words[1:])
    return None, [*_WITHOUT_CONFIG, *words]


def audit(
    config: Config, *, use_model: bool = False, forward_step: str | None = None
) -> tuple[str, int]:
    """Measures this layout and returns the report and the exit status.

    Args:
        config: its parallel, loss, lora, model.dtype and optimizer.use_distributed_optimizer
            settings are read; with `use_model` also its model.
        use_model: the config's model, not a stand-in.
        forward_step: import path of a forward step of somebody else's.

    Raises:
        MegatronRLLossError: the layout, a setting or a forward step cannot be run.

    Communicates: on every rank of the world; a wait of more than 120 s raises.
    """
    from .mcore.audit_gradients import UnguardedStep

    _start(config)
    foreign = None if forward_step is None else _guarded(forward_step)
    build = _model_audit if use_model else _stand_in_audit
    made = build(config, policy_only=foreign is not None)
    found = made.set_up_findings()
    ours = UnguardedStep(made.reference_step) if found else made.reference_step
    cuts, measured = made.run(foreign or ours)
    found += [f for f in measured if not _covered(f, found)]
    _stop()
    return _report(config, cuts, found, use_model, forward_step), 1 if found else 0


def self_test(config: Config, **ignored: Any) -> tuple[str, int]:
    """Plants each known mistake and returns a table of what the audit named, and exit status."""
    from .mcore.audit_mistakes import MISTAKES, plant

    _start(config)
    right = _stand_in_audit(config)
    lines = [_row("planted", "verdict", "named")]
    missed = 0
    for mistake in MISTAKES:
        if not mistake.shows(right.sizes):
            lines.append(_row(mistake.name, "no effect here", "(this layout cannot show it)"))
            continue
        found = plant(mistake, right, partial(_stand_in_audit, config))
        names = [name for finding in found for name in finding.mistakes]
        caught = mistake.expected in names
        missed += not caught
        lines.append(
            _row(mistake.name, "caught" if caught else "NOT CAUGHT", " or ".join(names) or "-")
        )
    clean = not right.run(right.reference_step)[1]
    missed += not clean
    lines.append(_row("nothing", "right" if clean else "FALSE ALARM", ""))
    _stop()
    return "\n".join([_layout_line(config), *lines]), 1 if missed else 0


def _covered(finding: Finding, found: Sequence[Finding]) -> bool:
    named = {name for other in found for name in other.mistakes}
    return bool(named & set(finding.mistakes))


def _start(config: Config) -> None:
    import torch.distributed as dist

    from .mcore.ranks import start_ranks, stop_ranks
    from .recipe import parallel_sizes

    if dist.is_initialized():
        stop_ranks()
    start_ranks(**parallel_sizes(config), seed=config.run.seed, timeout_s=TIMEOUT_S)


def _stop() -> None:
    from .mcore.ranks import stop_ranks

    stop_ranks()


def _stand_in_audit(config: Config, policy_only: bool = False, **overrides: Any) -> Audit:
    """Returns the audit of a tiny model with the config's parallel sizes, dtype and adapters.

    Args:
        policy_only: compare with the gradient of any policy loss, not with the config's loss.
        overrides: of `stand_in_chunks`.
    """
    from .audit_stand_in import stand_in_chunks, stand_in_spec
    from .mcore.model_layout import padded_vocab_size

    spec = stand_in_spec(config)
    if policy_only:  # Megatron's own cross-entropy does not mask the padding of a vocabulary
        tp = config.parallel.tensor_model_parallel_size
        spec = replace(spec, vocab_size=padded_vocab_size(spec.vocab_size, tp))
    return _audit_of(config, stand_in_chunks(config, spec, **overrides), spec, policy_only)


def _model_audit(config: Config, policy_only: bool = False) -> Audit:
    from .build import base_model, build_trainer
    from .mcore.model_spec import model_spec_from_hf

    base = base_model(config)
    spec = model_spec_from_hf(base.hf_config)
    chunks = build_trainer(config, spec, base.weights).chunks
    return _audit_of(config, chunks, spec, policy_only)


def _audit_of(config: Config, chunks: Sequence[Any], spec: ModelSpec, policy_only: bool) -> Audit:
    from .audit_stand_in import fill_adapters
    from .build import build_forward_step
    from .mcore.audit_gradients import objective_for_any_policy_loss
    from .mcore.audit_run import make_audit
    from .mcore.groups import parallel_groups

    fill_adapters(chunks)
    step = build_forward_step(config, spec)
    if policy_only:
        step.objective = objective_for_any_policy_loss()
    loss = config.loss
    return make_audit(
        chunks,
        step,
        parallel_groups(),
        vocab_size=spec.vocab_size,
        reduction={
            "reduction": loss.reduction,
            "max_seq_len": loss.max_seq_len,
            "count_empty_sequences": loss.count_empty_sequences,
        },
        tolerance=TOLERANCES[config.model.dtype],
    )


def _imported(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    try:
        fn = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise ConfigError(
            f"cannot import the forward step {path!r}: {error}. Expected 'my_pkg.my_mod:fn'."
        ) from error
    if not callable(fn):
        raise ConfigError(f"the forward step {path!r} is no function but {type(fn).__name__}.")
    return fn


def _guarded(path: str) -> Callable[..., Any]:
    """Returns the forward step; whatever it raises is an error, not a wrong gradient."""
    fn = _import_together(path)

    def step(*args: Any, **kwargs: Any) -> Any:
        try:
            result = fn(*args, **kwargs)
        except MegatronRLLossError:
            raise
        except Exception as error:
            traceback.print_exc()
            raise InputError(
                f"the forward step {path!r} raised {type(error).__name__}: {error}"
            ) from error
        if not (isinstance(result, tuple) and len(result) == 2 and callable(result[1])):
            raise InputError(
                f"the forward step {path!r} returned {type(result).__name__}, expected a tuple "
                "(output, loss_func), as Megatron does."
            )
        return result

    return step


def _import_together(path: str) -> Callable[..., Any]:
    """Imports the forward step; if that fails on one rank, all raise."""
    import torch.distributed as dist

    from .parallel.agreement import raise_together

    return raise_together(lambda: _imported(path), dist.group.WORLD)


def _report(
    config: Config,
    cuts: Sequence[Cut],
    found: Sequence[Finding],
    use_model: bool,
    forward_step: str | None,
) -> str:
    model = config.model.path if use_model else "tiny stand-in"
    lines = [
        _layout_line(config),
        f"model      {model} in {config.model.dtype}",
        f"step       {forward_step or f'megatron_rl_loss, {config.loss.name}'}",
        "",
        f"{'micro-batches':<14}{'parameters':<16}{'factor':>10}{'residual':>11}",
    ]
    for cut in cuts:
        lines += [
            f"{cut.num_microbatches:<14}{kind:<16}{f.factor:>10.4f}{f.residual:>11.1e}"
            for kind, f in cut.factors.items()
        ]
    lines.append("")
    lines += [f"WRONG ({' or '.join(f.mistakes)}): {f.text}." for f in found]
    return "\n".join([*lines, *([] if found else ["right: every factor is 1."])])


def _layout_line(config: Config) -> str:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ep, etp = (
        config.parallel.expert_model_parallel_size,
        config.parallel.expert_tensor_parallel_size,
    )
    sizes: Mapping[str, Any] = {
        "dp": check_layout(config, world_size),
        "tp": config.parallel.tensor_model_parallel_size,
        "pp": config.parallel.pipeline_model_parallel_size,
        "vpp": config.parallel.virtual_pipeline_model_parallel_size or 1,
        "cp": config.parallel.context_parallel_size,
        **({"ep": ep} if ep > 1 else {}),
        **({} if etp is None else {"etp": etp}),
    }
    text = ", ".join(f"{name} {size}" for name, size in sizes.items())
    sp = ", sequence parallel" if config.parallel.sequence_parallel else ""
    return f"layout     {world_size} ranks: {text}{sp}"


def _row(name: str, verdict: str, names: str) -> str:
    return f"{name:<22}{verdict:<16}{names}".rstrip()


if __name__ == "__main__":
    raise SystemExit(main())
