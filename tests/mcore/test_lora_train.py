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


def test_the_command_line_trains_adapters(model_folder, prompts, tmp_path):  # noqa: F811
    folder = tmp_path / "run"
    result = command(
        "two ranks", "configs/base.yaml", f"run.dir={folder}",
        "parallel.tensor_model_parallel_size=2",
        *settings(model_folder, prompts), *LORA,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    first, second, third = metrics_of(folder)
    assert first["kl"] == 0.0 and first["grad_norm"] > 0
    assert 0 < second["kl"] < third["kl"]
    # the sampler has the merged weights of the step before
    assert all(row["rollout_log_prob_diff_max"] < 1e-5 for row in (first, second, third))


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
        ("lora.alpha=-1", "lora.alpha"),
        ("lora.dropout=0.1", "lora.dropout: unknown key"),
    ],
)
def test_a_wrong_lora_setting_is_one_clear_error(setting, words, model_folder, prompts):  # noqa: F811
    arguments = [*settings(model_folder, prompts), "lora.rank=4", setting]
    result = command("one rank", "configs/base.yaml", "--dry-run", *arguments)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert words in result.stderr, result.stderr
