"""The main job: python -m megatron_rl_loss.train CONFIG [key=value ...]

Reads a config, trains through the real Megatron-Core on GPUs or CPU ranks (alone, or under
torchrun), and ends with a table and a plot of reward and loss.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .config.load import load_config, save_config, to_yaml
from .config.schema import Config
from .config.validate import check_layout, rollouts_per_step
from .errors import ConfigError, MegatronRLLossError

if TYPE_CHECKING:
    from .build import Job
    from .report import RunLog

CONFIG_FILE = "config.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 2 for an error of the user's."""
    options = _parser().parse_intermixed_args(arguments)
    # Megatron warns of every optional package that is not there
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    try:
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
    except MegatronRLLossError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-rl-loss train", description=__doc__)
    parser.add_argument("config", help="a YAML file, e.g. configs/demo.yaml")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="e.g. optimizer.lr=1e-5")
    parser.add_argument("--print-config", action="store_true", help="show all settings and stop")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check settings, layout, paths, task and reward function; load no model",
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
    """Trains as the config says; returns when all steps are done.

    Raises:
        MegatronRLLossError: a setting, a rollout or the layout is wrong.
    """
    import torch.distributed as dist

    from .build import build_job, check_inputs
    from .report import RunLog

    check_inputs(config)

    rank = int(os.environ.get("RANK", "0"))
    logging = config.logging
    with RunLog(
        config.run.dir,
        active=rank == 0,
        total_steps=config.run.steps,
        jsonl=logging.jsonl,
        tensorboard=logging.tensorboard,
        wandb=logging.wandb,
        wandb_project=logging.wandb_project,
        wandb_mode=logging.wandb_mode,
        progress=logging.progress,
    ) as log:
        if rank == 0:
            save_config(config, Path(config.run.dir) / CONFIG_FILE)
        job = build_job(config)
        rows = run_steps(job, log, config.run.steps, config.run.log_interval)
    dist.barrier()
    if rank == 0:
        print_result(config, rows)
    dist.destroy_process_group()


def run_steps(job: Job, log: RunLog, steps: int, log_interval: int = 1) -> list[dict[str, float]]:
    """Runs the steps and returns their metrics."""
    from .rollout_source import Stopwatch

    rows = []
    for step in range(steps):
        watch = Stopwatch()
        rollouts = job.source.rollouts(step)
        rollout_seconds = watch.read()
        metrics = job.trainer.train_on(rollouts)
        metrics |= _speed(rollout_seconds, watch.read(), sum(r.num_tokens for r in rollouts))
        if (step + 1) % log_interval == 0 or step + 1 == steps:
            log.log(step + 1, metrics)
        rows.append({"step": step + 1, **metrics})
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
    from .report import METRICS_FILE, plot_run, summary_table

    print(summary_table(rows))
    if config.logging.jsonl:
        print(f"\nmetrics: {Path(config.run.dir) / METRICS_FILE}")
    if not config.logging.plot:
        return
    try:
        print(f"plot:    {plot_run(config.run.dir, rows)}")
    except ConfigError as error:
        print(f"no plot: {error}")


if __name__ == "__main__":
    sys.exit(main())
