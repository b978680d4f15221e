"""The main job on streamed files and beside an engine: each row once, also when it is killed."""

from __future__ import annotations

import json
import math
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl_loss.errors import RolloutError
from megatron_rl_loss.rollouts.files import write_rollouts
from megatron_rl_loss.rollouts.inbox import wait_for_room
from megatron_rl_loss.rollouts.rollout import Rollout
from megatron_rl_loss.watch_source import JOURNAL_FILE
from tests.mcore import jobs
from tests.mcore.test_train import model_folder  # noqa: F401

STEPS = 12


def rows(first: int, num: int) -> list[Rollout]:
    rng = random.Random(first)
    return [
        Rollout(
            [rng.randrange(60) for _ in range(3)],
            [rng.randrange(60) for _ in range(rng.randint(2, 5))],
            reward=rng.random(),
            group_id=i // 4,
        )
        for i in range(first, first + num)
    ]


@pytest.fixture(scope="module")
def arguments(model_folder):  # noqa: F811
    return [
        "configs/base.yaml",
        f"model.path={model_folder}",
        "rollouts.per_step=8",
        "optimizer.lr=1e-3",
        "logging.plot=false",
        f"run.steps={STEPS}",
        "checkpoint.interval=1",
    ]


def taught(rollout: Rollout) -> Rollout:
    """The rollout with a teacher that always knows three tokens, the third one not in use."""
    n = len(rollout.response_ids)
    return replace(
        rollout,
        reward=None,
        teacher_top_ids=[[5, 7, 0]] * n,
        teacher_top_log_probs=[[math.log(0.6), math.log(0.3), -1000.0]] * n,
    )


@pytest.mark.parametrize("source", ["files", "stream"])
def test_a_teachers_stored_tokens_are_distilled_the_same_on_two_ranks(arguments, tmp_path, source):
    files = tmp_path / "files"
    for name, first in (("a.jsonl", 0), ("b.parquet", 8)):
        write_rollouts(files / name, map(taught, rows(first, 8)))
    found = []
    for ranks, cut in ((1, "batch.micro_batch_size=2"), (2, "batch.micro_batch_size=1")):
        run = tmp_path / f"{ranks}"
        jobs.run(
            [
                *arguments,
                "configs/loss/top_k_distillation.yaml",
                f"rollouts.source={source}",
                f"rollouts.path={files}",
                f"run.dir={run}",
                cut,
            ],
            tmp_path / f"{ranks}.log",
            ranks,
        )
        found.append(jobs.metrics(run))
    alone, together = found
    assert alone[0]["teacher_mass"] == pytest.approx(0.9)
    assert alone[-1]["loss"] < 0.7 * alone[0]["loss"]
    for a, b in zip(alone, together, strict=True):
        for name in ("loss", "grad_norm", "teacher_mass"):
            assert b[name] == pytest.approx(a[name], rel=1e-4), name


def run_with_kills(arguments: list[str], log: Path, ranks: int = 1) -> list[int | None]:
    """Kills the job when it has done 1, 2 and 5 steps, then lets it end; returns exit codes."""
    codes = []
    for step in (1, 2, 5):
        processes = jobs.start(arguments, log, ranks)
        jobs.wait_for(log, f"step {step}/{STEPS}")
        jobs.kill(processes)
        codes.append(processes[0].exitcode)
    jobs.run(arguments, log, ranks)
    return codes


def test_a_killed_run_on_streamed_files_gives_the_same_numbers(arguments, tmp_path):
    files = tmp_path / "files"
    for name, first, num in (("a.jsonl", 0, 4), ("b.parquet", 4, 12), ("c.jsonl", 16, 8)):
        write_rollouts(files / name, rows(first, num))
    arguments = [*arguments, "rollouts.source=stream", f"rollouts.path={files}"]
    jobs.run([*arguments, f"run.dir={tmp_path / 'whole'}"], tmp_path / "whole.log")
    killed = [*arguments, f"run.dir={tmp_path / 'killed'}"]
    assert -signal.SIGKILL in run_with_kills(killed, tmp_path / "killed.log")
    whole = jobs.metrics(tmp_path / "whole")
    assert [row["step"] for row in whole] == list(range(1, STEPS + 1))
    assert len({row["grad_norm"] for row in whole}) == STEPS
    assert jobs.metrics(tmp_path / "killed") == whole


def test_an_engine_beside_the_run_gets_weights_and_each_of_its_rows_is_trained_once(
    arguments, tmp_path
):
    rollouts, weights, stop = tmp_path / "rollouts", tmp_path / "weights", threading.Event()
    rollouts.mkdir()
    written = []

    def engine() -> None:
        while not stop.is_set():
            try:
                version = (weights / "latest").read_text().strip()
                assert list((weights / version).glob("*.safetensors"))
                assert (weights / version / "config.json").exists()
                wait_for_room(rollouts, 2, timeout=0.2, poll=0.02)
            except (OSError, RolloutError):
                time.sleep(0.05)
                continue
            name = f"{version}-{len(written):03d}.jsonl"
            write_rollouts(rollouts / name, rows(4 * len(written), 4))
            written.append(name)

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    log = tmp_path / "log"
    try:
        codes = run_with_kills(
            [
                *arguments,
                f"run.dir={tmp_path / 'run'}",
                "rollouts.source=watch",
                f"rollouts.path={rollouts}",
                f"rollouts.export_dir={weights}",
                "rollouts.wait_timeout=20",
            ],
            log,
            ranks=2,
        )
    finally:
        stop.set()
        thread.join(5)
    assert -signal.SIGKILL in codes
    steps = [row["step"] for row in jobs.metrics(tmp_path / "run")]
    assert steps == list(range(1, STEPS + 1))
    lines = (tmp_path / "run" / JOURNAL_FILE).read_text().splitlines()
    trained = [part for line in lines for part in json.loads(line)["rows"]]
    taken = [(name, i) for name, first, end in trained for i in range(first, end)]
    assert len(taken) == len(set(taken)) == STEPS * 8
    assert {name for name, _, _ in trained} <= set(written)
    exports = sorted(path.name for path in weights.glob("v*"))
    assert exports == [f"v{STEPS - 2}", f"v{STEPS - 1}"]
    assert (weights / "latest").read_text() == f"v{STEPS - 1}\n"
