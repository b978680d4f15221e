"""A checkpoint's folder: whole or not at all, wherever a run dies."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from megatron_rl_loss.errors import CheckpointError
from megatron_rl_loss.mcore import checkpoint_files as files

CALLS = ("rename", "replace", "fsync", "rmtree", "unlink")


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


def write(root: Path, step: int, text: str) -> None:
    """Saves a small checkpoint as `checkpoint_write` does."""
    writing = files.writing_folder(root, step, "token")
    writing.mkdir(parents=True)
    (writing / "__0_0.distcp").write_text(text)
    sums = files.synced_sums(writing, ["__0_0.distcp"])
    files.publish(
        writing, files.step_folder(root, step), {"format": 1, "step": step, "files": sums}
    )
    files.remove_old(root, 2)


def content(root: Path, step: int) -> str:
    folder = files.step_folder(root, step)
    assert files.damage(folder, files.read_manifest(folder)) == []
    return (folder / "__0_0.distcp").read_text()


def kill_at(monkeypatch, moment: int) -> None:
    """Makes the `moment`-th call that touches the disk the last one: it does nothing and raises."""
    count = 0

    def counted(original):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count > moment:
                raise Killed
            return original(*args, **kwargs)

        return call

    for name in CALLS:
        owner = shutil if name == "rmtree" else Path if name == "unlink" else os
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step that is there already"])
def test_a_kill_at_any_moment_of_publishing_leaves_a_whole_checkpoint(tmp_path, monkeypatch, step):
    finished = set()
    for moment in range(40):
        root = tmp_path / str(moment)
        write(root, 1, "old 1")
        write(root, 2, "old 2")
        with monkeypatch.context() as patch:
            kill_at(patch, moment)
            try:
                write(root, step, "new")
                finished.add(moment)
            except Killed:
                pass
        files.take_over(root, "next life")
        newest = files.saved_steps(root)[0]
        assert newest in (2, step)
        assert content(root, newest) in ("old 2", "new"), moment
        if moment in finished:
            assert content(root, step) == "new"
        leftovers = [p.name for p in root.iterdir() if p.name.startswith((".writing", ".repl"))]
        assert leftovers == []
    assert 1 <= min(finished) and 39 in finished  # some moments were before the end, some after


def test_a_manifest_of_a_newer_format_is_refused(tmp_path):
    write(tmp_path, 1, "x")
    path = tmp_path / "step_00000001" / files.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(
        CheckpointError, match="has checkpoint format 2, this version reads up to 1"
    ):
        files.read_manifest(path.parent)


def test_files_that_only_another_node_sees_are_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="must be a folder that all nodes share"):
        files.check_shared(tmp_path, {"__8_0.distcp": {"bytes": 10, "crc32": 0}})


def test_ranks_share_the_checking(tmp_path):
    names = [f"__{i}_0.distcp" for i in range(5)]
    for name in names:
        (tmp_path / name).write_text(name)
    manifest = {"files": {name: {"bytes": 0, "crc32": 0} for name in names}}
    parts = [files.damage(tmp_path, manifest, part, 2) for part in (0, 1)]
    assert [len(part) for part in parts] == [3, 2]
