"""Writes a checkpoint: first a copy to host memory, then, beside training, everything else.

The plan of shards is Megatron's (`dist_checkpointing`, format torch_dist). The files are written
by this process, in a thread with a process group of its own, and not by forked processes as
Megatron's writer does: those outlive a killed rank, and need several seconds to start.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as torch_format
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from ..errors import CheckpointError
from ..parallel.agreement import raise_together
from . import checkpoint_files as files
from . import compat


class _Staging(compat.save_strategy()):  # type: ignore[misc]
    """Stands for Megatron's writer: keeps this rank's shards, copied to host memory."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.staged: Mapping[str, Any] = {}

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: Any = None
    ) -> AsyncRequest:
        for tensor in nested_values(sharded_state_dict):
            if isinstance(tensor, ShardedTensor) and is_main_replica(tensor.replica_id):
                tensor.data = tensor.data.detach().to("cpu", copy=True)
        by_key, _, _ = torch_format._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        self.staged = torch_format.mcore_to_pyt_state_dict(by_key, False)
        return AsyncRequest(None, (), [])


def stage(state: Mapping[str, Any], folder: Path, *, validate: bool) -> Mapping[str, Any]:
    """Copies this rank's part of a sharded state dict, and writes the small common part.

    Args:
        folder: exists and is empty.
        validate: check over all ranks that every tensor is saved whole and once.

    Returns:
        What `write` takes.
    """
    staging = _Staging()
    dist_checkpointing.save(
        dict(state),
        str(folder),
        sharded_strategy=staging,
        validate_access_integrity=validate,
        async_sharded_save=True,
    )
    return staging.staged


def write(
    staged: Mapping[str, Any],
    writing: Path,
    final: Path,
    *,
    token: str,
    keep_last: int,
    about: Mapping[str, Any],
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Writes what was staged on every rank and publishes it; returns the manifest.

    Raises:
        CheckpointError: on every rank, if any of them could not write its part. Checkpoints that
            were there before are still there.

    Communicates: over `group` only, which nothing else may use at the same time.
    """
    try:
        torch_checkpoint.save(
            dict(staged),
            storage_writer=torch_checkpoint.FileSystemWriter(writing),
            planner=torch_format.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
            process_group=group,
        )
        sums = raise_together(lambda: _own_sums(writing, group), group)
        everybodys: list[Any] = [None] * group.size()
        dist.all_gather_object(everybodys, sums, group=group)
        manifest = {**about, "format": files.FORMAT, "files": _merged(everybodys)}
        raise_together(lambda: _publish(writing, final, manifest, token, keep_last, group), group)
        return manifest
    except (Exception, torch_checkpoint.api.CheckpointException) as error:  # a BaseException
        if group.rank() == 0:
            shutil.rmtree(writing, ignore_errors=True)
        raise CheckpointError(_failure(final, error)) from error


def _own_sums(folder: Path, group: dist.ProcessGroup) -> dict[str, dict[str, int]]:
    names = [p.name for p in folder.glob(f"__{group.rank()}_*")]
    if group.rank() == 0:
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))
        names += [p.name for p in folder.iterdir() if not p.name.startswith("__")]
    return files.synced_sums(folder, names)


def _merged(sums: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in sums for name, value in part.items()}


def _publish(
    writing: Path,
    final: Path,
    manifest: Mapping[str, Any],
    token: str,
    keep_last: int,
    group: dist.ProcessGroup,
) -> None:
    if group.rank() != 0:
        return
    files.check_shared(writing, manifest["files"])
    files.check_owner(final.parent, token)
    files.publish(writing, final, manifest)
    files.remove_old(final.parent, keep_last)


def _failure(final: Path, error: BaseException) -> str:
    reasons = getattr(error, "failures", None)  # torch's: the exception of each failed rank
    if reasons:
        text = "; ".join(f"rank {rank}: {_reason(item)}" for rank, item in reasons.items())
    else:
        text = str(error) or type(error).__name__
    good = files.saved_steps(final.parent)
    kept = f"The checkpoint of step {good[0]} is whole" if good else "There is none yet"
    return (
        f"could not write the checkpoint {final}: {text}. {kept}. Free space or set "
        "checkpoint.dir, then start the same command again."
    )


def _reason(item: Any) -> str:
    error = item[0] if isinstance(item, tuple) else item
    while isinstance(error, BaseException) and error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


class Background:
    """Runs one function at a time in a thread; its error is raised by `finish`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def start(self, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                action()
            except BaseException as error:
                self._error = error

        # a daemon: a rank that fails must not wait for a write that waits for other ranks
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Waits for the function, but no longer than that; raises nothing."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def finish(self) -> None:
        """Waits for the function, and raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
