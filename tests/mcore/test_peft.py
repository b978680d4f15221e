"""PEFT folders: written by one library and read by the other, dense and with experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_loss.errors import WeightsError
from tests.mcore import hf_models
from tests.mcore.hf_models import Layout
from tests.mcore.test_moe_weights import per_expert
from tests.spawn import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

BOUND = 1e-5
PREFIX = "base_model.model."
ALL = {"rank": 8, "alpha": 12.0, "targets": "all-linear", "expert_rank": 4}
SCALE = 1.5
LAYOUTS = {
    "one rank": Layout(),
    "TP 2, SP": Layout(tp=2, sequence_parallel=True, etp=1),
    "TP 2, SP, expert-TP 2": Layout(tp=2, sequence_parallel=True, etp=2),
    "EP 2": Layout(ep=2),
    "PP 2": Layout(pp=2),
}
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def base_weights(name: str) -> dict[str, Tensor]:
    return per_expert(name) if "moe" in name else dict(hf_models.hf_model(name).state_dict())


def made_adapters(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns {Hugging Face layer: (A, B)}; q, k, v share A, and so do gate and up."""
    generator = torch.Generator().manual_seed(5)
    made, shared = {}, {}
    for key, weight in base_weights(name).items():
        leaf = key.split(".")[-2]
        if leaf not in (*"qkvo", *EXPERT_PROJECTIONS) and leaf[:1] not in "qkvo":
            continue
        if not leaf.endswith("_proj"):
            continue
        rank = 4 if ".experts." in key else 8
        group = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(leaf, leaf)
        place = key.replace(f".{leaf}.", f".{group}.")
        if place not in shared:
            shared[place] = 0.1 * torch.randn(rank, weight.shape[1], generator=generator)
        b = 0.1 * torch.randn(weight.shape[0], rank, generator=generator)
        made[key.removesuffix(".weight")] = (shared[place], b)
    return made


def write_folder(folder: Path, made: dict[str, tuple[Tensor, Tensor]], **config: Any) -> None:
    """Writes a PEFT folder with nothing of this package."""
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {}
    for module, pair in made.items():
        for letter, tensor in zip("AB", pair):
            tensors[f"{PREFIX}{module}.lora_{letter}.weight"] = tensor.clone().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 12.0,
        "target_modules": sorted({module.split(".")[-1] for module in made}),
        "rank_pattern": {r"mlp\.experts\.\d+\.\w+": 4},
        "alpha_pattern": {r"mlp\.experts\.\d+\.\w+": 6.0},
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def merged_weights(name: str, made: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    weights = {key: tensor.clone() for key, tensor in base_weights(name).items()}
    for module, (a, b) in made.items():
        delta = SCALE * (b.double() @ a.double())
        weights[f"{module}.weight"] = (weights[f"{module}.weight"].double() + delta).float()
    return weights


def merged_logits(name: str, made: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Returns Hugging Face's logits with the adapters added to its weights by hand."""
    from transformers import AutoModelForCausalLM

    from megatron_rl_loss.rollouts.expert_views import per_expert_views

    model = AutoModelForCausalLM.from_config(hf_models.hf_config(name)).eval()
    views = per_expert_views(model.state_dict())
    with torch.no_grad():
        for key, tensor in merged_weights(name, made).items():
            views[key].copy_(tensor)
        return model(hf_models.tokens()).logits


def adapted(layout: Layout, config: Any, weights: Any, lora: dict[str, Any]) -> tuple[Any, Any]:
    """On a rank: the chunks with fresh adapters, and the spec."""
    from megatron_rl_loss.lora import LoRAConfig, apply_lora
    from megatron_rl_loss.mcore.weights import load_hf_weights

    chunks, spec = hf_models.start(layout, config)
    load_hf_weights(chunks, weights, spec)
    apply_lora(chunks, LoRAConfig(**lora))
    return chunks, spec


def load_and_save(
    layout: Layout, config: Any, weights: Any, lora: dict[str, Any], source: str, target: str
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """On a rank: loads a folder, runs the model, exports it merged, and saves folders."""
    from megatron_rl_loss.lora import merged
    from megatron_rl_loss.lora.peft_export import save_peft
    from megatron_rl_loss.lora.peft_import import load_peft
    from megatron_rl_loss.mcore.weights import export_hf_weights

    chunks, spec = adapted(layout, config, weights, lora)
    try:
        load_peft(source, chunks, spec)
        logits = hf_models.pipeline_logits(chunks, hf_models.tokens())
        live = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
        whole = dict(export_hf_weights(merged(chunks), spec, dtype=torch.float32))
        save_peft(target, chunks, spec, base_model="base")
        save_peft(f"{target}-stacked", chunks, spec, layout="stacked")
        after = [p for chunk in chunks for p in chunk.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(live, after, strict=True))
        return logits, whole
    finally:
        hf_models.stop()


def run(name: str, layout: Layout, source: Path, target: Path, lora: Any = ALL) -> list[Any]:
    return run_ranks(
        load_and_save, layout.world_size, layout, hf_models.hf_config(name).to_dict(),
        base_weights(name), lora, str(source), str(target),
    )  # fmt: skip


def whole_logits(results: list[Any], layout: Layout) -> Tensor:
    shards = {i % layout.tp: result[0] for i, result in enumerate(results) if result[0] is not None}
    return torch.cat([shards[i] for i in range(layout.tp)], -1)[..., :100]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3", "one rank"), ("qwen3", "TP 2, SP"), *(("qwen3_moe", layout) for layout in LAYOUTS)],
)
def test_a_folder_loads_runs_merges_and_comes_back_in_any_layout(name, layout, tmp_path):
    made = made_adapters(name)
    write_folder(tmp_path / "in", made)
    results = run(name, LAYOUTS[layout], tmp_path / "in", tmp_path / "out")
    expected = merged_logits(name, made)
    assert hf_models.relative_error(expected, hf_models.hf_logits(name)) > 0.05
    error = hf_models.relative_error(whole_logits(results, LAYOUTS[layout]), expected)
    assert error <= BOUND
    for _, whole in results:
        for key, tensor in merged_weights(name, made).items():
            torch.testing.assert_close(whole[key], tensor, rtol=0, atol=1e-6, msg=key)
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Returns a folder with `out` and `out-stacked`, of the mixture of experts."""
    folder = tmp_path_factory.mktemp("saved")
    write_folder(folder / "in", made_adapters("qwen3_moe"))
    run("qwen3_moe", LAYOUTS["EP 2"], folder / "in", folder / "out")
    return folder


def peft_logits(name: str, folder: Path) -> Tensor:
    """Returns the logits of the base model with the folder loaded by the real library."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_models.hf_config(name))
    model.load_state_dict(hf_models.hf_model(name).state_dict())
    model = PeftModel.from_pretrained(model, str(folder)).eval()
    with torch.no_grad():
        return model(hf_models.tokens()).logits


@pytest.mark.parametrize("layout", ["out", "out-stacked"])
def test_the_real_peft_gives_the_same_logits_with_what_was_saved(layout, saved):
    pytest.importorskip("peft")
    expected = merged_logits("qwen3_moe", made_adapters("qwen3_moe"))
    error = hf_models.relative_error(peft_logits("qwen3_moe", saved / layout), expected)
    assert error <= BOUND


def save_merged(config: Any, weights: Any, source: str, target: str) -> None:
    from megatron_rl_loss.lora import load_peft, merged
    from megatron_rl_loss.mcore.weights import save_hf_checkpoint

    chunks, spec = adapted(LAYOUTS["EP 2"], config, weights, ALL)
    try:
        load_peft(source, chunks, spec)
        save_hf_checkpoint(target, merged(chunks), spec, config, dtype=torch.float32)
    finally:
        hf_models.stop()


def test_a_merged_checkpoint_is_what_transformers_loads(saved, tmp_path):
    from transformers import AutoModelForCausalLM

    config, target = hf_models.hf_config("qwen3_moe").to_dict(), str(tmp_path / "merged")
    weights = base_weights("qwen3_moe")
    run_ranks(save_merged, 2, config, weights, str(saved / "in"), target)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        logits = model(hf_models.tokens()).logits
    expected = merged_logits("qwen3_moe", made_adapters("qwen3_moe"))
    assert hf_models.relative_error(logits, expected) <= BOUND


def changed_copy(saved: Path, folder: Path, change: Any) -> Path:
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(saved / "out", folder)
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_the_real_peft_reads_every_experts_tensors(saved, tmp_path):
    pytest.importorskip("peft")
    before = peft_logits("qwen3_moe", saved / "out")
    for expert in range(4):
        for projection in EXPERT_PROJECTIONS:
            key = f"{PREFIX}model.layers.2.mlp.experts.{expert}.{projection}.lora_B.weight"

            def change(tensors: dict[str, Tensor], key: str = key) -> None:
                tensors[key] += 0.1

            folder = changed_copy(saved, tmp_path / f"{expert}{projection}", change)
            assert (peft_logits("qwen3_moe", folder) - before).abs().max() > 1e-4, key


def test_one_global_scale_is_right_for_every_adapter(saved):
    config = json.loads((saved / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 4 * SCALE)
    assert set(config["rank_pattern"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for leaf, rank in config["rank_pattern"].items():
        assert config["alpha_pattern"][leaf] / rank == SCALE
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", *EXPERT_PROJECTIONS]
    )


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]])
def test_an_adapter_made_by_peft_with_a_different_a_for_each_layer_loads(targets, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_models.hf_config("qwen3"))
    model.load_state_dict(hf_models.hf_model("qwen3").state_dict())
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, use_rslora=True
    )
    model = peft.get_peft_model(model, settings).eval()
    model.save_pretrained(tmp_path / "in")
    with torch.no_grad():
        expected = model(hf_models.tokens()).logits
    lora = {"rank": 9, "alpha": 18.0, "targets": "all-linear"}
    if targets != "all-linear":
        lora |= {"targets": ["linear_qkv", "linear_fc2"]}
    layout = LAYOUTS["TP 2, SP"]
    results = run("qwen3", layout, tmp_path / "in", tmp_path / "out", lora)
    assert hf_models.relative_error(whole_logits(results, layout), expected) <= BOUND


def refused(layout: Layout, config: Any, weights: Any, lora: Any, folder: str) -> str:
    """On a rank: the error of loading a folder; nothing may have changed."""
    from megatron_rl_loss.lora.peft_import import load_peft

    chunks, spec = adapted(layout, config, weights, lora)
    try:
        before = [p.detach().clone() for p in chunks[0].parameters()]
        with pytest.raises(WeightsError) as caught:
            load_peft(folder, chunks, spec)
        after = chunks[0].parameters()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return str(caught.value)
    finally:
        hf_models.stop()


def refusals(folder: Path, name: str = "qwen3_moe", lora: Any = ALL) -> str:
    config = hf_models.hf_config(name).to_dict()
    messages = run_ranks(
        refused, 2, LAYOUTS["EP 2"] if "moe" in name else LAYOUTS["PP 2"], config,
        base_weights(name), lora, str(folder),
    )  # fmt: skip
    assert messages[0] == messages[1]
    return messages[0]


def test_missing_extra_and_transposed_tensors_are_named_and_nothing_is_loaded(tmp_path):
    made = made_adapters("qwen3_moe")
    del made["model.layers.1.mlp.experts.3.up_proj"]
    made["model.layers.0.mlp.gate"] = (torch.zeros(8, 64), torch.zeros(4, 8))
    transposed = "model.layers.0.mlp.experts.2.down_proj"
    made[transposed] = (made[transposed][0].t(), made[transposed][1])
    write_folder(tmp_path / "in", made, target_modules=sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", *EXPERT_PROJECTIONS]
    ))  # fmt: skip
    message = refusals(tmp_path / "in")
    for words in (
        f"missing: {PREFIX}model.layers.1.mlp.experts.3.up_proj.lora_A.weight, {PREFIX}model.layers"
        ".1.mlp.experts.3.up_proj.lora_B.weight",
        f"unexpected, as no layer of that name takes an adapter: {PREFIX}model.layers.0.mlp.gate.",
        f"{transposed}.lora_A.weight has shape (32, 4) (transposed), expected (4, 32)",
    ):
        assert words in message, message


@pytest.mark.parametrize(
    ("lora", "config", "words"),
    [
        (ALL | {"targets": "attention"}, {}, "the model has no adapter for: model.layers.0.mlp"),
        (ALL | {"rank": 4}, {}, "linear_qkv needs rank 8"),
        (ALL, {"use_dora": True}, "use_dora=True is not supported"),
        (ALL, {"init_lora_weights": "pissa"}, "changed the base model's weights"),
        (ALL, {"r": 16}, "q_proj.lora_A.weight has shape (8, 64), expected (16, 64)"),
    ],
)
def test_folders_that_do_not_fit_the_model_are_refused(lora, config, words, tmp_path):
    write_folder(tmp_path / "in", made_adapters("qwen3"), **config)
    assert words in refusals(tmp_path / "in", "qwen3", lora)
