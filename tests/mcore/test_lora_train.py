"""LoRA in the main job: through the command line, and step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore.test_train import command, metrics_of, model_folder  # noqa: F401
from tests.spawn import run_ranks

LORA = ["lora.rank=4", "lora.targets=all-linear", "lora.alpha=8"]


def settings(folder: Path, prompts: Path) -> list[str]:
    return [
        f"model.path={folder}",
        f"task.path={prompts}",
        "reward.fn=tests.mcore.test_train:count_even_words",
        "sampler.prompts_per_step=4",
        "sampler.samples_per_prompt=4",
        "sampler.prompts_per_batch=2",
        "sampler.max_new_tokens=5",
        "loss.kl_coef=0.1",
        "optimizer.lr=1e-2",
        "optimizer.eps=1e-3",
        "run.steps=3",
    ]


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(4)))
    return path


def test_the_command_line_trains_adapters_and_resumes_in_another_layout(
    model_folder,  # noqa: F811
    prompts,
    tmp_path,
):
    arguments = [*settings(model_folder, prompts), *LORA, "loss.lm_head=fused"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    two_ranks = ["parallel.tensor_model_parallel_size=2", "checkpoint.interval=1"]
    for mode, folder, more in (
        ("one rank", whole, []),
        ("two ranks", resumed, ["run.steps=2", *two_ranks]),
        ("one rank", resumed, ["checkpoint.interval=1"]),
    ):
        result = command(mode, "configs/base.yaml", f"run.dir={folder}", *arguments, *more)
        assert result.returncode == 0, result.stderr[-4000:]
    first, second, third = metrics_of(whole)
    assert first["kl"] == 0.0 and first["grad_norm"] > 0
    assert 0 < second["kl"] < third["kl"]
    # the sampler has the merged weights of the step before
    assert all(row["rollout_log_prob_diff_max"] < 1e-5 for row in (first, second, third))
    cut = metrics_of(resumed)
    assert [row["step"] for row in cut] == [1, 2, 3]
    for name in ("loss", "kl", "grad_norm", "reward"):
        for a, b in zip((first, second, third), cut):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-6), name


def _run(arguments: list[str]) -> dict[str, Any]:
    from megatron_rl_loss.build import build_job
    from megatron_rl_loss.config.load import load_config
    from megatron_rl_loss.lora import adapters

    job = build_job(load_config("configs/base.yaml", arguments))
    chunk = job.trainer.chunks[0]
    base = {n: p.detach().clone() for n, p in chunk.named_parameters() if "adapter" not in n}
    rows = [job.trainer.train_on(job.source.rollouts(step)) for step in range(3)]
    after = dict(chunk.named_parameters())
    return {
        "kl": [row["kl"] for row in rows],
        "unchanged": all(torch.equal(after[n], p) for n, p in base.items()),
        "moved": all(float(h.b.detach().norm()) > 0 for h in adapters([chunk])),
        "second copy": job.trainer.reference is not job.trainer.chunks,
    }


def test_the_base_model_stays_and_is_its_own_reference(model_folder, prompts, tmp_path):  # noqa: F811
    arguments = [f"run.dir={tmp_path}", *settings(model_folder, prompts), *LORA]
    seen = run_ranks(_run, 1, arguments)[0]
    assert seen["unchanged"] and seen["moved"] and not seen["second copy"]
    assert seen["kl"][0] == 0.0 and seen["kl"][1] > 0.0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lora.targets=attn", "attention, all-linear"),
        ("lora.rank=0", "lora.rank: must be at least 1"),
        ("lora.dropout=0.1", "lora.dropout: unknown key"),
    ],
)
def test_a_wrong_lora_setting_is_one_clear_error(setting, words, model_folder, prompts, capsys):  # noqa: F811
    from megatron_rl_loss.train import main

    arguments = [*settings(model_folder, prompts), "lora.rank=4", setting]
    assert main(["configs/base.yaml", "--dry-run", *arguments]) == 2
    assert words in capsys.readouterr().err
