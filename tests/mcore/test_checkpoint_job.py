"""Checkpoints of the main job: stopped, killed and resumed runs give the uninterrupted numbers."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.mcore import jobs
from tests.mcore.test_train import model_folder, rollout_file  # noqa: F401

STEPS = 6


@pytest.fixture(scope="module")
def sampling(model_folder, tmp_path_factory):  # noqa: F811
    """Returns the arguments of a run that samples its rollouts, but for run.dir."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(6)))
    return [
        "configs/base.yaml",
        f"model.path={model_folder}",
        f"task.path={prompts}",
        "reward.fn=tests.mcore.test_train:count_even_words",
        "sampler.prompts_per_step=4",
        "sampler.samples_per_prompt=4",
        "sampler.prompts_per_batch=2",
        "sampler.max_new_tokens=5",
        "loss.kl_coef=0.1",
        "optimizer.lr=1e-3",
        "optimizer.warmup_steps=4",
        "logging.plot=false",
        f"run.steps={STEPS}",
        "checkpoint.interval=2",
    ]


@pytest.fixture(scope="module")
def uninterrupted(sampling, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    jobs.run([*sampling, f"run.dir={folder}"], folder / "log")
    assert [row["step"] for row in jobs.metrics(folder)] == list(range(1, STEPS + 1))
    return folder


def test_a_killed_run_gives_the_same_numbers_however_often_it_is_killed(
    sampling, uninterrupted, tmp_path
):
    arguments = [*sampling, f"run.dir={tmp_path}", "checkpoint.interval=1"]
    log = tmp_path / "log"
    moments = random.Random(7)
    kills = 0
    for life in range(12):  # the first lives end before a step, on any machine
        processes = jobs.start(arguments, log)
        time.sleep(moments.uniform(0.3, 0.5 + 0.2 * life))
        if not processes[0].is_alive():
            break
        jobs.kill(processes)
        kills += 1
    jobs.run(arguments, log)
    assert kills >= 3
    assert jobs.metrics(tmp_path) == jobs.metrics(uninterrupted)
    assert "damaged" not in log.read_text()


@pytest.fixture(scope="module")
def uninterrupted_on_two(sampling, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted_on_two")
    jobs.run([*sampling, f"run.dir={folder}"], folder / "log", ranks=2)
    return folder


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    sampling, uninterrupted_on_two, tmp_path, number
):
    arguments = [*sampling, f"run.dir={tmp_path}", "checkpoint.interval=100"]
    processes = jobs.start(arguments, tmp_path / "log", ranks=2)
    jobs.wait_for(tmp_path / "log", "step 2/")
    os.kill(processes[1].pid, number)
    assert jobs.finish(processes) == [0, 0], (tmp_path / "log").read_text()
    about = json.loads((tmp_path / "stopped.json").read_text())
    assert 2 <= about["step"] < STEPS and about["saved"]
    assert [row["step"] for row in jobs.metrics(tmp_path)] == list(range(1, about["step"] + 1))
    jobs.run(arguments, tmp_path / "log", ranks=2)
    assert not (tmp_path / "stopped.json").exists()
    assert jobs.metrics(tmp_path) == jobs.metrics(uninterrupted_on_two)


def test_a_run_resumes_on_another_world_size(sampling, uninterrupted, tmp_path):
    arguments = [*sampling, f"run.dir={tmp_path}"]
    jobs.run([*arguments, "run.steps=2"], tmp_path / "log", ranks=2)
    jobs.run(arguments, tmp_path / "log", ranks=1)
    expected = jobs.metrics(uninterrupted)
    found = jobs.metrics(tmp_path)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for a, b in zip(expected, found):
        for name in ("loss", "reward", "learning_rate", "kl", "grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name


def test_settings_that_would_repeat_or_skip_data_are_refused(sampling, uninterrupted, tmp_path):
    (tmp_path / "log").touch()
    arguments = [*sampling, f"run.dir={tmp_path}", f"checkpoint.resume={uninterrupted}/checkpoints"]
    processes = jobs.start([*arguments, "sampler.prompts_per_step=2"], tmp_path / "log")
    assert jobs.finish(processes) == [2]
    text = (tmp_path / "log").read_text()
    assert "sampler.prompts_per_step 4 in the checkpoint, 2 in this run" in text


def test_never_resuming_refuses_a_folder_that_has_checkpoints(sampling, uninterrupted, tmp_path):
    before = sorted((uninterrupted / "checkpoints").rglob("*"))
    arguments = [*sampling, f"run.dir={uninterrupted}", "checkpoint.resume=never"]
    assert jobs.finish(jobs.start(arguments, tmp_path / "log")) == [2]
    assert "checkpoint.resume=auto" in (tmp_path / "log").read_text()
    assert sorted((uninterrupted / "checkpoints").rglob("*")) == before
    assert len(jobs.metrics(uninterrupted)) == STEPS


def test_a_finished_run_goes_on_with_more_steps(sampling, uninterrupted, tmp_path):
    arguments = [*sampling, f"run.dir={tmp_path}", "run.steps=4"]
    jobs.run(arguments, tmp_path / "log")
    jobs.run(arguments, tmp_path / "log")  # nothing is left to do
    assert len(jobs.metrics(tmp_path)) == 4
    jobs.run([*arguments, f"run.steps={STEPS}"], tmp_path / "log")
    assert jobs.metrics(tmp_path) == jobs.metrics(uninterrupted)


def test_a_hang_ends_the_job_with_the_stacks_of_every_rank(sampling, tmp_path):
    arguments = [*sampling, f"run.dir={tmp_path}", "run.hang_timeout=4", "run.steps=50"]
    processes = jobs.start(arguments, tmp_path / "log", ranks=2)
    jobs.wait_for(tmp_path / "log", "step 1/")
    os.kill(processes[1].pid, signal.SIGSTOP)
    jobs.wait_for(tmp_path / "log", "rank 0 (node")
    processes[0].join(20)
    text = (tmp_path / "log").read_text()
    os.kill(processes[1].pid, signal.SIGCONT)
    processes[1].join(20)
    jobs.kill(processes)
    assert processes[0].exitcode == 124
    assert "no progress for 4 s" in text and "most recent call first" in text
    assert "run_steps" in text


def test_a_rank_that_raises_ends_the_job_with_its_own_error(sampling, tmp_path):
    arguments = [*sampling, f"run.dir={tmp_path}", "reward.fn=tests.mcore.jobs_rewards:rank_1_dies"]
    start = time.monotonic()
    processes = jobs.start(arguments, tmp_path / "log", ranks=2)
    codes = jobs.finish(processes, timeout=40)
    assert all(codes), codes
    assert time.monotonic() - start < 35
    text = (tmp_path / "log").read_text()
    assert "rank 1 (node" in text and "the reward broke here" in text


def test_a_rank_that_waits_for_another_at_the_start_ends_when_told_to(sampling, tmp_path):
    processes = jobs.start([*sampling, f"run.dir={tmp_path}"], tmp_path / "log", ranks=2)
    os.kill(processes[1].pid, signal.SIGSTOP)
    jobs.wait_for(tmp_path / "config.yaml", "run:")  # rank 0 is about to join the world
    time.sleep(3)
    processes[0].terminate()
    processes[0].join(5)
    code = processes[0].exitcode
    jobs.kill(processes)
    assert code == -signal.SIGTERM
