"""The main job: python -m megatron_rl_loss.train CONFIG [key=value ...]

Reads a config, trains through the real Megatron-Core on GPUs or CPU ranks (alone, or under
torchrun), and ends with a table and a plot of reward and loss.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .config.load import load_config, save_config, to_yaml
from .config.schema import Config
from .config.validate import check_layout, rollouts_per_step
from .errors import ConfigError, MegatronRLLossError
from .signals import StopSignals, Watchdog, exit_now, rank_name

if TYPE_CHECKING:
    from .between_steps import BetweenSteps
    from .build import Job
    from .report import RunLog

CONFIG_FILE = "config.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 2 for an error of the user's.

    One of several ranks that fails ends its process at once, so that the launcher ends the others.
    """
    try:
        return _main(arguments)
    except MegatronRLLossError as error:
        print(f"{_prefix()}error: {error}", file=sys.stderr, flush=True)
        code = 2
    except Exception:
        if not rank_name():
            raise
        text = traceback.format_exc()
        print(f"{_prefix()}error:\n{text}", file=sys.stderr, flush=True)
        code = 1
    if rank_name():
        exit_now(code)
    return code


def _prefix() -> str:
    return f"{rank_name()}: " if rank_name() else ""


def _main(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_intermixed_args(arguments)
    # Megatron warns of every optional package that is not there
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    config = load_config(options.config, options.settings)
    check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
    if options.print_config:
        print(to_yaml(config), end="")
    if options.dry_run:
        from .build import check_inputs

        check_inputs(config)
        print(dry_run_text(config))
    if not (options.print_config or options.dry_run):
        train(config)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-rl-loss train", description=__doc__)
    parser.add_argument("config", help="a YAML file, e.g. configs/demo.yaml")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="e.g. optimizer.lr=1e-5")
    parser.add_argument("--print-config", action="store_true", help="show all settings and stop")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check settings, layout, paths, task and reward function; load no weights",
    )
    return parser


def dry_run_text(config: Config) -> str:
    """Returns what the run would do."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    dp_size = check_layout(config, world_size)
    batch = config.batch
    size = batch.micro_batch_size or f"at most {batch.max_tokens_per_microbatch} tokens"
    return "\n".join(
        [
            f"model      {config.model.path} in {config.model.dtype}",
            f"layout     {world_size} ranks = {dp_size} data parallel x {world_size // dp_size}",
            f"rollouts   {rollouts_per_step(config)} per step from {config.rollouts.source}",
            f"loss       {config.loss.name}, {config.loss.reduction}",
            f"training   {config.run.steps} steps of {batch.mini_batches_per_step * batch.epochs} "
            f"updates, micro-batches of {size}",
            f"output     {config.run.dir}",
        ]
    )


def train(config: Config) -> None:
    """Trains as the config says; returns when all steps are done, or a signal asked to stop.

    Raises:
        MegatronRLLossError: a setting, a rollout or the layout is wrong.
    """
    rank = int(os.environ.get("RANK", "0"))
    with StopSignals() as signals, Watchdog(config.run.hang_timeout, rank) as watchdog:
        import torch.distributed as dist

        from .build import check_inputs

        check_inputs(config)
        rows = _train(config, signals, watchdog)
        dist.barrier()
    if rank == 0 and rows:
        print_result(config, rows)
    dist.destroy_process_group()


def _train(config: Config, signals: StopSignals, watchdog: Watchdog) -> list[Mapping[str, float]]:
    """Returns the metrics of all steps, those before a resume included."""
    from .between_steps import STOPPED_FILE, BetweenSteps
    from .build import build_job, export_trained

    folder = Path(config.run.dir)
    with _run_log(config) as log:
        if int(os.environ.get("RANK", "0")) == 0:
            save_config(config, folder / CONFIG_FILE)
            (folder / STOPPED_FILE).unlink(missing_ok=True)
        job = build_job(config)
        between = BetweenSteps(folder, config.run.steps, job.checkpoints, signals, watchdog)
        done, earlier = _resume(config, job, log)
        signals.arm()
        try:
            rows = run_steps(job, log, config, between, done)
        except Exception:
            between.give_way()
            raise
        if config.run.export and done + len(rows) == config.run.steps:
            export_trained(config, job)
        return [*earlier, *rows]


def _resume(config: Config, job: Job, log: RunLog) -> tuple[int, list[dict[str, float]]]:
    """Returns how many steps are done, and on rank 0 their metrics."""
    if job.checkpoints is None:
        return 0, []
    done = job.checkpoints.resume(config.checkpoint.resume)
    return done, log.forget_after(done)


def _run_log(config: Config) -> RunLog:
    from .report import RunLog

    logging = config.logging
    return RunLog(
        config.run.dir,
        active=int(os.environ.get("RANK", "0")) == 0,
        total_steps=config.run.steps,
        jsonl=logging.jsonl,
        tensorboard=logging.tensorboard,
        wandb=logging.wandb,
        wandb_project=logging.wandb_project,
        wandb_mode=logging.wandb_mode,
        progress=logging.progress,
    )


def run_steps(
    job: Job, log: RunLog, config: Config, between: BetweenSteps, done: int = 0
) -> list[dict[str, float]]:
    """Runs the steps after the first `done` and returns their metrics."""
    from .rollout_source import Stopwatch

    rows = []
    steps, log_interval = config.run.steps, config.run.log_interval
    for step in range(done, steps):
        if between.must_stop(step):
            break
        watch = Stopwatch()
        rollouts = job.source.rollouts(step)
        rollout_seconds = watch.read()
        between.progress()
        metrics = job.trainer.train_on(rollouts)
        metrics |= _speed(rollout_seconds, watch.read(), sum(r.num_tokens for r in rollouts))
        if (step + 1) % log_interval == 0 or step + 1 == steps:
            log.log(step + 1, metrics)
        rows.append({"step": step + 1, **metrics})
        between.after_step(step + 1)
    between.finish()
    return rows


def _speed(rollout_seconds: float, train_seconds: float, num_tokens: int) -> dict[str, float]:
    """Returns seconds, and the tokens (prompt and response) trained on per second of training."""
    return {
        "rollout_seconds": rollout_seconds,
        "train_seconds": train_seconds,
        "seconds": rollout_seconds + train_seconds,
        "tokens_per_second": num_tokens / train_seconds,
    }


def print_result(config: Config, rows: Sequence[Mapping[str, float]]) -> None:
    """Prints a table and draws the plot of a finished run."""
    from .build import EXPORT_FOLDER
    from .report import METRICS_FILE, plot_run, summary_table

    print(summary_table(rows))
    if config.logging.jsonl:
        print(f"\nmetrics: {Path(config.run.dir) / METRICS_FILE}")
    if config.run.export and rows[-1]["step"] == config.run.steps:
        print(f"model:   {Path(config.run.dir) / EXPORT_FOLDER}")
    if not config.logging.plot:
        return
    try:
        print(f"plot:    {plot_run(config.run.dir, rows)}")
    except ConfigError as error:
        print(f"no plot: {error}")


if __name__ == "__main__":
    sys.exit(main())
