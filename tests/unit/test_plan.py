"""The memory plan: counts against Hugging Face's models and against numbers worked out by hand."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl_loss import plan
from megatron_rl_loss.cli import main
from megatron_rl_loss.config.load import load_config
from megatron_rl_loss.mcore.memory import (
    TARGET_SETS,
    Adapters,
    Layout,
    Training,
    count_parameters,
    memory,
)

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted((ROOT / "configs" / "model").glob("*.yaml"))
CLUSTERS = sorted((ROOT / "configs" / "cluster").glob("*.yaml"))
GPUS = {"1_h200": 1, "2_nodes": 16, "8_nodes": 64}
QWEN3_30B = ROOT / "configs" / "model" / "qwen3_30b_a3b"
MIXTURE = [
    ("attention", None, 20.4e6, 26.7e6),
    ("all-linear", None, 1279e6, 1688e6),
    ("all-linear", 4, None, 234e6),
]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "qwen3_1_7b"])
def test_the_models_have_as_many_parameters_as_hugging_faces(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = ROOT / "configs" / "model" / name
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    spec = plan.read_spec(folder)
    # 151936 rows need no padding on one rank
    assert count_parameters(spec, Layout(), None).base.total == model.num_parameters()


@pytest.mark.parametrize(("targets", "expert_rank", "fused", "split"), MIXTURE)
def test_adapters_of_qwen3_30b_a3b_have_the_known_number_of_parameters(
    targets, expert_rank, fused, split
):
    spec, adapters = plan.read_spec(QWEN3_30B), Adapters(32, targets, expert_rank)
    if fused:
        found = count_parameters(spec, Layout(), adapters).adapters.total
        assert found == pytest.approx(fused, rel=5e-3)
    file = count_parameters(spec, Layout(), adapters, split=True).adapters.total
    assert file == pytest.approx(split, rel=5e-3)


@pytest.mark.parametrize(
    ("tp", "ep", "pp", "base", "all_weights"),
    [
        (1, 8, 1, 10.3, 77),
        (2, 8, 1, 8.8, 72),
        (4, 8, 1, 8.0, 70),
        (1, 4, 2, 8.8, 72),
        (2, 4, 2, 8.0, 70),
    ],
)
def test_gigabytes_per_gpu_of_qwen3_30b_a3b_on_8_gpus(tp, ep, pp, base, all_weights):
    spec = plan.read_spec(QWEN3_30B)
    layout = Layout(8, tp, pp, 1, ep, 1, tp > 1)
    frozen = memory(spec, layout, Adapters(32), Training())
    assert frozen.weights / 1e9 == pytest.approx(base, abs=0.05)
    assert memory(spec, layout, None, Training()).states / 1e9 == pytest.approx(
        all_weights, abs=0.5
    )


def test_states_by_hand_for_a_bf16_model_on_one_rank():
    spec = plan.read_spec(ROOT / "configs" / "model" / "qwen3_1_7b")
    number = count_parameters(spec, Layout(), None).base.total
    found = memory(spec, Layout(), None, Training(reference=True, critic=True))
    assert (found.weights, found.gradients) == (2 * number, 4 * number)
    assert found.optimizer == 12 * number
    assert (found.reference, found.critic) == (2 * number, 18 * number)
    apart = memory(spec, Layout(4), None, Training())
    assert apart.optimizer == 3 * number and apart.weights == 2 * number


def test_the_sets_of_targets_are_those_of_lora():
    from megatron_rl_loss.lora import config

    assert TARGET_SETS == config.TARGET_SETS


def test_one_h200_holds_the_base_model_with_attention_adapters(capsys):
    files = ["configs/model/qwen3_30b_a3b_lora.yaml", "configs/cluster/1_h200.yaml"]
    assert main(["plan", *files, "--gpus", "1", "--gpu-gb", "141"]) == 0
    text = capsys.readouterr().out
    assert "  weights                     61.06" in text and " left" in text
    assert main(["plan", *files, "lora.rank=null", "--gpu-gb", "141"]) == 0
    assert " too much" in capsys.readouterr().out


def test_the_table_compares_layouts(capsys):
    arguments = ["configs/model/qwen3_30b_a3b_lora.yaml", "--gpus", "8", "--table"]
    assert main(["plan", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.lstrip().startswith("TP")]
    assert ["TP1", "EP8", "PP1", "10.3", "0.15", "2.98", "0.51", "77"] in rows
    assert len(rows) == 5


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_every_model_config_passes_the_plan_and_completes_a_run(model, capsys):
    assert main(["plan", str(model)]) == 0
    assert "total" in capsys.readouterr().out
    config = load_config(ROOT / "configs" / "base.yaml", [str(model), "task.name=chain_sum"])
    assert config.model.dtype == "bf16" and config.batch.micro_batch_size is None


@pytest.mark.parametrize("model", [m for m in MODELS if "30b" in m.stem], ids=lambda p: p.stem)
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda path: path.stem)
def test_every_cluster_config_passes_the_plan(model, cluster, capsys):
    gpus = GPUS[cluster.stem]
    room = 141 if gpus == 1 else 80
    arguments = [str(model), str(cluster), "--gpus", str(gpus), "--gpu-gb", str(room)]
    assert main(["plan", *arguments]) == 0
    assert " left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.path=nowhere"], "nowhere/config.json does not exist"),
        (["parallel.expert_model_parallel_size=3"], "3 does not divide 128 experts"),
        (["parallel.tensor_model_parallel_size=8"], "does not divide num_query_groups 4"),
        (["--gpus", "12"], "12 GPUs are no multiple"),
        (["--gpus", "0"], "--gpus must be above 0"),
        (["--tokens", "-5"], "--tokens must be above 0"),
        (["--gpu-gb", "nan"], "--gpu-gb must be above 0"),
        (["lora.targets=everything"], "lora.targets must be attention, all-linear"),
        (["lora.rnak=3"], "lora.rnak: unknown key"),
    ],
)
def test_a_layout_that_does_not_fit_is_one_clear_error(arguments, words, capsys):
    assert main(["plan", "configs/model/qwen3_30b_a3b_lora.yaml", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_plan_of_30b_needs_little_time_and_memory():
    code = (
        "import sys; from megatron_rl_loss.cli import main\n"
        "status = main(['plan', 'configs/model/qwen3_30b_a3b_lora.yaml', '--table'])\n"
        "assert not {'megatron', 'transformers', 'torch'} & set(sys.modules)\n"
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')))\n"
        "sys.exit(status)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    # the processor's time: the clock's depends on what else runs
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 2.0
    peak_kilobytes = int(result.stdout.split()[-2])
    assert peak_kilobytes < 500_000
