"""Checkpoints on real ranks: any layout, damage, other models, disks that fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl_loss.mcore import checkpoint_files as files
from tests.mcore import harness
from tests.mcore.harness import Layout
from tests.spawn import run_ranks

ONE = Layout()


class Session:
    """On a rank: a model in training, and its checkpoints."""

    def __init__(self, layout: Layout, folder: Path, **settings: Any) -> None:
        import warnings

        warnings.simplefilter("ignore")
        from megatron_rl_loss.mcore.checkpoint import Checkpointer
        from megatron_rl_loss.mcore.checkpoint_state import Trained
        from megatron_rl_loss.mcore.groups import parallel_groups
        from megatron_rl_loss.mcore.optimizer import build_scheduler

        self.layout = layout
        self.chunks, self.optimizer, self.spec = harness.build(layout)
        self.scheduler = build_scheduler(self.optimizer, lr=1e-2, warmup_steps=5, total_steps=9)
        self.batches = harness.weighted(layout, parallel_groups())
        trained = Trained(self.chunks, self.optimizer, self.scheduler)
        about = {"layout": repr(replace(layout, seed=0))}
        settings = {"interval": 1, "about": about} | settings
        self.checkpoints = Checkpointer(folder, {"policy": trained}, **settings)

    def train(self) -> dict[str, float]:
        from megatron_rl_loss.mcore.train_step import train_step

        return train_step(
            harness.make_step(self.layout),
            self.chunks,
            self.optimizer,
            self.batches,
            scheduler=self.scheduler,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return harness.export(self.chunks, self.spec)


def save_and_go_on(layout: Layout, folder: Path, **settings: Any) -> tuple[Any, Any, Any]:
    """Trains twice, saves, trains twice more; returns weights, metrics and random numbers then."""
    session = Session(layout, folder, **settings)
    session.train()
    session.train()
    torch.rand(7)
    session.checkpoints.resume()
    session.checkpoints.save(2)
    return _go_on(session)


def resume_and_go_on(layout: Layout, folder: Path, **settings: Any) -> tuple[Any, Any, Any]:
    session = Session(replace(layout, seed=5), folder, **settings)  # other weights, to be replaced
    session.batches = harness.weighted(layout, _groups())
    assert session.checkpoints.resume() == 2
    return _go_on(session)


def _groups() -> Any:
    from megatron_rl_loss.mcore.groups import parallel_groups

    return parallel_groups()


def _go_on(session: Session) -> tuple[Any, Any, Any]:
    draw = torch.rand(3)
    metrics = [session.train(), session.train()]
    session.checkpoints.finish()
    return session.weights(), metrics, draw


SAME = {
    "one rank": ONE,
    "DP 2": Layout(dp=2),
    "DP 2, distributed optimizer": Layout(dp=2, distributed_optimizer=True),
    "DP 2, distributed optimizer, bf16": Layout(dp=2, distributed_optimizer=True, bf16=True),
    "TP 2, bf16": Layout(tp=2, bf16=True),
    "PP 2 with two chunks a stage": Layout(pp=2, vpp=2, layers=4),
}


@pytest.mark.parametrize("name", SAME)
def test_resuming_on_the_same_layout_changes_no_bit(name, tmp_path):
    layout = SAME[name]
    expected = run_ranks(save_and_go_on, layout.world_size, layout, tmp_path)
    found = run_ranks(resume_and_go_on, layout.world_size, layout, tmp_path)
    for (weights, metrics, draw), (weights2, metrics2, draw2) in zip(expected, found, strict=True):
        assert metrics2 == metrics
        assert torch.equal(draw, draw2)
        assert all(torch.equal(weights[k], weights2[k]) for k in weights)


OTHER = {
    "TP 2 -> DP 2": (Layout(tp=2), Layout(dp=2)),
    "DP 2 -> one rank": (Layout(dp=2), ONE),
    "one rank -> PP 2": (ONE, Layout(pp=2)),
    "distributed optimizer: DP 2 -> TP 2": (
        Layout(dp=2, distributed_optimizer=True),
        Layout(tp=2, distributed_optimizer=True),
    ),
    "distributed optimizer: PP 2 -> one rank": (
        Layout(pp=2, distributed_optimizer=True),
        Layout(distributed_optimizer=True),
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_resuming_on_another_layout_gives_the_same_numbers(name, tmp_path):
    before, after = OTHER[name]
    weights, metrics, _ = run_ranks(save_and_go_on, before.world_size, before, tmp_path)[0]
    weights2, metrics2, _ = run_ranks(resume_and_go_on, after.world_size, after, tmp_path)[0]
    for a, b in zip(metrics, metrics2, strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-6), key
    for key in weights:
        torch.testing.assert_close(weights2[key], weights[key], rtol=1e-4, atol=2e-6)


def train_while_it_is_written(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights at the moment of saving; the write begins after a further step."""
    import threading

    from megatron_rl_loss.mcore import checkpoint_write

    session = Session(ONE, folder)
    session.train()
    session.checkpoints.resume()
    original, trained_on = checkpoint_write.torch_checkpoint.save, threading.Event()

    def late(*args: Any, **kwargs: Any) -> Any:
        trained_on.wait(60)
        return original(*args, **kwargs)

    checkpoint_write.torch_checkpoint.save = late
    try:
        session.checkpoints.save(1)
        weights = {name: weight.clone() for name, weight in session.weights().items()}
        session.train()
        trained_on.set()
        session.checkpoints.finish()
    finally:
        checkpoint_write.torch_checkpoint.save = original
    assert any(not torch.equal(w, weights[n]) for n, w in session.weights().items())
    return weights


def restored_weights(folder: Path) -> dict[str, torch.Tensor]:
    session = Session(replace(ONE, seed=5), folder)
    assert session.checkpoints.resume() == 1
    return session.weights()


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(tmp_path):
    [saved] = run_ranks(train_while_it_is_written, 1, tmp_path)
    [found] = run_ranks(restored_weights, 1, tmp_path)
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def save_three(folder: Path) -> list[int]:
    session = Session(ONE, folder, keep_last=3)
    session.checkpoints.resume()
    for step in (1, 2, 3):
        session.train()
        session.checkpoints.save(step)
    session.checkpoints.finish()
    return files.saved_steps(folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    assert run_ranks(save_three, 1, folder) == [[3, 2, 1]]
    return folder


def resume(folder: Path, layout: Layout = ONE, **settings: Any) -> tuple[int | str, str]:
    """Returns the step, or the error's text, and what rank 0 said."""
    import contextlib
    import io

    from megatron_rl_loss.errors import CheckpointError

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            step: int | str = Session(layout, folder, **settings).checkpoints.resume()
        except CheckpointError as error:
            step = str(error)
    return step, said.getvalue()


def flip_a_byte(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(folder: Path) -> None:
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_file(folder: Path) -> None:
    (folder / ".metadata").unlink()


def break_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": 1, "fi')


@pytest.mark.parametrize("harm", [flip_a_byte, truncate, lose_a_file, break_the_manifest])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(three, tmp_path, harm):
    folder = shutil.copytree(three, tmp_path / "checkpoints")
    harm(folder / "step_00000003")
    [(step, said)] = run_ranks(resume, 1, folder)
    assert step == 2
    assert "WARNING" in said and "step_00000003 is damaged and is not used" in said


def test_a_checkpoint_without_its_manifest_does_not_count(three, tmp_path):
    folder = shutil.copytree(three, tmp_path / "checkpoints")
    (folder / "step_00000003" / "manifest.json").unlink()
    [(step, said)] = run_ranks(resume, 1, folder)
    assert step == 2 and not (folder / "step_00000003").exists()


def test_a_run_does_not_start_anew_when_every_checkpoint_is_damaged(three, tmp_path):
    folder = shutil.copytree(three, tmp_path / "checkpoints")
    for step in (1, 2, 3):
        flip_a_byte(folder / f"step_{step:08d}")
    [(error, _)] = run_ranks(resume, 1, folder)
    assert "every checkpoint in" in error and "is damaged (3 of them)" in error


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(three):
    for layout in (Layout(layers=4), Layout(pp=2, layers=4)):
        for error, _ in run_ranks(resume, layout.world_size, three, layout):
            assert "is a checkpoint of another model" in error
    [(error, _)] = run_ranks(resume_as, 1, three, {"model": {"hidden_size": 7}})
    assert "hidden_size None in the checkpoint, 7 in this run" in error
    assert files.saved_steps(three) == [3, 2, 1]


def resume_as(folder: Path, identity: dict) -> tuple[int | str, str]:
    return resume(folder, identity=identity)


def test_only_the_newest_are_kept(tmp_path):
    assert run_ranks(save_often, 1, tmp_path) == [[5, 4]]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".owner",
        "step_00000004",
        "step_00000005",
    ]


def save_often(folder: Path) -> list[int]:
    session = Session(ONE, folder, keep_last=2)
    session.checkpoints.resume()
    for step in range(1, 6):
        session.checkpoints.save(step)
    session.checkpoints.finish()
    return files.saved_steps(folder)


def fill_up(folder: Path, disk: Path | None) -> tuple[str, list[int], list[str]]:
    """Saves, runs out of space, saves again; returns the error, the steps and the folder's names.

    Without `disk` (a small file system) the second write is made to fail on rank 1.
    """
    import errno

    import torch.distributed as dist
    from torch.distributed.checkpoint import FileSystemWriter

    from megatron_rl_loss.errors import CheckpointError

    session = Session(Layout(dp=2), folder)
    session.checkpoints.resume()
    session.checkpoints.save(1)
    session.checkpoints.finish()
    original = FileSystemWriter.write_data

    def no_space(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if disk is not None and dist.get_rank() == 0:
        stat = os.statvfs(disk)
        (disk / "other").write_bytes(bytes(stat.f_bavail * stat.f_frsize - 8192))
    elif disk is None and dist.get_rank() == 1:
        FileSystemWriter.write_data = no_space
    dist.barrier()
    error = ""
    try:
        session.train()
        session.checkpoints.save(2)
        session.checkpoints.finish()
    except CheckpointError as caught:
        error = str(caught)
    finally:
        FileSystemWriter.write_data = original
    dist.barrier()
    return error, files.saved_steps(folder), sorted(p.name for p in folder.iterdir())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB, where the machine lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system; the other case covers it")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def check_full_disk(outcomes: list, folder: Path) -> None:
    for error, steps, names in outcomes:
        assert "could not write the checkpoint" in error and "No space left on device" in error
        assert "The checkpoint of step 1 is whole" in error
        assert steps == [1] and names == [".owner", "step_00000001"]
    assert (
        files.damage(folder / "step_00000001", files.read_manifest(folder / "step_00000001")) == []
    )


def test_a_full_disk_is_an_error_on_every_rank_and_costs_no_checkpoint(small_disk):
    folder = small_disk / "checkpoints"
    check_full_disk(run_ranks(fill_up, 2, folder, small_disk), folder)


def test_a_rank_that_cannot_write_is_an_error_on_every_rank(tmp_path):
    folder = tmp_path / "checkpoints"
    check_full_disk(run_ranks(fill_up, 2, folder, None), folder)


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    for error, _ in run_ranks(resume, 2, tmp_path / "file" / "checkpoints", Layout(dp=2)):
        assert "cannot write checkpoints to" in error and "Set checkpoint.dir" in error


def test_an_older_run_does_not_write_into_a_newer_ones_folder(tmp_path):
    [error] = run_ranks(two_runs, 1, tmp_path)
    assert "another run has started to write checkpoints to" in error
    assert files.saved_steps(tmp_path) == [1]


def two_runs(folder: Path) -> str:
    from megatron_rl_loss.errors import CheckpointError

    session = Session(ONE, folder)
    session.checkpoints.resume()
    session.checkpoints.save(1)
    session.checkpoints.finish()
    files.take_over(folder, "another")
    try:
        session.checkpoints.save(2)
        session.checkpoints.finish()
    except CheckpointError as error:
        return str(error)
    return "no error"
