"""Where a run's numbers go: JSON lines, TensorBoard, Weights & Biases, a progress bar, a plot.

Only global rank 0 writes; the other ranks hold a `RunLog` that does nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .errors import ConfigError

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "curves.png"
TABLE_COLUMNS = (
    "step",
    "reward",
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "response_length",
    "seconds",
)
PLOT_METRICS = ("reward", "loss")

Writer = Callable[[int, Mapping[str, float]], None]


class RunLog:
    """Writes one dict of metrics per step to every place that the settings name.

    Args:
        folder: of the run; made if missing.
        active: False on every rank but 0.
        total_steps: for the progress bar.
        jsonl, tensorboard, wandb: which files to write.
        progress: show a bar (in a terminal) or a line per step (elsewhere).
        wandb_project, wandb_mode: as in wandb.init; mode "offline" needs no network.
        config: saved with the wandb run.

    Raises:
        ConfigError: the folder cannot be written, or a package is missing.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        active: bool,
        total_steps: int,
        jsonl: bool = True,
        tensorboard: bool = False,
        wandb: bool = False,
        progress: bool = True,
        wandb_project: str = "megatron-rl-loss",
        wandb_mode: str = "offline",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._resources = ExitStack()
        self._writers: list[Writer] = []
        self._forgetters: list[Callable[[int], None]] = []
        self._folder: Path | None = None
        if not active:
            return
        folder = self._folder = Path(folder)
        _make_folder(folder)
        if jsonl:
            self._writers.append(self._jsonl(folder))
        if tensorboard:
            self._writers.append(self._tensorboard(folder))
        if wandb:
            self._writers.append(self._wandb(folder, wandb_project, wandb_mode, dict(config or {})))
        if progress:
            self._writers.append(self._progress(total_steps))

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *error: Any) -> None:
        self._resources.__exit__(*error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of one step (counted from 1)."""
        for write in self._writers:
            write(step, metrics)

    def forget_after(self, step: int) -> list[dict[str, float]]:
        """Drops what is there of later steps, when a run resumes after `step` steps.

        Returns:
            The metrics of the steps before, where metrics.jsonl has them.
        """
        for forget in self._forgetters:
            forget(step)
        exists = self._folder is not None and (self._folder / METRICS_FILE).exists()
        return read_metrics(self._folder) if exists else []

    def _jsonl(self, folder: Path) -> Writer:
        path = folder / METRICS_FILE
        file = open(path, "a", buffering=1)
        self._resources.callback(lambda: file.close())

        def write(step: int, metrics: Mapping[str, float]) -> None:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

        def forget(step: int) -> None:
            nonlocal file
            file.close()
            _cut_metrics(path, step)
            file = open(path, "a", buffering=1)

        self._forgetters.append(forget)
        return write

    def _tensorboard(self, folder: Path) -> Writer:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(_missing("tensorboard")) from error
        writer = SummaryWriter(log_dir=str(folder / "tensorboard"))
        self._resources.callback(writer.close)
        self._forgetters.append(lambda step: _purge_events(writer, step))

        def write(step: int, metrics: Mapping[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        return write

    def _wandb(self, folder: Path, project: str, mode: str, config: dict) -> Writer:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(_missing("wandb")) from error
        run = wandb.init(project=project, mode=mode, dir=str(folder), config=config)
        self._resources.callback(run.finish)
        return lambda step, metrics: run.log(dict(metrics), step=step)

    def _progress(self, total_steps: int) -> Writer:
        if not sys.stderr.isatty():
            return lambda step, metrics: print(_line(step, total_steps, metrics), file=sys.stderr)
        try:
            from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
        except ImportError as error:
            raise ConfigError(_missing("rich", "logging.progress=false")) from error
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        bar = self._resources.enter_context(Progress(*columns))
        task = bar.add_task("training", total=total_steps)

        def write(step: int, metrics: Mapping[str, float]) -> None:
            bar.console.print(_line(step, total_steps, metrics), highlight=False)
            bar.update(task, completed=step)

        return write


def read_metrics(folder: str | Path) -> list[dict[str, float]]:
    """Returns the metrics of a run, one dict per step; of a step that was repeated, the last.

    Raises:
        ConfigError: the run has no metrics file.
    """
    path = Path(folder) / METRICS_FILE
    if not path.exists():
        raise ConfigError(f"{path} is missing; is {folder} the folder of a run (run.dir)?")
    lines = path.read_text().splitlines(keepends=True)
    # a run that is writing, or was killed, may leave half a line at the end
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def summary_table(rows: Sequence[Mapping[str, float]]) -> str:
    """Returns a small text table of a run's steps: all of them, or the first and last few."""
    columns = [name for name in TABLE_COLUMNS if any(name in row for row in rows)]
    cells = [[_cell(row.get(name)) for name in columns] for row in rows]
    if len(cells) > 16:
        cells = [*cells[:8], ["..."] * len(columns), *cells[-7:]]
    table = [columns, *cells]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths)) for row in table)


def plot_run(folder: str | Path, rows: Sequence[Mapping[str, float]]) -> Path:
    """Draws reward and loss over the steps of a run, and returns the PNG's path.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(_missing("matplotlib")) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in PLOT_METRICS if any(name in row for row in rows)]
    figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 3.6), squeeze=False)
    for axis, name in zip(axes[0], names):
        axis.plot([r["step"] for r in rows], [r.get(name) for r in rows], marker="o", markersize=3)
        axis.set(title=name, xlabel="step")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path = Path(folder) / PLOT_FILE
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _cut_metrics(path: Path, step: int) -> None:
    """Drops what follows from the first line on that is of a later step, or no whole line.

    A new file takes the old one's place: a process of an earlier life of the run, on a node that
    was given up, may still write to the old one.
    """
    shorter = path.with_suffix(".new")
    with open(path) as old, open(shorter, "w") as new:
        for line in old:
            if not line.endswith("\n") or json.loads(line)["step"] > step:
                break
            new.write(line)
    shorter.replace(path)


def _purge_events(writer: Any, step: int) -> None:
    """Tells TensorBoard to show no earlier event of the steps that come now."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = SessionLog(status=SessionLog.START)
    writer.file_writer.add_event(Event(step=step + 1, session_log=start))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}. Set run.dir to a folder.") from error


def _missing(package: str, instead: str | None = None) -> str:
    hint = f", or set {instead}" if instead else ""
    return f"{package} is not installed: pip install 'megatron-rl-loss[logging,demo]'{hint}."


def _line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    shown = [name for name in TABLE_COLUMNS[1:] if name in metrics]
    return f"step {step}/{total}  " + "  ".join(f"{n} {_cell(metrics[n])}" for n in shown)


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
