"""The folder of a checkpoint on disk: names, checksums, publishing whole or not at all, retention.

checkpoints/step_00000010/      *.distcp .metadata common.pt metadata.json: Megatron's format
                          manifest.json   written last: its presence says that the rest is whole
checkpoints/.writing_...        a checkpoint that is being written, or was when the job died
checkpoints/.owner              the run that may publish here; a newer run takes it over
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
_OWNER = ".owner"
_STEP = "step_"
_WRITING = ".writing_"
_REPLACED = ".replaced_"
_BLOCK = 1 << 24


def step_folder(root: Path, step: int) -> Path:
    """Returns the folder of the checkpoint that was saved after `step` steps."""
    return root / f"{_STEP}{step:08d}"


def writing_folder(root: Path, step: int, token: str) -> Path:
    return root / f"{_WRITING}{step:08d}_{token}"


def saved_steps(root: Path) -> list[int]:
    """Returns the steps of all checkpoints that have a manifest, the newest first."""
    if not root.is_dir():
        return []
    names = [p.name for p in root.iterdir() if (p / MANIFEST).is_file()]
    return sorted((int(n[len(_STEP) :]) for n in names if _is_step(n)), reverse=True)


def _is_step(name: str) -> bool:
    return name.startswith(_STEP) and name[len(_STEP) :].isdigit()


def file_sum(path: Path) -> dict[str, int]:
    """Returns the size in bytes and the CRC-32 of a file."""
    size = crc = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return {"bytes": size, "crc32": crc}


def synced_sums(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """Forces files to the disk and returns their sums."""
    sums = {}
    for name in sorted(names):
        _sync(folder / name)
        sums[name] = file_sum(folder / name)
    return sums


def check_shared(folder: Path, sums: Mapping[str, Mapping[str, int]]) -> None:
    """Raises `CheckpointError` unless this process sees all files, as large as they were written.

    Other nodes' files are missing where the folder is on a disk of each node's own.
    """
    for name, expected in sums.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{name} was written with {expected['bytes']} bytes by another rank, but rank 0 "
                f"sees {'no such file' if size is None else f'{size} bytes'} in {folder}; "
                "checkpoint.dir must be a folder that all nodes share."
            )


def publish(writing: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Gives a written folder its name, then marks it as whole.

    A reader, or a run that is killed at any moment, sees the checkpoint whole or not at all. An
    older folder of the same step is removed only after the new one is whole.
    """
    _sync(writing)
    replaced = final.with_name(f"{_REPLACED}{writing.name[1:]}")
    if final.exists():
        os.rename(final, replaced)
    os.rename(writing, final)
    _sync(final.parent)
    write_synced(final / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
    shutil.rmtree(replaced, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    """Replaces a small file in one step and forces it to the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, unreadable, or of a newer format.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] > FORMAT:
            raise CheckpointError(
                f"{folder} has checkpoint format {manifest['format']}, this version reads up to "
                f"{FORMAT}; use a newer megatron-rl-loss."
            )
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: no readable {MANIFEST} ({error}).") from error


def damage(folder: Path, manifest: Mapping[str, Any], part: int = 0, parts: int = 1) -> list[str]:
    """Returns what is wrong with a checkpoint's files, a line for each.

    Args:
        part, parts: check only every `parts`-th file from `part` on, so that ranks share the work.
    """
    problems = []
    for name, expected in sorted(manifest["files"].items())[part::parts]:
        try:
            found = file_sum(folder / name)
        except OSError as error:
            problems.append(f"{name}: {error.strerror or error}")
            continue
        if found["bytes"] != expected["bytes"]:
            problems.append(f"{name}: {found['bytes']} bytes instead of {expected['bytes']}")
        elif found != expected:
            problems.append(f"{name}: other content than was written (checksum)")
    return problems


def take_over(root: Path, token: str) -> None:
    """Makes the folder and this run its owner; removes what dead runs left unfinished.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_synced(root / _OWNER, token)
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {root}: {error}. Set checkpoint.dir to a folder."
        ) from error
    for path in root.iterdir():
        unfinished = _is_step(path.name) and not (path / MANIFEST).exists()
        if unfinished or path.name.startswith((_WRITING, _REPLACED)):
            _restore_or_remove(root, path)


def _restore_or_remove(root: Path, path: Path) -> None:
    """Removes an unfinished folder; one that was being replaced takes its place again."""
    if path.name.startswith(_REPLACED) and (path / MANIFEST).exists():
        step = int(path.name.removeprefix(_REPLACED + _WRITING[1:]).split("_")[0])
        final = step_folder(root, step)
        if not (final / MANIFEST).exists():
            shutil.rmtree(final, ignore_errors=True)
            os.rename(path, final)
            return
    shutil.rmtree(path, ignore_errors=True)


def check_owner(root: Path, token: str) -> None:
    """Raises `CheckpointError` if another run has taken the folder over."""
    owner = root / _OWNER
    if not owner.exists() or owner.read_text() != token:
        raise CheckpointError(
            f"another run has started to write checkpoints to {root}; this one stops. Give each "
            "run a run.dir of its own."
        )


def remove_old(root: Path, keep_last: int) -> None:
    """Removes all but the newest `keep_last` checkpoints; the manifest goes first."""
    for step in saved_steps(root)[keep_last:]:
        folder = step_folder(root, step)
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
