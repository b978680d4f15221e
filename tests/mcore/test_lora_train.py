"""LoRA in the main job: through the command line, and step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mcore import jobs
from tests.mcore.test_train import model_folder  # noqa: F401
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
    export = ["loss.lm_head=fused", "run.export=true"]
    arguments = [*settings(model_folder, prompts), *LORA, *export]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    two_ranks = ["parallel.tensor_model_parallel_size=2", "checkpoint.interval=1"]
    for ranks, folder, more in (
        (1, whole, []),
        (2, resumed, ["run.steps=2", *two_ranks]),
        (1, resumed, ["checkpoint.interval=1"]),
    ):
        words = ["configs/base.yaml", f"run.dir={folder}", *arguments, *more]
        jobs.run(words, tmp_path / "log", ranks)
    first, second, third = jobs.metrics(whole)
    assert first["kl"] == 0.0 and first["grad_norm"] > 0
    assert 0 < second["kl"] < third["kl"]
    # the sampler has the merged weights of the step before
    assert all(row["rollout_log_prob_diff_max"] < 1e-5 for row in (first, second, third))
    cut = jobs.metrics(resumed)
    assert [row["step"] for row in cut] == [1, 2, 3]
    for name in ("loss", "kl", "grad_norm", "reward"):
        for a, b in zip((first, second, third), cut):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-6), name
    base, *tuned = (_logits(model_folder, run) for run in (None, whole, resumed))
    assert (tuned[0] - base).abs().max() > 1e-2
    torch.testing.assert_close(tuned[1], tuned[0], rtol=1e-3, atol=1e-3)


def _logits(base: Path, run: Path | None) -> torch.Tensor:
    """Returns what Transformers computes, with the adapters that a run exported."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    if run is not None:
        peft = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, run / "export")
    with torch.no_grad():
        return model(torch.tensor([[3, 5, 7, 11]])).logits


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
