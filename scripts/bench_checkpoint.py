"""Measures what checkpoints cost in the demo, and the start-up of the main job.

    python scripts/bench_checkpoint.py [--steps 4] [key=value ...]

Prints (1) the seconds until the first step begins, against the same without the main job: importing
torch and Megatron and building the model; (2) the seconds that a checkpoint holds up training, and
the length of a step with and without checkpoints. The best of three starts; run it on an idle
machine.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMO = "configs/demo.yaml"
BARE = """
import warnings; warnings.simplefilter("ignore")
from megatron_rl_loss.mcore.model import build_gpt_model, padded_vocab_size, transformer_config
from megatron_rl_loss.mcore.model_spec import model_spec_from_hf
from megatron_rl_loss.mcore.optimizer import build_optimizer, wrap_with_ddp
from megatron_rl_loss.mcore.ranks import start_ranks
from megatron_rl_loss.mcore.weights import load_hf_weights
from megatron_rl_loss.rollouts.hf_model import load_hf_model
start_ranks()
hf_model, _ = load_hf_model("smollm2-demo")
spec = model_spec_from_hf(hf_model.config)
keep = dict(init_method=lambda w: w, output_layer_init_method=lambda w: w)
rows = padded_vocab_size(spec.vocab_size, 1)
chunks = build_gpt_model(spec, transformer_config(spec, **keep), padded_vocab_size=rows)
load_hf_weights(chunks, hf_model.state_dict(), spec)
build_optimizer(wrap_with_ddp(chunks), lr=1e-6)
"""
JOB = """
import sys
from megatron_rl_loss import train
train.run_steps = lambda *args, **kwargs: []
sys.exit(train.main(sys.argv[1:]))
"""


def seconds(code: str, *arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, check=True, capture_output=True
    )
    return time.perf_counter() - start


def run_demo(folder: Path, settings: list[str]) -> tuple[list[float], list[float]]:
    """Returns the seconds of each step, and those that each checkpoint held it up."""
    command = [sys.executable, "-m", "megatron_rl_loss.train", DEMO, f"run.dir={folder}", *settings]
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    held_up = re.findall(r"held up training for ([\d.]+) s", result.stderr)
    return [json.loads(line)["seconds"] for line in lines], [float(s) for s in held_up]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [f"run.steps={options.steps}", "logging.plot=false", *options.settings]
        for code in (BARE, JOB):  # warms the disk's cache
            seconds(code, *([DEMO, f"run.dir={folder}/warm", *settings] if code == JOB else []))
        pairs = [
            (seconds(BARE), seconds(JOB, DEMO, f"run.dir={folder}/start", *settings))
            for _ in range(3)
        ]
        bare, job = (min(times) for times in zip(*pairs))
        print(f"start-up  {job:.1f} s, of which imports and model {bare:.1f} s: {job / bare:.2f} x")
        plain, _ = run_demo(folder / "plain", settings)
        saved, held_up = run_demo(folder / "saved", [*settings, "checkpoint.interval=1"])
    step = sum(plain[1:]) / len(plain[1:])
    with_saves = sum(saved[1:]) / len(saved[1:])
    worst = max(held_up)
    print(f"step      {step:.1f} s; {with_saves:.1f} s while a checkpoint is written every step")
    print(f"held up   {worst:.2f} s at most per checkpoint: {100 * worst / step:.1f} % of a step")


if __name__ == "__main__":
    main()
