"""Learning curves of runs: megatron-rl-loss plot RUN [RUN ...]

RUN is the folder of a run, or a folder of such folders, which then are seeds of one run; or
LABEL=FOLDER[,FOLDER...], which names it and lists its seeds. Several seeds are drawn as their mean
and a band of one standard deviation on each side, over the steps that all of them have.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ConfigError, MegatronRLLossError
from .report import METRICS_FILE, read_metrics

DEFAULT_METRICS = ("reward", "loss", "kl", "entropy", "grad_norm", "response_length")
DEFAULT_OUT = "curves.png"
_COLUMNS = 3


@dataclass(frozen=True)
class Run:
    """A name and the metrics of each seed, a dict per step in each."""

    label: str
    seeds: list[list[dict[str, float]]]

    @property
    def metrics(self) -> set[str]:
        """The names that every seed has."""
        return set.intersection(*({n for row in seed for n in row} for seed in self.seeds))

    def curve(self, name: str, smooth: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns steps, the seeds' mean and their standard deviation (0 for one seed), [n] each.

        Args:
            name: of a metric.
            smooth: each seed's values are means over so many steps up to each one.
        """
        by_step = [{row["step"]: row[name] for row in seed if name in row} for seed in self.seeds]
        steps = sorted(set.intersection(*map(set, by_step)))
        values = np.array([[float(seed[step]) for step in steps] for seed in by_step])
        values = np.array([_trailing_mean(row, smooth) for row in values])
        deviation = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
        return np.array(steps), values.mean(axis=0), deviation


def read_run(text: str) -> Run:
    """Returns the run that a command-line argument names.

    Raises:
        ConfigError: a folder has no metrics.
    """
    label, has_label, paths = text.partition("=")
    folders = [Path(path) for path in (paths if has_label else text).split(",")]
    if not has_label:
        label = folders[0].name or str(folders[0].resolve().name)
    seeds = [seed for folder in folders for seed in _seed_folders(folder)]
    return Run(label, [_not_empty(folder) for folder in seeds])


def plot_runs(
    runs: Sequence[Run],
    out: str | Path,
    *,
    metrics: Sequence[str] | None = None,
    smooth: int = 1,
) -> Path:
    """Draws a panel per metric with all runs in it, and returns the PNG's path.

    Args:
        runs: to compare.
        out: file to write.
        metrics: names; None: those of `DEFAULT_METRICS` that any run has.
        smooth: see `Run.curve`.

    Raises:
        ConfigError: no run has a metric that was asked for, or matplotlib is missing.
    """
    names = _names(runs, metrics)
    pyplot = _pyplot()
    columns = min(_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 3.4 * rows + 0.5), squeeze=False
    )
    for axis, name in zip(axes.flat, names):
        for i, run in enumerate(runs):
            if name in run.metrics:
                _draw(axis, run, name, smooth, f"C{i}")
        axis.set(title=name, xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    _legend(figure, axes.flat[: len(names)])
    figure.savefig(out, dpi=120)
    pyplot.close(figure)
    return Path(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 2 for an error of the user's."""
    parser = argparse.ArgumentParser(
        prog="megatron-rl-loss plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", default=DEFAULT_OUT, help=f"the PNG (default: {DEFAULT_OUT})")
    parser.add_argument("--metrics", nargs="+", metavar="NAME", help="panels to draw")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="mean over N steps")
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.smooth < 1:
            raise ConfigError(f"--smooth must be at least 1, got {options.smooth}.")
        runs = [read_run(text) for text in options.runs]
        path = plot_runs(runs, options.out, metrics=options.metrics, smooth=options.smooth)
    except (MegatronRLLossError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


def _seed_folders(folder: Path) -> list[Path]:
    if (folder / METRICS_FILE).exists():
        return [folder]
    seeds = sorted(path.parent for path in folder.glob(f"*/{METRICS_FILE}"))
    if not seeds:
        raise ConfigError(
            f"{folder} has no {METRICS_FILE}, nor has a folder in it; is it the folder of a run "
            "(run.dir), or of its seeds?"
        )
    return seeds


def _not_empty(folder: Path) -> list[dict[str, float]]:
    rows = read_metrics(folder)
    if not rows:
        raise ConfigError(f"{folder / METRICS_FILE} has no steps yet.")
    return rows


def _trailing_mean(values: np.ndarray, width: int) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - width, 0)
    return (sums[last] - sums[first]) / (last - first) if width > 1 else values


def _names(runs: Sequence[Run], metrics: Sequence[str] | None) -> list[str]:
    known = set().union(*(run.metrics for run in runs)) - {"step"}
    missing = [name for name in metrics or () if name not in known]
    if missing:
        raise ConfigError(
            f"no run has {', '.join(missing)} in all of its seeds; there are: "
            f"{', '.join(sorted(known))}."
        )
    names = list(metrics or [name for name in DEFAULT_METRICS if name in known])
    if not names:
        raise ConfigError(f"name --metrics; there are: {', '.join(sorted(known))}.")
    return names


def _draw(axis: Any, run: Run, name: str, smooth: int, color: str) -> None:
    steps, mean, deviation = run.curve(name, smooth)
    label = run.label
    if len(run.seeds) > 1:
        label += f" (mean ± s.d. of {len(run.seeds)} seeds)"
        axis.fill_between(steps, mean - deviation, mean + deviation, color=color, alpha=0.2, lw=0)
    axis.plot(steps, mean, color=color, label=label, lw=1.5, marker="." if len(steps) < 40 else "")


def _legend(figure: Any, axes: Sequence[Any]) -> None:
    """Puts one legend of all runs above the panels."""
    lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
    columns = min(len(lines), 3)
    rows = math.ceil(len(lines) / columns)
    height = figure.get_figheight()
    figure.legend(lines.values(), lines.keys(), loc="upper center", ncols=columns, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.1 + 0.25 * rows) / height))


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed: pip install 'megatron-rl-loss[demo]'."
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


if __name__ == "__main__":
    raise SystemExit(main())
