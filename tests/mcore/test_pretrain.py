"""scripts/pretrain_rl.py with the real `megatron.training.pretrain` on CPU ranks.

Every case but the first loads the first one's checkpoint of iteration 2, so that all start from
the same weights, and trains iterations 3 and 4; or all start from one Hugging Face checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.reference import tiny_llama

ROOT = Path(__file__).parents[2]
VERSIONS = Path(os.environ.get("VERSIONS_DIR", Path(sys.prefix) / "megatron-versions"))
OVERLAY = VERSIONS / "0.19.2"  # its wheel carries megatron.training

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 "
    "--seq-length 24 --max-position-embeddings 24 --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --init-method-std 0.2 "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 61 "
    "--make-vocab-size-divisible-by 32 --micro-batch-size 2 --global-batch-size 8 "
    "--lr 1e-3 --lr-decay-style constant --log-interval 1 --train-iters 4"
).split()
LOSS = (
    "loss.reduction=sequence_mean loss.kl_coef=0.1 loss.entropy_coef=0.01 rollouts.shuffle=true"
).split()
MOE = "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none".split()
LLAMA = (
    "--group-query-attention --num-query-groups 2 --kv-channels 8 --swiglu --normalization RMSNorm "
    "--norm-epsilon 1e-5 --rotary-base 10000 --mrl-hf-weights FOLDER/llama"
).split()
LORA = ["lora.rank=4", "lora.alpha=8"]

pytestmark = [
    pytest.mark.skipif(
        not (OVERLAY / "megatron" / "training").is_dir(),
        reason=f"megatron.training of megatron-core 0.19.2 is not in {OVERLAY}; "
        "scripts/setup_venv.sh test puts it there",
    ),
    pytest.mark.timeout(400),
]


class Case:
    """One run of the script."""

    def __init__(self, name: str, ranks: int, *arguments: str, start: str = "first") -> None:
        self.name, self.ranks, self.start = name, ranks, start
        self.settings = [a for a in arguments if "=" in a]
        self.arguments = [a for a in arguments if "=" not in a]

    def as_dict(self, folder: Path) -> dict:
        load = ["--load", str(folder / self.start), "--ckpt-step", "2"] if self.start else []
        return {
            "name": self.name,
            "ranks": self.ranks,
            "log": str(folder / f"{self.name}.log"),
            "port": _free_port(),
            "arguments": [
                *MODEL,
                *("--mrl-rollouts", str(folder / "rollouts.jsonl")),
                *("--mrl-run-dir", str(folder / "runs" / self.name)),
                *("--mrl-old-log-probs", "rollout"),
                *("--mrl-config", *LOSS, *self.settings),
                *load,
                *(a.replace("FOLDER", str(folder)) for a in self.arguments),
            ],
        }


def _saving(name: str) -> list[str]:
    return ["--save", f"FOLDER/{name}", "--save-interval", "2"]


# Where Megatron cannot load the optimizer's state: the loss and gradient of iteration 3 only.
WEIGHTS_ONLY = ("--no-load-optim", "--train-iters", "3")

CASES = [
    Case("first", 1, *_saving("first"), start=""),
    Case("resumed", 1),
    Case("dp2", 2, "--micro-batch-size", "1"),
    Case("dp2_distributed_optimizer", 2, "--use-distributed-optimizer", *WEIGHTS_ONLY),
    Case("tp2", 2, "--tensor-model-parallel-size", "2"),
    Case("pp2", 2, "--pipeline-model-parallel-size", "2"),
    Case("per_token", 1, "--calculate-per-token-loss"),
    Case("per_token_dp2", 2, "--calculate-per-token-loss"),
    Case("moe", 1, *MOE, *_saving("moe"), start=""),
    Case("moe_ep2", 2, *MOE, "--expert-model-parallel-size", "2", *WEIGHTS_ONLY, start="moe"),
    Case("moe_per_token", 1, *MOE, "--calculate-per-token-loss", start=""),
    Case("lora", 1, *LLAMA, *LORA, start=""),
    Case("lora_tp2", 2, *LLAMA, *LORA, "--tensor-model-parallel-size", "2", start=""),
    Case("hf_pp2", 2, *LLAMA, "--pipeline-model-parallel-size", "2", start=""),
    Case("hf_other", 1, *LLAMA, "--rotary-base", "50000", start=""),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs all cases; metrics are in runs/NAME, outputs in NAME.log, statuses in statuses.json."""
    folder = tmp_path_factory.mktemp("pretrain")
    _write_rollouts(folder / "rollouts.jsonl")
    _write_llama(folder / "llama")
    (folder / "cases.json").write_text(json.dumps([case.as_dict(folder) for case in CASES]))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/mcore/pretrain_cases.py", folder / "cases.json"],
        capture_output=True,
        text=True,
        timeout=380,
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": f"{OVERLAY}{os.pathsep}{ROOT}", "TORCHDYNAMO_DISABLE": "1"}
        | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    statuses = dict(json.loads(line) for line in result.stdout.splitlines() if line[:1] == "[")
    (folder / "statuses.json").write_text(json.dumps(statuses))
    return folder


def _write_rollouts(path: Path) -> None:
    rng = random.Random(0)
    with path.open("w") as file:
        for group in range(8):
            prompt = [rng.randrange(61) for _ in range(rng.randint(3, 8))]
            for _ in range(4):
                length = rng.randint(2, 14)
                record = {
                    "prompt_ids": prompt,
                    "response_ids": [rng.randrange(61) for _ in range(length)],
                    "reward": rng.random(),
                    "group_id": group,
                    "rollout_log_probs": [-5 + rng.random() for _ in range(length)],
                    "ref_log_probs": [-5 + rng.random() for _ in range(length)],
                }
                file.write(json.dumps(record) + "\n")


def _write_llama(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_llama.hf_config()))
    save_file(tiny_llama.random_weights(), folder / "model.safetensors")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _metrics(folder: Path, name: str) -> dict[int, dict[str, float]]:
    statuses = json.loads((folder / "statuses.json").read_text())
    if any(statuses[name]):
        text = (folder / f"{name}.log").read_text()
        pytest.fail(f"{name}: exit {statuses[name]}\n{text[-3000:]}")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {row.pop("step"): row for row in map(json.loads, lines)}


def test_every_iteration_is_trained_on_other_rollouts_and_moves_the_weights(folder):
    rows = _metrics(folder, "first")
    assert sorted(rows) == [1, 2, 3, 4]
    assert len({row["loss"] for row in rows.values()}) == 4
    assert all(row["grad_norm"] > 1e-3 and row["kl"] > 0 for row in rows.values())
    assert all(row["ratio_mean"] != 1 for row in rows.values())


def test_a_resumed_run_equals_the_uninterrupted_one(folder):
    first, resumed = _metrics(folder, "first"), _metrics(folder, "resumed")
    assert resumed == {step: first[step] for step in (3, 4)}


@pytest.mark.parametrize(
    "name", ["dp2", "dp2_distributed_optimizer", "tp2", "pp2", "per_token", "per_token_dp2"]
)
def test_loss_metrics_and_gradient_norm_are_the_same_in_any_layout(folder, name):
    _assert_same(_metrics(folder, name), _metrics(folder, "first"))


def test_mixture_of_experts_is_the_same_with_expert_parallelism(folder):
    _assert_same(_metrics(folder, "moe_ep2"), _metrics(folder, "moe"))


def test_lora_on_a_hugging_face_base_is_the_same_in_any_layout(folder):
    lora, hf = _metrics(folder, "lora"), _metrics(folder, "hf_pp2")
    _assert_same(_metrics(folder, "lora_tp2"), lora)
    # a fresh adapter changes nothing but what is trained
    assert lora[1]["loss"] == pytest.approx(hf[1]["loss"], rel=1e-4)
    assert lora[1]["grad_norm"] < 0.9 * hf[1]["grad_norm"]


def test_a_hugging_face_base_of_another_model_is_refused(folder):
    assert json.loads((folder / "statuses.json").read_text())["hf_other"] == [1]
    log = (folder / "hf_other.log").read_text()
    assert "--rotary-base is 50000, the checkpoint has 10000.0" in log


def test_per_token_loss_with_experts_is_refused(folder):
    assert json.loads((folder / "statuses.json").read_text())["moe_per_token"] == [1]
    log = (folder / "moe_per_token.log").read_text()
    assert "Set calculate_per_token_loss=False" in log


def _assert_same(got: dict, expected: dict) -> None:
    assert set(got) <= set(expected) and 3 in got
    for step, row in got.items():
        assert row.keys() == expected[step].keys()
        assert row == pytest.approx(expected[step], rel=2e-4, abs=2e-6), step
