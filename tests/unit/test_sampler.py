from __future__ import annotations

import copy
import os
from collections import Counter

import pytest
import torch

from megatron_rl_loss.errors import ConfigError, InputError, WeightsError
from megatron_rl_loss.rollouts.prompts import Prompt
from megatron_rl_loss.rollouts.sampler import Sampler, _draw

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

VOCAB, EOS = 17, 2


class Tokenizer:
    """Spells numbers: the text "3 5" is the ids [3, 5]."""

    chat_template = None
    eos_token_id = EOS

    def __call__(self, text):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i == EOS))


class ChatTokenizer(Tokenizer):
    chat_template = "there is one"

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        assert add_generation_prompt and return_dict
        ids = [9 if m["role"] == "system" else int(m["content"]) for m in messages]
        return {"input_ids": [1, *ids, 4]}


def tiny_model(tied=True, seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        initializer_range=0.5,
        eos_token_id=EOS,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


MODEL = tiny_model()


def prompts(*texts):
    return [
        Prompt(({"role": "user", "content": text},), index, 100 + index)
        for index, text in enumerate(texts)
    ]


def sampler(model=None, tokenizer=None, **settings):
    settings = {"max_new_tokens": 6, "samples_per_prompt": 5, "seed": 3, **settings}
    return Sampler(model or MODEL, tokenizer or Tokenizer(), **settings)


UNEQUAL = prompts("3 5 7", "4", "6 6 6 6 6 6 8", "1 2 3", "11 12")


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_rollout_log_probs_are_those_of_one_forward_over_the_whole_sequence(temperature):
    model = copy.deepcopy(MODEL).double()
    for rollout in sampler(temperature=temperature).generate(UNEQUAL, step=2):
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
        with torch.no_grad():
            log_probs = (model(ids).logits[0] / temperature).log_softmax(-1)
        first = len(rollout.prompt_ids)
        want = [log_probs[first + i - 1, t].item() for i, t in enumerate(rollout.response_ids)]
        assert rollout.rollout_log_probs == pytest.approx(want, abs=2e-5)


def test_rollouts_come_in_the_order_of_prompts_with_their_group_and_text():
    rollouts = sampler().generate(UNEQUAL, step=0)
    assert [r.group_id for r in rollouts] == [g for g in range(100, 105) for _ in range(5)]
    assert rollouts[0].prompt_ids == (3, 5, 7) and rollouts[-1].prompt_ids == (11, 12)
    for rollout in rollouts:
        words = [t for t in rollout.response_ids if t != EOS]
        assert rollout.metadata["response_text"] == " ".join(map(str, words))


def test_responses_end_with_the_end_token_or_at_the_limit():
    rollouts = sampler(max_new_tokens=8, samples_per_prompt=40).generate(UNEQUAL, step=0)
    ended = [r for r in rollouts if r.metadata["finished"]]
    cut = [r for r in rollouts if not r.metadata["finished"]]
    assert ended and cut
    assert all(r.response_ids[-1] == EOS and EOS not in r.response_ids[:-1] for r in ended)
    assert all(len(r.response_ids) == 8 and EOS not in r.response_ids for r in cut)
    assert {len(r.response_ids) for r in ended} > {1, 8}


def test_generation_stops_early_when_all_responses_ended():
    calls = []

    def favour_the_end(module, inputs, output):
        calls.append(1)
        output.logits[..., EOS] += 5.0

    model = copy.deepcopy(MODEL)
    model.register_forward_hook(favour_the_end)
    rollouts = sampler(model, max_new_tokens=20).generate(prompts("3 5 7"), step=0)
    lengths = [len(r.response_ids) for r in rollouts]
    assert len(calls) == max(lengths) < 20 and min(lengths) < max(lengths)


def test_positions_count_from_the_first_token_of_each_prompt():
    seen = []
    model = copy.deepcopy(MODEL)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    sampler(model, max_new_tokens=3, samples_per_prompt=1).generate(UNEQUAL[:3], step=0)
    assert seen[0][:, -3:].tolist() == [[0, 1, 2], [0, 0, 0], [4, 5, 6]]
    assert [p.flatten().tolist() for p in seen[1:]] == [[3, 1, 7], [4, 2, 8]][: len(seen) - 1]
    assert len(seen) > 1


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_rank_that_samples_a_prompt_does_not_matter(num_ranks):
    whole = sampler(prompts_per_batch=2).generate(UNEQUAL, step=1)
    # whole batches on each rank: bit for bit
    parts = (
        [UNEQUAL[:2], UNEQUAL[2:]] if num_ranks == 2 else [UNEQUAL[:2], UNEQUAL[2:4], UNEQUAL[4:]]
    )
    split = [r for part in parts for r in sampler(prompts_per_batch=2).generate(part, step=1)]
    assert split == whole


def test_sampling_alone_or_in_a_batch_differs_by_rounding_only():
    whole = sampler().generate(UNEQUAL, step=1)
    alone = [r for p in UNEQUAL for r in sampler().generate([p], step=1)]
    for a, b in zip(whole, alone, strict=True):
        assert a.response_ids == b.response_ids
        assert a.rollout_log_probs == pytest.approx(b.rollout_log_probs, abs=1e-5)


def test_seed_step_and_prompt_change_the_samples_and_nothing_else_does():
    same = prompts("3 5 7", "3 5 7")

    def sampled(seed=3, step=0):
        rollouts = sampler(seed=seed).generate(same, step)
        return [tuple(r.response_ids for r in rollouts[i : i + 5]) for i in (0, 5)]

    first = sampled()
    torch.manual_seed(99)
    assert sampled() == first
    assert len({*first, *sampled(step=1), *sampled(seed=4)}) == 6


def test_samples_follow_the_models_distribution():
    n = 4000
    rollouts = sampler(max_new_tokens=1, samples_per_prompt=n, temperature=0.7).generate(
        prompts("3 5 7"), step=0
    )
    counts = Counter(r.response_ids[0] for r in rollouts)
    with torch.no_grad():
        probs = (MODEL(torch.tensor([[3, 5, 7]])).logits[0, -1].double() / 0.7).softmax(-1)
    for token, p in enumerate(probs.tolist()):
        assert abs(counts[token] / n - p) < 4.5 * (p * (1 - p) / n) ** 0.5 + 1e-4


def test_drawing_never_takes_a_token_without_probability():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(4, 1)
    uniforms = torch.tensor([0.0, 0.499999, 0.5, 1.0 - 2**-53], dtype=torch.float64)
    tokens, log_probs = _draw(logits, uniforms)
    assert tokens.tolist() == [1, 1, 3, 3]
    assert log_probs.tolist() == pytest.approx([-0.693147] * 4, abs=1e-6)


def test_the_chat_template_is_used_where_there_is_one():
    prompt = Prompt(({"role": "system", "content": "x"}, {"role": "user", "content": "7"}))
    rollouts = sampler(tokenizer=ChatTokenizer()).generate([prompt], step=0)
    assert rollouts[0].prompt_ids == (1, 9, 7, 4)


# ---- weights


def names_and_tensors(model, leave_out=()):
    return [(k, v.clone()) for k, v in model.state_dict().items() if k not in leave_out]


@pytest.mark.parametrize("tied, leave_out", [(True, ()), (True, ("lm_head.weight",)), (False, ())])
def test_updated_weights_are_sampled_from(tied, leave_out):
    old, new = tiny_model(tied), tiny_model(tied, seed=1)
    sample = sampler(old)
    before = sample.generate(UNEQUAL, step=0)
    sample.update_weights(iter(names_and_tensors(new, leave_out)))
    after = sample.generate(UNEQUAL, step=0)
    assert after == sampler(new).generate(UNEQUAL, step=0) != before


def test_new_weights_are_copied_and_cast():
    sample = sampler(copy.deepcopy(MODEL))
    tensors = [(k, v.bfloat16()) for k, v in names_and_tensors(MODEL)]
    sample.update_weights(tensors)
    before = sample.generate(UNEQUAL, step=0)
    for _, tensor in tensors:
        tensor.zero_()
    assert sample.generate(UNEQUAL, step=0) == before


def wrong_weights():
    good = names_and_tensors(MODEL)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = dict(good)
    yield "missing: model.layers.1.mlp.up_proj.weight", [x for x in good if x[0] != name]
    yield "the model has no 'model.layers.7.x'", [*good, ("model.layers.7.x", torch.ones(2))]
    yield (
        r"is \(16, 32\), the model's is \(32, 16\)",
        [(k, v.T if k == name else v) for k, v in good],
    )
    yield "came twice", [*good, (name, tensors[name])]
    yield "is tied to .* but differs", [(k, v + 1 if k == "lm_head.weight" else v) for k, v in good]


@pytest.mark.parametrize("message, tensors", wrong_weights(), ids=lambda x: str(x)[:30])
def test_weights_that_do_not_fit_are_refused_and_the_model_is_not_used(message, tensors):
    model = tiny_model()
    sample = sampler(model)
    with pytest.raises(WeightsError, match=message):
        sample.update_weights(tensors)
    with pytest.raises(WeightsError, match="the last update_weights failed"):
        sample.generate(UNEQUAL, step=0)
    sample.update_weights(names_and_tensors(MODEL))
    assert sample.generate(UNEQUAL, step=0)


# ---- bad input


@pytest.mark.parametrize(
    "setting", ["max_new_tokens", "samples_per_prompt", "temperature", "prompts_per_batch"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_settings_out_of_range_are_refused(setting, value):
    with pytest.raises(ConfigError, match=f"{setting} must be > 0, got {value}"):
        sampler(**{setting: value})


def test_prompts_too_long_for_the_model_are_refused():
    with pytest.raises(InputError, match=r"has 30 tokens; .* 1 to 32 tokens"):
        sampler().generate(prompts(" ".join(["3"] * 30)), step=0)


def test_weights_that_are_not_finite_are_refused():
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="logits that are not finite"):
        sampler(model).generate(UNEQUAL, step=0)
