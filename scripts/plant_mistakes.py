"""Plants known mistakes in a copy of the package and checks that a test fails for each.

    python scripts/plant_mistakes.py              # all of them, about 10 minutes on 2 cores
    python scripts/plant_mistakes.py factor mask  # those whose name contains a word

The tests are run on the copy; this checkout is not touched. Exit status 1 if a mistake survives.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mistake(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    tests: str


SAME = "tests/mcore/test_same_gradient.py"
CUT = SAME + "::test_gradient_and_metrics_equal_the_reference_for_any_cut"
WEIGHTS = "tests/unit/test_token_weights.py"

MISTAKES = [
    Mistake("factor without M", "mcore/scaling.py", "return num_microbatches * dp_size", "return dp_size", CUT),
    Mistake("factor without D", "mcore/scaling.py", "return num_microbatches * dp_size", "return num_microbatches", CUT),
    Mistake("factor twice", "mcore/forward_step.py", "return loss_sum * factor, metrics", "return loss_sum * factor * factor, metrics", CUT),
    Mistake("M frozen", "mcore/micro_batches.py", "return int(given() if callable(given) else given)", "return 3", "tests/unit/test_scaling_and_guard.py"),
    Mistake("local token count", "parallel/counts.py", "        dist.all_reduce(sums, group=dp_group)", "        pass", "tests/dist/test_counts.py"),
    Mistake("local groups", "parallel/counts.py", "everywhere = gather_rows(rows, dp_group)", "everywhere = gather_rows(rows, None)", "tests/dist/test_counts.py"),
    Mistake("local micro-batch mean", "ops/reduction.py", "return ones / max(1, counts.num_tokens)", "return ones / max(1, int(loss_mask.sum()) // 2)", WEIGHTS),
    Mistake("sequence mean over tokens", "ops/reduction.py", "return ones / (num_sequences * _column(loss_mask.sum(dim=1)))", "return ones / max(1, counts.num_tokens)", WEIGHTS),
    Mistake("padding counted", "ops/reduction.py", "torch.where(loss_mask, scale, 0.0)", "scale.expand_as(loss_mask)", WEIGHTS),
    Mistake("mask after the loss", "ops/reduction.py", "(torch.where(weights != 0, token_loss.float(), 0.0) * weights)", "(token_loss.float() * weights)", WEIGHTS),
    Mistake("inputs not cleaned", "losses/objective.py", "torch.where(loss_mask, ", "torch.where(torch.ones_like(loss_mask), ", "tests/unit/test_objective.py"),
    Mistake("labels not shifted", "mcore/batch.py", "torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)", "tokens", "tests/unit/test_batch.py"),
    Mistake("flag let through", "mcore/guard.py", "    if config.calculate_per_token_loss:", "    if False:", "tests/unit/test_scaling_and_guard.py"),
    Mistake("flag without 1/C", "mcore/scaling.py", "return num_microbatches / cp_size", "return float(num_microbatches)", "tests/mcore/test_return_styles.py::test_per_token_flag_gives_the_reference_gradient_and_metrics"),
    Mistake("flag ignored", "mcore/forward_step.py", "calculate_per_token_loss=flag)", "calculate_per_token_loss=False)", "tests/mcore/test_return_styles.py::test_per_token_flag_gives_the_reference_gradient_and_metrics"),
    Mistake("DDP's flag not checked", "mcore/guard.py", "if factors and sums != bool(config.calculate_per_token_loss):", "if False:", "tests/mcore/test_return_styles.py::test_a_flag_changed_after_ddp_was_built_is_refused"),
    Mistake("interleaved count not checked", "mcore/train_step.py", "if num_microbatches < group or 0 < rest < stages:", "if False:", "tests/mcore/test_layouts.py::test_micro_batch_count_that_the_interleaved_schedule_cannot_run_is_refused"),
    Mistake("hook not checked", "mcore/guard.py", "if ranks > 1 and config.finalize_model_grads_func is None:", "if False:", "tests/unit/test_scaling_and_guard.py"),
    Mistake("temperature twice", "mcore/forward_step.py", "temperature=self.temperature,\n            with_entropy", "temperature=self.temperature**2,\n            with_entropy", CUT),
    Mistake("padded vocabulary", "mcore/forward_step.py", "            vocab_size=self.vocab_size,\n            loss_mask", "            loss_mask", CUT),
    Mistake("KL without weights", "losses/objective.py", "self.kl_coef * masked_sum(kl, weights)", "self.kl_coef * masked_sum(kl, (weights != 0).float() / 100)", CUT),
    Mistake("entropy sign", "losses/objective.py", "-self.entropy_coef * masked_sum", "self.entropy_coef * masked_sum", CUT),
    Mistake("sequence parallel tag", "mcore/layer_spec.py", "self.weight.sequence_parallel = config.sequence_parallel", "self.weight.sequence_parallel = False", CUT),
    Mistake("shares not checked", "metrics.py", "if abs(shares - num_calls) > 1e-3 * num_calls:", "if False:", "tests/unit/test_metrics.py"),
]  # fmt: skip


def survives(mistake: Mistake) -> bool:
    """Returns True if the tests pass in spite of the mistake."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("megatron_rl_loss", "tests", "configs", "scripts", "docs"):
            if (ROOT / name).exists():
                shutil.copytree(
                    ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__")
                )
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "megatron_rl_loss" / mistake.file
        text = path.read_text()
        if mistake.right not in text:
            raise SystemExit(
                f"{mistake.name}: {mistake.file} has no {mistake.right!r}; update this script"
            )
        path.write_text(text.replace(mistake.right, mistake.wrong))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            mistake.tests,
        ]
        result = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        return result.returncode == 0


def main(words: list[str]) -> int:
    chosen = [m for m in MISTAKES if not words or any(word in m.name for word in words)]
    alive = []
    for mistake in chosen:
        lived = survives(mistake)
        print(f"{'SURVIVED' if lived else 'caught'}  {mistake.name}", flush=True)
        if lived:
            alive.append(mistake.name)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mistakes caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
