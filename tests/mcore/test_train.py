"""The main job, end to end, through the command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_rl_loss.build import check_inputs
from megatron_rl_loss.config.load import load_config
from megatron_rl_loss.errors import LayoutError
from megatron_rl_loss.rollouts.files import write_rollouts
from megatron_rl_loss.rollouts.rollout import Rollout
from megatron_rl_loss.train import main
from tests.mcore import jobs
from tests.reference import tiny_llama

WORDS = [f"w{i}" for i in range(tiny_llama.SIZES["vocab"])]
MODES = ["one rank", "two data ranks", "TP 2", "PP 2"]
SETTINGS = {
    "one rank": [],
    "two data ranks": [],
    "TP 2": ["parallel.tensor_model_parallel_size=2"],
    "PP 2": ["parallel.pipeline_model_parallel_size=2"],
}
NUMBERS = ["loss", "policy_loss", "kl_loss", "kl", "entropy", "clip_fraction", "reward"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", eos_token="w1"
    ).save_pretrained(folder)
    config = transformers.LlamaConfig(**tiny_llama.hf_config())
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(tiny_llama.random_weights(), strict=False)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rollout_file(tmp_path_factory) -> Path:
    generator = torch.Generator().manual_seed(3)
    rollouts = []
    for i in range(16):
        prompt, response = (
            torch.randint(0, 60, (n,), generator=generator).tolist() for n in (3 + i % 3, 2 + i % 5)
        )
        rollouts.append(
            Rollout(prompt, response, reward=float(i % 4 == 0) + 0.1 * i, group_id=f"p{i // 4}")
        )
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    write_rollouts(path, rollouts)
    return path


def torchrun(arguments: list[str]) -> None:
    """Runs the main job as a user would, on two ranks; the other tests save its imports."""
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    result = subprocess.run(
        [sys.executable, "-m", *start, "megatron_rl_loss.train", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "plot:" in result.stdout


def ranks_of(mode: str) -> int:
    return 1 if mode == "one rank" else 2


@pytest.fixture(scope="module")
def train_on_file(model_folder, rollout_file, tmp_path_factory):
    """Runs two steps of two mini-batches, once per mode, and returns metrics and folder."""
    done: dict[str, tuple[list[dict], Path]] = {}

    def run(mode: str) -> tuple[list[dict], Path]:
        if mode not in done:
            folder = tmp_path_factory.mktemp("run")
            arguments = [
                "configs/files_example.yaml",
                f"run.dir={folder}",
                "run.export=true",
                f"model.path={model_folder}",
                f"rollouts.path={rollout_file}",
                "rollouts.per_step=8",
                "batch.micro_batch_size=2",
                "batch.mini_batches_per_step=2",
                "loss.kl_coef=0.1",
                "loss.entropy_coef=0.01",
                "optimizer.lr=1e-3",
                "optimizer.eps=1e-3",
                *SETTINGS[mode],
            ]
            if mode == "two data ranks":
                torchrun(arguments)
            else:
                jobs.run(arguments, folder / "log", ranks_of(mode))
            assert (folder / "curves.png").stat().st_size > 1000
            done[mode] = jobs.metrics(folder), folder
        return done[mode]

    return run


@pytest.mark.parametrize("mode", MODES[1:])
def test_the_main_job_gives_the_same_numbers_on_two_ranks(train_on_file, mode):
    (alone, _), (together, _) = train_on_file("one rank"), train_on_file(mode)
    assert [row["step"] for row in together] == [1, 2]
    for a, b in zip(alone, together):
        assert set(a) == set(b)
        for name in [*NUMBERS, "ratio_max", "grad_norm"]:
            assert b[name] == pytest.approx(a[name], rel=2e-5, abs=1e-7), name


def test_the_second_mini_batch_is_off_policy_and_the_reference_stays(train_on_file):
    (first, second), _ = train_on_file("one rank")
    assert first["ratio_max"] > 1.0 and first["kl"] > 0.0
    assert second["kl"] > first["kl"]


def test_the_trained_model_is_exported_the_same_from_any_layout(train_on_file, model_folder):
    from transformers import AutoModelForCausalLM

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()

    before = weights(model_folder)
    alone, sharded = (weights(train_on_file(mode)[1] / "export") for mode in ("one rank", "TP 2"))
    for name, weight in alone.items():
        torch.testing.assert_close(sharded[name], weight, rtol=1e-5, atol=1e-6, msg=name)
        assert not torch.equal(weight, before[name]), name


def test_the_main_job_samples_and_trains(model_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(4)))
    runs = []
    for mode in MODES[:2]:
        folder = tmp_path / mode.replace(" ", "_")
        arguments = [
            "configs/base.yaml",
            f"run.dir={folder}",
            "run.steps=2",
            f"model.path={model_folder}",
            f"task.path={prompts}",
            "reward.fn=tests.mcore.test_train:count_even_words",
            "sampler.prompts_per_step=4",
            "sampler.samples_per_prompt=4",
            "sampler.prompts_per_batch=2",
            "sampler.max_new_tokens=5",
            "optimizer.lr=1e-3",
            "optimizer.eps=1e-3",
        ]
        jobs.run(arguments, tmp_path / "log", ranks_of(mode))
        runs.append(jobs.metrics(folder))
    for a, b in zip(*runs):
        assert a["rollout_log_prob_diff_max"] < 1e-5  # the sampler's weights are the trainer's
        for name in ["loss", "reward", "grad_norm", "response_length"]:
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-7), name


def count_even_words(prompt: str, response: str, example: dict) -> float:
    return sum(int(word[1:]) % 2 == 0 for word in response.split()) / 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimizer.lrr=1"], "optimizer.lrr.*lr"),
        (["run.steps=many"], "run.steps"),
        (["loss.name=ppo_klip"], "ppo_clip"),
        (["loss.reduction=seq_mean_token_sum_norm"], "max_seq_len"),
        (["parallel.tensor_model_parallel_size=3"], "3"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(arguments, words, capsys):
    assert main(["configs/demo.yaml", "--dry-run", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error:") and re.search(words, said), said


def test_dry_run_and_print_config_need_no_model(capsys):
    assert main(["configs/demo.yaml", "--dry-run", "--print-config", "run.steps=3"]) == 0
    said = capsys.readouterr().out
    assert "steps: 3" in said and "32 per step from sampler" in said


@pytest.mark.parametrize(
    "setting, words",
    [
        ("tensor_model_parallel_size", "does not divide num_attention_heads"),
        ("pipeline_model_parallel_size", "do not split evenly over 8 pipeline chunks"),
    ],
)
def test_dry_run_refuses_a_layout_that_cannot_hold_the_model(model_folder, setting, words):
    overrides = [f"model.path={model_folder}", f"parallel.{setting}=8"]
    with pytest.raises(LayoutError, match=words):
        check_inputs(load_config("configs/demo.yaml", overrides))


def test_a_bad_rollout_stops_both_ranks_before_training(model_folder, rollout_file, tmp_path):
    lines = rollout_file.read_text().splitlines()
    bad = json.loads(lines[5]) | {"reward": float("nan")}
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([*lines[:5], json.dumps(bad), *lines[6:]]))
    arguments = [
        "configs/files_example.yaml",
        f"run.dir={tmp_path / 'run'}",
        f"model.path={model_folder}",
        f"rollouts.path={path}",
        "rollouts.per_step=8",
    ]
    codes = jobs.finish(jobs.start(arguments, tmp_path / "log", 2))
    assert all(codes), codes
    said = (tmp_path / "log").read_text()
    assert "bad.jsonl, line 6" in said and "reward" in said
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_an_error_lets_the_checkpoint_that_is_being_written_get_to_the_disk(
    model_folder, rollout_file, tmp_path
):
    lines = rollout_file.read_text().splitlines()
    long = json.loads(lines[-1])
    long["response_ids"] = long["response_ids"] * 50
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join([*lines[:-1], json.dumps(long)]))
    arguments = [
        "configs/files_example.yaml",
        f"run.dir={tmp_path / 'run'}",
        f"model.path={model_folder}",
        f"rollouts.path={path}",
        "rollouts.per_step=8",
        "rollouts.shuffle=false",
        "batch.micro_batch_size=null",
        "batch.max_tokens_per_microbatch=32",
        "checkpoint.interval=1",
    ]
    assert jobs.finish(jobs.start(arguments, tmp_path / "log", 1)) == [2]
    assert "max_tokens_per_microbatch 32" in (tmp_path / "log").read_text()
    assert (tmp_path / "run" / "checkpoints" / "step_00000001").is_dir()
