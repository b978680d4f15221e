"""Checkpoints of a run: saved while training goes on, whole or not at all, on any layout."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..errors import CheckpointError, InputError
from ..parallel.agreement import raise_together
from . import checkpoint_files as files
from .checkpoint_state import Trained, load_state, sharded_state, wanted_state
from .checkpoint_write import Background, stage, write

_SHOWN = 3


class Checkpointer:
    """Saves and restores what `models` hold, and which step they are at.

    A save copies this rank's shards to host memory and returns; a thread writes them, over a
    process group of its own. A new save waits for the one before.

    Args:
        folder: of the checkpoints, on a file system that all ranks share.
        models: by name.
        interval: steps between two checkpoints.
        keep_last: so many are kept, older ones are removed.
        asynchronous: write beside training; False: `save` returns when all is on the disk.
        identity: what must be the same when the run is resumed, e.g. {"model": {...}}.
        about: the layout; random states are only restored where it is the same.

    Communicates: makes a gloo process group; every rank must construct it.
    """

    def __init__(
        self,
        folder: str | Path,
        models: Mapping[str, Trained],
        *,
        interval: int,
        keep_last: int = 2,
        asynchronous: bool = True,
        identity: Mapping[str, Mapping[str, Any]] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.interval = interval
        self._folder = Path(folder)
        self._models = models
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._identity = _plain(identity or {})
        self._about = _plain(about or {})
        self._group = dist.new_group(backend="gloo")
        self._token = self._shared(uuid.uuid4().hex[:12])
        self._background = Background()
        self._saved_step: int | None = None
        self._validated = False

    @property
    def failed(self) -> bool:
        """Tells whether a write has failed on this rank; `finish` says how."""
        return self._background.failed

    def resume(self, source: str | Path = "auto") -> int:
        """Restores the newest whole checkpoint and takes the folder over for this run.

        Args:
            source: "auto": from this folder, if there is one; "never": refuse a folder that has
                checkpoints; else a checkpoint, or a folder of them, to start from.

        Returns:
            The number of steps that are done: 0 without a checkpoint.

        Raises:
            CheckpointError: every checkpoint is damaged, or it is of another model, or the folder
                cannot be written.
        """
        if source == "never":
            self._on_rank_0(self._check_empty)
            root = None
        else:
            root = self._folder if source == "auto" else Path(source)
        step = self._load(root, must_exist=source not in ("auto", "never")) if root else 0
        self._on_rank_0(lambda: files.take_over(self._folder, self._token))
        self._saved_step = step if source == "auto" else None
        return step

    def save(self, step: int) -> float:
        """Saves after `step` steps, unless that was done; returns the seconds that it blocked.

        Nothing is saved after 0 steps: a run without a checkpoint starts there anyway.

        Raises:
            CheckpointError: this or the save before failed; older checkpoints are untouched.
        """
        start = time.perf_counter()
        self.finish()
        if step in (0, self._saved_step):
            return 0.0
        writing = files.writing_folder(self._folder, step, self._token)
        final = files.step_folder(self._folder, step)
        self._on_rank_0(lambda: _make(writing))
        state = sharded_state(self._models)
        staged = self._together(lambda: stage(state, writing, validate=not self._validated))
        self._validated = True
        about = {
            **self._about,
            "step": step,
            "world_size": self._group.size(),
            "identity": self._identity,
        }

        def action() -> None:
            write(
                staged,
                writing,
                final,
                token=self._token,
                keep_last=self._keep_last,
                about=about,
                group=self._group,
            )

        self._background.start(action)
        self._saved_step = step
        if not self._asynchronous:
            self.finish()
        return time.perf_counter() - start

    def is_due(self, step: int) -> bool:
        return step % self.interval == 0

    def wait(self, timeout_s: float) -> None:
        """Lets a save that is under way end, but waits no longer than that; raises nothing."""
        self._background.wait(timeout_s)

    def finish(self) -> None:
        """Waits until the last save is on the disk.

        Raises:
            CheckpointError: it failed, on every rank.
        """
        self._background.finish()

    def _load(self, root: Path, *, must_exist: bool) -> int:
        candidates = self._shared(_candidates(root))
        for folder in candidates:
            manifest, problems = self._examine(folder)
            if problems:
                more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
                self._warn(
                    f"WARNING: the checkpoint {folder} is damaged and is not used: "
                    f"{'; '.join(problems[:_SHOWN])}{more}."
                )
                continue
            self._check_identity(folder, manifest)
            self._restore(folder, manifest)
            return int(manifest["step"])
        if candidates:
            raise CheckpointError(
                f"every checkpoint in {root} is damaged ({len(candidates)} of them); see above. "
                "Start from the beginning with another run.dir."
            )
        if must_exist:
            raise CheckpointError(f"checkpoint.resume {root}: there is no checkpoint.")
        return 0

    def _examine(self, folder: Path) -> tuple[dict[str, Any], list[str]]:
        """Returns the manifest and, from all ranks, what is wrong with the files."""
        manifest: dict[str, Any] = {}
        try:
            manifest = files.read_manifest(folder)
            problems = files.damage(folder, manifest, self._group.rank(), self._group.size())
        except CheckpointError as error:
            problems = [str(error)]
        everybodys: list[list[str]] = [[] for _ in range(self._group.size())]
        dist.all_gather_object(everybodys, problems, group=self._group)
        return manifest, sorted({line for part in everybodys for line in part})

    def _check_identity(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        """Raises the same on every rank: all of them read the same manifest."""
        saved = manifest.get("identity", {})
        for section, mine in self._identity.items():
            theirs = saved.get(section, {})
            names = [n for n in {**theirs, **mine} if theirs.get(n) != mine.get(n)]
            if names:
                text = ", ".join(
                    f"{n} {theirs.get(n)!r} in the checkpoint, {mine.get(n)!r} in this run"
                    for n in sorted(names)
                )
                raise CheckpointError(
                    f"{folder} is of a run with another {section}: {text}. Use the same settings, "
                    "or another run.dir."
                )

    def _restore(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        same = manifest["world_size"] == self._group.size() and all(
            manifest.get(name) == value for name, value in self._about.items()
        )
        wanted = self._together(lambda: wanted_state(folder, self._models, rng=same))
        load_state(folder, wanted, self._models)
        note = "" if same else "; the layout is another one, so random states start anew"
        self._warn(f"resuming from {folder}, after step {manifest['step']}{note}")

    def _check_empty(self) -> None:
        steps = files.saved_steps(self._folder)
        if steps:
            raise CheckpointError(
                f"{self._folder} has checkpoints up to step {steps[0]}, and checkpoint.resume is "
                "never. Set checkpoint.resume=auto to go on, or another run.dir."
            )

    def _on_rank_0(self, action: Callable[[], Any]) -> None:
        self._together(lambda: action() if self._group.rank() == 0 else None)

    def _together(self, action: Callable[[], Any]) -> Any:
        """Runs an action on every rank; if it fails on one, all raise a `CheckpointError`."""
        try:
            return raise_together(action, self._group)
        except (InputError, OSError) as error:  # InputError: quotes another rank's error
            raise CheckpointError(str(error)) from error

    def _shared(self, value: Any) -> Any:
        """Returns rank 0's value."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _warn(self, text: str) -> None:
        if self._group.rank() == 0:
            print(text, file=sys.stderr, flush=True)


def _candidates(root: Path) -> list[Path]:
    if (root / files.MANIFEST).is_file():
        return [root]
    return [files.step_folder(root, step) for step in files.saved_steps(root)]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the checkpoint folder {folder}: {error}.") from error


def _plain(value: Any) -> Any:
    """Returns what JSON makes of a value: tuples become lists."""
    import json

    return json.loads(json.dumps(value, default=str))
