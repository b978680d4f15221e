"""A tiny Qwen3-MoE through the main job: expert-parallel ranks give the numbers of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_rl_loss.errors import WeightsError
from megatron_rl_loss.rollouts.files import write_rollouts
from megatron_rl_loss.rollouts.rollout import Rollout
from tests.mcore import hf_models, jobs
from tests.mcore.test_train import NUMBERS, model_folder  # noqa: F401

pytest.importorskip("transformers")

TRAINED = {
    "all weights": [],
    "adapters": ["lora.rank=4", "lora.targets=all-linear", "lora.expert_rank=2", "lora.alpha=8"],
}


@pytest.fixture(scope="module")
def moe_folder(model_folder, tmp_path_factory) -> Path:  # noqa: F811
    """The tokenizer of `model_folder` with a mixture of experts."""
    import shutil

    folder = tmp_path_factory.mktemp("moe") / "model"
    shutil.copytree(model_folder, folder)
    hf_models.hf_model("qwen3_moe").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def even_rollouts(tmp_path_factory) -> Path:
    """16 rollouts of one length."""
    ids = torch.randint(0, 60, (16, 9), generator=torch.Generator().manual_seed(3)).tolist()
    rollouts = [
        Rollout(row[:4], row[4:], reward=float(i % 4 == 0) + 0.1 * i, group_id=f"p{i // 4}")
        for i, row in enumerate(ids)
    ]
    path = tmp_path_factory.mktemp("rollouts") / "even.jsonl"
    write_rollouts(path, rollouts)
    return path


# The load-balancing loss is a mean of micro-batch values, and counts padding: it is the same where
# the micro-batches are, so these layouts have no data ranks and the rollouts one length.
AUX = "model.moe_aux_loss_coef=0.1"
PP2 = "parallel.pipeline_model_parallel_size=2"
LAYOUTS = {
    "EP 2": (["parallel.expert_model_parallel_size=2"], []),
    "PP 2": ([PP2], [AUX]),
    "PP 2, VPP 2": ([PP2, "parallel.virtual_pipeline_model_parallel_size=2"], [AUX]),
}
CASES = [("all weights", "EP 2"), ("adapters", "EP 2"), ("all weights", "PP 2")]
CASES += [("all weights", "PP 2, VPP 2")]


@pytest.mark.parametrize(("trained", "layout"), CASES)
def test_two_ranks_train_experts_like_one(trained, layout, moe_folder, even_rollouts, tmp_path):
    sizes, both = LAYOUTS[layout]
    rows, weights = [], []
    for ranks, settings in ((1, []), (2, sizes)):
        folder = tmp_path / f"{ranks}"
        arguments = [
            "configs/files_example.yaml", f"run.dir={folder}", f"model.path={moe_folder}",
            f"rollouts.path={even_rollouts}", "rollouts.per_step=8", "batch.micro_batch_size=2",
            "batch.mini_batches_per_step=2", "loss.kl_coef=0.1", "optimizer.lr=1e-3",
            "optimizer.eps=1e-3", "logging.plot=false", "run.export=true",
            *settings, *both, *TRAINED[trained],
        ]  # fmt: skip
        jobs.run(arguments, tmp_path / f"{ranks}.log", ranks)
        rows.append(jobs.metrics(folder))
        weights.append(exported(folder))
    alone, together = rows
    assert [row["step"] for row in together] == [1, 2]
    for a, b in zip(alone, together, strict=True):
        for name in [*NUMBERS, "ratio_max", "grad_norm"]:
            assert b[name] == pytest.approx(a[name], rel=5e-5, abs=1e-6), name
    assert together[1]["kl"] > 0
    for name, weight in weights[0].items():  # four steps move a weight by up to 4e-3
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-5, atol=5e-6, msg=name)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    files = sorted((folder / "export").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert any("expert" in name for name in found)
    return found


def test_ep_2_samples_from_the_merged_weights_that_it_trains(moe_folder, tmp_path):
    prompts, folder = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(4)))
    arguments = [
        "configs/base.yaml", f"run.dir={folder}", f"model.path={moe_folder}", "run.steps=2",
        f"task.path={prompts}", "reward.fn=tests.mcore.test_train:count_even_words",
        "sampler.prompts_per_step=4", "sampler.samples_per_prompt=4", "sampler.max_new_tokens=4",
        "sampler.prompts_per_batch=2", "optimizer.lr=1e-2", "optimizer.eps=1e-3",
        "logging.plot=false", "parallel.expert_model_parallel_size=2", *TRAINED["adapters"],
    ]  # fmt: skip
    jobs.run(arguments, tmp_path / "log", 2)
    first, second = jobs.metrics(folder)
    assert first["grad_norm"] > 0
    # the sampler has the experts of both ranks, with the adapters of the step before
    assert all(row["rollout_log_prob_diff_max"] < 1e-5 for row in (first, second))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_sampler_takes_over_experts_by_their_checkpoint_names(name):
    from transformers import AutoModelForCausalLM

    from megatron_rl_loss.rollouts.sampler import Sampler
    from tests.mcore.test_moe_weights import per_expert

    model = AutoModelForCausalLM.from_config(hf_models.hf_config(name))
    sampler = Sampler.__new__(Sampler)
    sampler._model = model
    sampler.update_weights(per_expert(name).items())
    for key, tensor in hf_models.hf_model(name).state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    weights = per_expert(name)
    removed = next(key for key in weights if ".experts.3." in key)
    del weights[removed]
    with pytest.raises(WeightsError, match="experts.3"):
        sampler.update_weights(weights.items())
