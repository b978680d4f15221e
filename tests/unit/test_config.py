from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from megatron_rl_loss.config.keys import leaf_paths
from megatron_rl_loss.config.load import load_config, save_config, to_yaml
from megatron_rl_loss.config.schema import Config
from megatron_rl_loss.config.validate import check_config, check_layout
from megatron_rl_loss.errors import ConfigError, LayoutError
from megatron_rl_loss.losses.registry import LOSSES

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
DEMO = CONFIGS / "demo.yaml"
FILES = CONFIGS / "files_example.yaml"
CRITIC = CONFIGS / "ppo_critic_example.yaml"
RECIPES = sorted((CONFIGS / "loss").glob("*.yaml"))
MODELS = sorted((CONFIGS / "model").glob("*.yaml"))
CLUSTERS = sorted((CONFIGS / "cluster").glob("*.yaml"))

# The loss reads tensors that rollouts do not carry.
NOT_FOR_THE_MAIN_JOB = ("on_policy_distillation",)


def problems_of(*overrides, path=DEMO):
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return str(caught.value).splitlines()


def problem_of(*overrides, path=DEMO):
    problems = problems_of(*overrides, path=path)
    assert len(problems) == 1, problems
    return problems[0]


def yaml_file(tmp_path, text, name="x.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


# ---- loading


def test_later_layers_win_over_earlier_ones(tmp_path):
    yaml_file(tmp_path, "run: {seed: 2, steps: 2}\noptimizer: {lr: 0.5}", "first.yaml")
    (tmp_path / "sub").mkdir()
    yaml_file(tmp_path, "base: ../first.yaml\nrun: {steps: 3}", "sub/second.yaml")
    top = yaml_file(tmp_path, "base: [sub/second.yaml]\ntask: {name: chain_sum}", "top.yaml")
    extra = yaml_file(tmp_path, "run: {steps: 4, log_interval: 4}", "extra.yaml")
    config = load_config(top, ["run.log_interval=5", str(extra)])
    assert (config.run.seed, config.run.steps, config.run.log_interval) == (2, 4, 5)
    assert (config.optimizer.lr, config.task.name) == (0.5, "chain_sum")


def test_the_result_is_plain_objects_only():
    def check(value):
        if is_dataclass(value):
            for field in fields(value):
                check(getattr(value, field.name))
        elif isinstance(value, (list, dict)):
            assert type(value) in (list, dict)
            for item in value.values() if isinstance(value, dict) else value:
                check(item)
        else:
            assert value is None or type(value) in (int, float, str, bool)

    check(load_config(DEMO, ["loss.settings.clip_ratio_high=0.3"]))


def test_numbers_are_read_as_the_schema_says():
    config = load_config(DEMO, ["optimizer.lr=1e-6", "optimizer.betas=[0.8,1e-1]", "run.dir=7"])
    assert (config.optimizer.lr, config.optimizer.betas, config.run.dir) == (1e-6, [0.8, 0.1], "7")
    assert load_config(DEMO, ["loss.settings.clip_ratio_low=1e-3"]).loss.settings == {
        "clip_ratio_low": 0.001
    }
    assert type(load_config(DEMO, ["optimizer.clip_grad=1"]).optimizer.clip_grad) is float


def test_interpolations_are_resolved(monkeypatch):
    monkeypatch.setenv("MY_STEPS", "9")
    config = load_config(DEMO, ["run.steps=${oc.env:MY_STEPS}", "run.dir=runs/${run.seed}"])
    assert (config.run.steps, config.run.dir) == (9, "runs/1234")


def test_empty_files_and_sections_change_nothing(tmp_path):
    path = yaml_file(tmp_path, f"base: {DEMO}\nloss:\n  # name: dual_clip\nrun:\n")
    assert load_config(path) == load_config(DEMO)
    assert load_config(DEMO, [str(yaml_file(tmp_path, "", "y.yaml"))]) == load_config(DEMO)


@pytest.mark.parametrize("path", [DEMO, FILES])
def test_a_saved_config_is_read_back_equal(tmp_path, path):
    config = load_config(path, ["loss.settings.clip_ratio_high=0.3", "optimizer.lr=1.23e-7"])
    save_config(config, tmp_path / "deep" / "config.yaml")
    assert load_config(tmp_path / "deep" / "config.yaml") == config
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["config.yaml"]


def test_settings_of_another_loss_or_task_are_left_behind(tmp_path):
    first = yaml_file(
        tmp_path,
        f"base: {DEMO}\nloss: {{name: ppo_clip, settings: {{clip_ratio_low: 0.1}}}}",
    )
    keep = load_config(first, ["loss.settings.clip_ratio_high=0.3"])
    assert keep.loss.settings == {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
    assert load_config(first, ["loss.name=policy_gradient"]).loss.settings == {}
    both = ["loss.settings.dual_clip_ratio=4", "loss.name=dual_clip"]
    assert load_config(first, both).loss.settings == {"dual_clip_ratio": 4}
    assert load_config(first, ["task.name=chain_sum"]).task.params == {}
    assert load_config(first).task.params["max_terms"] == 2


# ---- the configs of the repository


def test_base_yaml_is_exactly_the_defaults(tmp_path):
    path = yaml_file(tmp_path, f"base: {CONFIGS / 'base.yaml'}\ntask: {{name: chain_sum}}")
    config = load_config(path)
    config.task.name = None
    assert config == Config()
    text = (CONFIGS / "base.yaml").read_text(encoding="utf-8")
    for leaf in leaf_paths():
        assert f"\n  {leaf.split('.')[1]}:" in text, leaf


def test_demo_trains_grpo_on_additions():
    config = load_config(DEMO)
    assert (config.loss.name, config.loss.reduction) == ("ppo_clip", "token_mean")
    assert (config.advantage.estimator, config.advantage.normalize_by_std) == ("grpo", True)
    assert config.task.name == "basic_arithmetic" and config.task.params["operators"] == ["+"]
    assert config.sampler.samples_per_prompt > 1 and config.model.path == "smollm2-demo"


def test_the_example_of_rollout_files_has_what_it_says():
    from megatron_rl_loss.rollouts.files import RolloutFiles

    config = load_config(FILES)
    files = RolloutFiles(REPOSITORY / config.rollouts.path)
    batch = files.mini_batch(0, config.rollouts.per_step, whole_groups=True)
    rewards = {}
    for rollout in batch:
        rewards.setdefault(rollout.group_id, set()).add(rollout.reward)
    assert len(batch) == 64 and len(rewards) == 8
    assert sum(len(different) > 1 for different in rewards.values()) >= 4


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_goes_on_top_of_a_run(path):
    no_rewards = "estimator: none" in path.read_text(encoding="utf-8")
    overrides = [str(path), "loss.max_seq_len=10"]
    if path.stem in NOT_FOR_THE_MAIN_JOB:
        assert "which rollouts do not carry" in problem_of(*overrides, path=FILES)
        return
    base = FILES if no_rewards else DEMO
    config = load_config(base, overrides)
    assert config.run.steps == load_config(base).run.steps
    assert config.loss.max_seq_len == 10


def test_sampled_rollouts_have_no_teacher():
    recipe = str(CONFIGS / "loss" / "top_k_distillation.yaml")
    (said,) = (x for x in problems_of(recipe, path=DEMO) if x.startswith("rollouts.source"))
    assert "reads teacher_top_log_probs, teacher_top_ids, which sampled rollouts do not" in said


def test_every_loss_has_a_recipe():
    assert set(LOSSES) <= {path.stem for path in RECIPES}
    assert len(RECIPES) > 5


def test_every_config_is_tested():
    known = {DEMO, FILES, CRITIC, CONFIGS / "base.yaml", *RECIPES, *MODELS, *CLUSTERS}
    assert set(CONFIGS.rglob("*.y*ml")) == known


@pytest.mark.parametrize("path", [DEMO, FILES, CRITIC], ids=lambda path: path.stem)
def test_every_config_of_a_run_loads(path):
    assert load_config(path).run.steps > 0


# ---- wrong keys and types

WRONG = [
    ("loss.nmae=x", "command line: loss.nmae: unknown key; did you mean 'loss.name'?"),
    ("optimiser.lr=1", "command line: optimiser: unknown key; did you mean 'optimizer'?"),
    ("lr=1", "command line: lr: unknown key; did you mean 'optimizer.lr'?"),
    ("loss.lr=1", "command line: loss.lr: unknown key; did you mean 'optimizer.lr'?"),
    ("qqq=1", "command line: qqq: unknown key; the sections: run, model, parallel, rollouts,"),
    ("run.qqq=1", "command line: run.qqq: unknown key; the keys of run: dir, seed, steps, log_"),
    ("run.steps=abc", "command line: run.steps: expected int, got 'abc' (str)."),
    ("run.steps=8.5", "command line: run.steps: expected int, got 8.5 (float)."),
    ("run.steps=true", "command line: run.steps: expected int, got True (bool)."),
    ("run.steps=", "command line: run.steps: expected int, got "),
    ("run.steps=[1]", "command line: run.steps: expected int, got [1] (list)."),
    ("optimizer.lr=null", "command line: optimizer.lr: expected float, got None (NoneType)."),
    ("optimizer.lr=true", "command line: optimizer.lr: expected float, got True (bool)."),
    ("optimizer.lr=x", "command line: optimizer.lr: expected float, got 'x' (str)."),
    ("optimizer.lr.x=1", "command line: optimizer.lr: expected float, got {'x': 1} (dict)."),
    ("logging.wandb=maybe", "command line: logging.wandb: expected bool, got 'maybe' (str)."),
    (
        "rollouts.per_step=x",
        "command line: rollouts.per_step: expected int or null, got 'x' (str).",
    ),
    (
        "optimizer.betas=0.9",
        "command line: optimizer.betas: expected list[float], got 0.9 (float).",
    ),
    (
        "optimizer.betas=[a,b]",
        "command line: optimizer.betas: expected list[float], got ['a', 'b']",
    ),
    ("optimizer.betas.0=1", "command line: optimizer.betas: expected list[float], got {'0': 1}"),
    (
        "optimizer.betas[0]=1",
        "optimizer.betas[0]=1: entries of a list cannot be set alone; give al",
    ),
    ("loss.settings=3", "command line: loss.settings: expected key: value pairs, got 3 (int)."),
    ("loss=3", "command line: loss: is a section with keys of its own, got 3."),
    ("run.steps", "run.steps: expected section.key=value."),
    ("--run.steps=3", "--run.steps=3: write it without '--'"),
    ("=3", "=3: the key is missing."),
    ("run.dir={a", "run.dir={a: the value is not valid YAML"),
    ("run.dir=${", "run.dir=${: the value is not valid YAML"),
    ("run.dir=${oc.env:NO_SUCH_VARIABLE_X}", "run.dir: "),
    ("run.dir=${run.nothing}", "run.dir: "),
    ("run.steps=${run.dir}", "run.steps: "),
    ("loss.settings.clip_ratio_low=???", "loss.settings: Missing mandatory value: "),
    ("run.dir=???", "run.dir: is missing ('???'); give it a value."),
]


@pytest.mark.parametrize("override, message", WRONG, ids=[o for o, _ in WRONG])
def test_a_wrong_override_is_one_clear_line(override, message):
    assert problem_of(override).startswith(message)


def test_all_wrong_keys_and_types_come_at_once(tmp_path):
    path = yaml_file(tmp_path, f"base: {DEMO}\nloss: {{nmae: x}}\nrun: {{steps: abc}}\n")
    problems = problems_of("optimiser.lr=3", "run.seed=x", "nonsense", path=path)
    assert len(problems) == 5
    assert [p for p in problems if p.startswith(f"{path}: ")] == [
        f"{path}: loss.nmae: unknown key; did you mean 'loss.name'?",
        f"{path}: run.steps: expected int, got 'abc' (str).",
    ]


def test_all_missing_values_come_at_once():
    problems = problems_of("run.dir=???", "task.suffix=???", "optimizer.lr=???")
    assert [p.partition(":")[0] for p in problems] == ["run.dir", "task.suffix", "optimizer.lr"]


BAD_FILES = [
    ("run:\n  seed: 1\n  seed: 2\n", r"line 3: found duplicate key"),
    ("run: {seed: 1\n", r"line 2: .*expected"),
    ("- a\n- b\n", "expected sections with keys, got a list"),
    ("run:\n\tseed: 1\n", "line 2: found character"),
    ("base: 3\n", "'base' is a YAML file or a list of them, got 3"),
    ("base: [nothing.yaml]\n", r"nothing\.yaml: no such config file"),
    ("base: x.yaml\n", r"leads back to the file itself: x\.yaml -> x\.yaml"),
    ("run: {dir: '${'}\n", "run.dir: cannot be read as an interpolation|cannot be read"),
    ("just text\n", "just text: unknown key; the sections: run"),
    ("1: 2\n", "1: unknown key"),
]


@pytest.mark.parametrize("text, message", BAD_FILES, ids=[m for _, m in BAD_FILES])
def test_a_broken_file_is_named_with_the_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(yaml_file(tmp_path, text))
    assert str(caught.value).startswith(str(tmp_path))


def test_files_that_are_not_there_or_no_text_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such config file"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"run:\n  dir: \xff\n")
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load_config(tmp_path / "x.yaml")


# ---- values that do not fit

UNFIT = [
    (
        "loss.reduction=token_men",
        "loss.reduction: unknown 'token_men'; did you mean 'token_mean'? O",
    ),
    ("loss.kl_estimator=k9", "loss.kl_estimator: unknown 'k9'; "),
    (
        "advantage.estimator=gpro",
        "advantage.estimator: unknown 'gpro'; did you mean 'grpo'? One of",
    ),
    ("model.dtype=fp16", "model.dtype: unknown 'fp16'; did you mean 'bf16'? One of: fp32, bf16."),
    ("rollouts.source=file", "rollouts.source: unknown 'file'; did you mean 'files'?"),
    ("logging.wandb_mode=on", "logging.wandb_mode: "),
    ("loss.name=ppo_clp", "loss.name: did you mean 'ppo_clip'? unknown loss 'ppo_clp'"),
    ("loss.name=no_such_pkg:fn", "loss.name: cannot import the loss 'no_such_pkg:fn'"),
    (
        "loss.settings.clip_ratio_lo=0.1",
        "loss.settings.clip_ratio_lo: unknown; did you mean 'clip_ratio_low'?",
    ),
    ("loss.settings.clip_ratio_low=1.5", "loss: clip_ratio_low must be in [0, 0.5], got 1.5"),
    ("loss.settings.clip_ratio_low=abc", "loss.settings.clip_ratio_low: expected a number, got 'a"),
    ("loss.off_policy.is_levl=token", "loss.off_policy.is_levl: unknown; did you mean 'is_level'?"),
    ("loss.off_policy.is_level=tokens", "loss: "),
    ("loss.kl_coef=-1", "loss: kl_coef must be finite and >= 0, got -1.0."),
    ("loss.reduction=seq_mean_token_sum_norm", "loss.max_seq_len: is needed with loss.reduction="),
    ("optimizer.lr=-1", "optimizer.lr: must be at least 0, got -1.0."),
    ("optimizer.lr=.inf", "optimizer.lr: must be at least 0, got inf."),
    ("optimizer.lr=.nan", "optimizer.lr: must be at least 0, got nan."),
    ("optimizer.betas=[0.9]", "optimizer.betas: must be two numbers in [0, 1), got [0.9]."),
    (
        "optimizer.betas=[0.9,1.0]",
        "optimizer.betas: must be two numbers in [0, 1), got [0.9, 1.0].",
    ),
    ("run.steps=0", "run.steps: must be at least 1, got 0."),
    ("sampler.temperature=0", "sampler.temperature: must be greater than 0, got 0.0."),
    ("rollouts.source=files", "rollouts.path: is needed with rollouts.source=files."),
    ("rollouts.path=x.jsonl", "rollouts.path: is only read with rollouts.source=files"),
    ("task.name=null", "task.name, task.path: the sampler needs exactly one of them; neither"),
    ("task.path=x.jsonl", "task.name, task.path: the sampler needs exactly one of them; both"),
    ("reward.fn=my_reward", "reward.fn: expected 'my_pkg.my_mod:reward_fn', got 'my_reward'."),
    ("advantage.estimator=none", "advantage.estimator: 'none' takes advantages from rollout files"),
    ("advantage.estimator=pass_at_k", "advantage.k: is needed with advantage.estimator=pass_at_k."),
    ("advantage.k=2", "advantage.k: is not read by advantage.estimator=grpo."),
    (
        "loss.name=cross_entropy",
        "advantage.estimator: the loss 'cross_entropy' reads no advantages",
    ),
    (
        "sampler.samples_per_prompt=1",
        "sampler.samples_per_prompt: advantage.estimator=grpo compares",
    ),
    (
        "batch.micro_batch_size=null",
        "batch.micro_batch_size, batch.max_tokens_per_microbatch: exac",
    ),
    (
        "batch.max_tokens_per_microbatch=9",
        "batch.micro_batch_size, batch.max_tokens_per_microbatch",
    ),
    (
        "batch.mini_batches_per_step=3",
        "batch.mini_batches_per_step: 32 rollouts of a step do not s",
    ),
    ("parallel.sequence_parallel=true", "parallel.sequence_parallel: needs parallel.tensor_model_"),
    (
        "parallel.virtual_pipeline_model_parallel_size=2",
        "parallel.virtual_pipeline_model_parallel_",
    ),
]


@pytest.mark.parametrize("override, message", UNFIT, ids=[o for o, _ in UNFIT])
def test_a_value_that_does_not_fit_is_named_with_its_full_path(override, message):
    assert problems_of(override)[0].startswith(message)


def test_all_values_that_do_not_fit_come_at_once():
    problems = problems_of(
        "run.steps=0", "loss.reduction=x", "optimizer.lr=-1", "batch.mini_batches_per_step=3"
    )
    assert len(problems) == 4


def test_a_prompt_file_needs_a_reward_function():
    problems = problems_of("task.name=null", "task.path=x.jsonl")
    assert problems == [
        "reward.fn: is needed with task.path; a prompt file has no rewards of its own."
    ]
    config = load_config(DEMO, ["task.name=null", "task.path=x.jsonl", "reward.fn=a.b:c"])
    assert config.task.params == {}


def test_a_loss_from_outside_is_checked_by_its_signature():
    name = f"loss.name={__name__}:outside_loss"
    assert load_config(DEMO, [name, "loss.settings.power=2"]).loss.settings == {"power": 2}
    assert "needs the setting 'power'" in problem_of(name)


def outside_loss(log_probs, advantages, *, power):
    return -log_probs * advantages**power


def test_check_config_takes_configs_made_in_code():
    config = Config()
    config.task.name = "chain_sum"
    check_config(config)
    with pytest.raises(ConfigError, match=r"run\.steps: must be at least 1, got -3"):
        check_config(dataclasses.replace(config, run=dataclasses.replace(config.run, steps=-3)))


# ---- layout


@pytest.mark.parametrize(
    "overrides, world_size, dp_size",
    [([], 1, 1), ([], 3, 3), (["parallel.tensor_model_parallel_size=2"], 8, 4),
     (["parallel.pipeline_model_parallel_size=2", "parallel.context_parallel_size=2"], 8, 2)],
)  # fmt: skip
def test_the_data_parallel_size_is_what_is_left(overrides, world_size, dp_size):
    assert check_layout(load_config(DEMO, overrides), world_size) == dp_size


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["parallel.tensor_model_parallel_size=2", "parallel.context_parallel_size=2"],
            "6 ranks are no multiple of tensor x pipeline x context parallel size = 2 x 1 x 2 = 4",
        ),
        (
            ["parallel.expert_model_parallel_size=4"],
            "6 ranks are no multiple of expert x expert-tensor x pipeline parallel size = 4 x 1 x",
        ),
    ],
)
def test_a_world_that_does_not_fit_names_both_numbers(overrides, message):
    with pytest.raises(LayoutError, match=message):
        check_layout(load_config(DEMO, overrides), 6)


def test_reading_a_config_imports_neither_megatron_nor_transformers():
    code = (
        "import sys; from megatron_rl_loss.config.load import load_config;"
        f"load_config({str(DEMO)!r});"
        "print([m for m in ('megatron', 'transformers', 'reasoning_gym') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.stdout.strip() == "[]"


def test_yaml_output_names_every_setting():
    text = to_yaml(load_config(DEMO))
    for path in leaf_paths():
        assert f"\n  {path.split('.')[1]}:" in text


def test_gradients_in_forward_need_a_token_level_loss():
    with pytest.raises(ConfigError, match="loss: lm_head='fused_forward' .* sums over whole seq"):
        load_config(DEMO, ["loss.lm_head=fused_forward", "loss.name=gspo"])
