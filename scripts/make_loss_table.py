"""Writes docs/losses.md and configs/loss/*.yaml from the losses themselves.

python scripts/make_loss_table.py            writes the files
python scripts/make_loss_table.py --check    fails if a file is out of date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_rl_loss.losses.off_policy import OffPolicy  # noqa: E402
from megatron_rl_loss.losses.presets import PRESETS  # noqa: E402
from megatron_rl_loss.losses.registry import LOSSES, LossSpec  # noqa: E402
from megatron_rl_loss.ops.advantages import ADVANTAGE_ESTIMATORS  # noqa: E402
from megatron_rl_loss.ops.kl import KL_ESTIMATORS  # noqa: E402

INTRO = """# Losses

<!-- Made by scripts/make_loss_table.py from the code; change the code, not this file. -->

Every loss is a pure function that returns one un-reduced value per token. The loss of a
mini-batch is sum_t w_t * l_t with token weights w (the reduction) made from global counts, so all
losses share the same six reductions, and the gradient does not depend on how the mini-batch is cut.

r = exp(log_probs - old_log_probs), log clamped to +-20; A the advantage; sg(x) is x as a
constant; clip(x, a, b) bounds x. Advantages are raw: where the column "A carries w" says yes,
pre-normalised advantages (w * A) with reduction `sum` give the same gradient; where it says no,
`loss_weights` must be in the micro-batch (an error says so).
"""

MICRO_BATCH_NOTE = """
Losses marked (*) rank or average over this rank's micro-batch, so their gradient changes with the
cut by definition. All others give the same gradient for any cut.
"""

CRITIC = """
## PPO with a critic

    V: value head on the layers of a model of its own, [1, H] in fp32, starts at 0
    A_t, R_t: GAE over the trained tokens of each sequence (`ops.gae`), R_t = A_t + V_t
    l_t = 1/2 max((V_t - R_t)^2, (clip(V_t, V_old - c, V_old + c) - R_t)^2)

The critic's loss is the same weighted sum: `make_value_step(value_clip=...)` takes micro-batches
with `old_values`, `returns` and `loss_weights` (no advantage could carry them), and its gradient
does not depend on the cut either: tested for M = 1, 2, 4, DP, TP with and without sequence
parallelism, PP, VPP, CP and packed rows.

| you want | call |
|---|---|
| a critic | `build_gpt_model(value_spec(spec), config)` |
| a policy's weights in it | `load_hf_weights(chunks, value_weights(weights, spec), critic_spec)` |
| a head on your own Megatron model | `put_value_head(chunks)` on every rank, before DDP |
| values without gradient, [rows, S] | `token_values(chunks, micro_batches)` |
| a step | `train_step(make_value_step(), chunks, optimizer, micro_batches)` |

Metrics: `loss`, `value_mean`, `return_mean`, `value_clip_fraction`, `explained_variance` (1 -
var(R - V) / var(R)).

In the main job: `advantage.estimator=gae` and the section `critic:`
([`configs/ppo_critic_example.yaml`](../configs/ppo_critic_example.yaml)). The response's reward
comes at its last trained token; `reward.kl_coef` takes the KL to the reference from each token's
reward (fixed, or following `reward.kl_target`); `critic.bootstrap` lets the last value follow a
response that was cut short; advantages are whitened over all tokens of the step unless
`critic.whiten_advantages=false`. `export_hf_weights(critic_chunks, value_spec(spec))` gives a
critic's tensors, the head named `score.weight` as in Hugging Face's sequence classification
models.
"""

CHOICES = """
## Where public code disagrees, and what is chosen here

* **Dual clip** is its own loss; verl's default ("vanilla") always has it with c = 3.
* **GSPO's clip** has the paper's 3e-4 / 4e-4; several trainers default to PPO's 0.2, which for a
  length-normalised ratio clips next to nothing.
* **CISPO's bounds** are 0 and 5 (offsets 1 and 4); Tinker has 0 and 4, verl 0.8 and 1.2.
* **GMPO's clip** is the paper's exp(+-0.4); verl uses 0.2.
* **DPPO** keeps r (clamped at exp(20)); verl truncates it at 20.
* **Log-ratios** are clamped to +-20 at every level; slime, Megatron-LM and NeMo-RL do not clamp.
* **k3** goes on as its tangent beyond 20 nats, so a policy far from the reference is still pulled
  back; clamping the value (SkyRL, verl: 10) sets the gradient to 0 there.
* **Standard deviations** have n - 1 (as torch.std); eps is 1e-6 as in verl, 1e-4 in TRL. A group of
  one has advantage 0; verl keeps its raw reward.
* **clip_cov** takes every k-th candidate; published code draws at random, which differs between
  tensor-parallel ranks unless their generators agree.
* **Rejected tokens** stay in the counts (their weight was fixed before the step); with
  `losses.off_policy.kept_tokens` as the loss mask they leave them.
* **Sequences without a trained token** count in sequence means (`count_empty_sequences: false`
  leaves them out, as verl does).
"""

OWN_LOSS = """
## A loss of your own

```python
from megatron_rl_loss.types import TokenLoss

def my_loss(log_probs, old_log_probs, advantages, *, strength=1.0):
    r = (log_probs - old_log_probs).exp()
    return TokenLoss(-strength * r * advantages, {"my_ratio": r.detach()})

my_loss.homogeneous = True  # w * l(A) == l(w * A); leave it out if unsure
my_loss.token_level = True  # a token's loss needs that token alone; for lm_head="fused_forward"
```

Positional parameters are tensors of the micro-batch by name, masked positions already 0;
`loss_mask` and `sequences` (sums over whole sequences, packed or split over ranks) may be asked
for too, and `token_log_probs` (see above); keyword-only parameters are settings. Pass the
function, or `"my_pkg.my_mod:my_loss"` from a config. `losses.contract_check.check_loss(my_loss)`
tells what is wrong with it, if anything.
"""

DISTILLATION = """
## Distillation from a teacher's top k

`top_k_distillation` reads two fields of k entries per label: `teacher_top_ids` [rows, S, k] int
and `teacher_top_log_probs` [rows, S, k] float, normalised over the whole vocabulary, which both
models share. k is the same in all micro-batches; where a position has fewer tokens, fill up with
any token and the log-prob -inf. The forward step takes the student's log-probs of these tokens in
the same pass as the labels', also over vocabulary shards and with the fused head, and cuts, packs
and slices the fields with the rows. Metric: `teacher_mass`, the mean probability that the teacher
gives the k tokens. `kl_coef` and `entropy_coef` work beside it.

`with_rest=true` adds all other tokens as one. Without it the loss is least where the student
gives the k tokens everything, p_k = q_k / Q, not at the teacher.

A loss of your own may ask for `token_log_probs` too, beside `log_probs` and
`teacher_top_log_probs`.
"""

NEIGHBOURS = """
## A neighbour that is no loss of the table

* **DPO**: -log sigmoid of a difference of two sequences is not a weighted sum of per-token
  losses, and a pair may be cut apart. Its gradient is one: `ops.preferences.dpo_advantages` makes
  advantages from the responses' log-prob sums (one more forward pass, `token_log_probs`), for
  `policy_gradient` with `seq_mean_token_sum_norm`, max_seq_len=1. Exact for one optimizer step
  per forward pass.
"""

LEFT_OUT = """
## Left out, and why

* **Mini-batch thresholds for clip_cov and kl_cov**: they work on the micro-batch, as published
  code does, and are marked.
* **Self-normalised importance weights**: make them over the mini-batch and pass them as
  `rollout_is_weights` with `off_policy={"is_level": "given"}`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    args = parser.parse_args()
    stale = [path for path, text in files().items() if not is_current(path, text)]
    stale += [path for path in strange_files() if path.exists()]
    if args.check and stale:
        sys.exit(f"out of date: {', '.join(str(p.relative_to(ROOT)) for p in stale)}")
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def files() -> dict[Path, str]:
    """Returns what each file must hold."""
    made = {ROOT / "docs" / "losses.md": document()}
    for name, preset in PRESETS.items():
        made[ROOT / "configs" / "loss" / f"{name}.yaml"] = yaml_text(name, preset)
    return made


def is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def strange_files() -> list[Path]:
    """Returns files under configs/loss that belong to no preset."""
    return [p for p in (ROOT / "configs" / "loss").glob("*.yaml") if p.stem not in PRESETS]


def document() -> str:
    parts = [INTRO, loss_table(), MICRO_BATCH_NOTE, "## Formulas and sources\n", formulas()]
    parts += [preset_section(), advantage_section(), kl_section(), correction_section()]
    parts += [CRITIC, DISTILLATION, NEIGHBOURS, CHOICES, OWN_LOSS, LEFT_OUT]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def loss_table() -> str:
    rows = [
        (
            f"`{name}`" + (" (*)" if spec.depends_on_micro_batch else ""),
            section(spec.fn, None).rstrip("."),
            "yes" if spec.homogeneous else "no",
            ", ".join(f"`{need}`" for need in spec.needs if need != "log_probs"),
            settings_text(spec),
            f"[{name}.yaml](../configs/loss/{name}.yaml)",
        )
        for name, spec in LOSSES.items()
    ]
    head = ("loss", "what it is", "A carries w", "reads, beside `log_probs`", "settings", "config")
    return table(head, rows)


def settings_text(spec: LossSpec) -> str:
    return ", ".join(
        f"`{name}`" if default is inspect.Parameter.empty else f"`{name}={default}`"
        for name, default in spec.settings.items()
    )


def formulas() -> str:
    lines = []
    for name, spec in LOSSES.items():
        source = section(spec.fn, "Source")
        lines.append(f"* **`{name}`** {section(spec.fn, 'Formula')}")
        lines[-1] += f" *{source}*" if source else ""
    return "\n".join(lines)


def preset_section() -> str:
    rows = [
        (
            f"[`{name}`](../configs/loss/{name}.yaml)",
            f"`{preset['loss']}`",
            words(preset["loss_settings"]),
            f"`{preset['reduction']}`",
            words(preset["advantages"] or {}),
            words(terms_of(preset)),
        )
        for name, preset in PRESETS.items()
    ]
    head = ("preset", "loss", "settings", "reduction", "advantages", "other terms")
    note = (
        "`seq_mean_token_sum_norm` needs `max_seq_len` from you. An `opo` estimator needs the "
        "sequences' `num_tokens`; `reinforce_plus_plus` ones are whitened over the mini-batch. "
        "DAPO's dynamic sampling is `ops.advantages.informative_groups`.\n"
    )
    return f"## Presets\n\n{note}\n{table(head, rows)}"


def advantage_section() -> str:
    rows = [
        (
            f"`{name}`",
            section(fn, None).removeprefix("Returns "),
            section(fn, "Formula"),
            section(fn, "Source"),
        )
        for name, fn in ADVANTAGE_ESTIMATORS.items()
    ]
    return "## Advantage estimators\n\n" + table(("name", "returns", "formula", "source"), rows)


def kl_section() -> str:
    names = ", ".join(f"`{name}`" for name in KL_ESTIMATORS)
    return (
        "## KL to the reference\n\n"
        f"`kl_estimator`: {names}. With d = log_probs - ref_log_probs: k1 = d, k2 = d^2 / 2, "
        "k3 = exp(-d) - 1 + d, abs = |d|; `k1+` and `k3+` have k2's gradient, which on-policy is "
        "that of KL(policy || reference); k3's own is that of the forward KL, and k1's is 0 on "
        "average. `kl_is_weighted` multiplies k1 or k3 by r with gradient, which is right "
        "off-policy. To fold the KL into rewards instead: `reward.kl_coef` of the main job with a "
        "critic, or `ops.kl.kl_shaped_rewards`. A coefficient that follows a target: "
        "`loss.kl_target`, `reward.kl_target` and, for the entropy bonus, `loss.entropy_target` "
        "of the main job, or `ops.coefficients`. They change after a step, from metrics that are "
        "the same on every rank, and are kept in checkpoints. `entropy_max` bounds the entropy "
        "that earns a bonus."
    )


def correction_section() -> str:
    paragraphs = (inspect.getdoc(OffPolicy) or "").split("\n\n")
    about = " ".join(" ".join(paragraphs[1:3]).split())
    rows = [(f"`{names}`", text) for names, text in attributes(OffPolicy)]
    return (
        "## Corrections for the rollout policy\n\n"
        "`off_policy` multiplies any policy loss by a constant per token, made from rho = "
        "exp(old_log_probs - rollout_log_probs): an importance weight (TIS, decoupled PPO), a band "
        f"(icepop) or a rejection. KL and entropy terms stay as they are. {about}\n\n"
        f"{table(('setting', 'meaning'), rows)}\n\n*{section(OffPolicy, 'Source')}*"
    )


def attributes(cls: type) -> list[tuple[str, str]]:
    """Returns (names, text) of each entry under "Attributes:" in the docstring."""
    block = (inspect.getdoc(cls) or "").split("Attributes:\n")[1].split("\n\n")[0]
    entries = re.split(r"\n(?=    \S)", block)
    return [tuple(" ".join(entry.split()).split(": ", 1)) for entry in entries]


def terms_of(preset: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v
        for k, v in preset.items()
        if k not in ("loss", "loss_settings", "reduction", "advantages")
    }


def words(settings: dict[str, Any]) -> str:
    flat = {}
    for name, value in settings.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return ", ".join(f"`{name}={value}`" for name, value in flat.items())


def section(fn: Any, title: str | None) -> str:
    """Returns a part of the docstring as one line: "Formula", "Source", or None: the first."""
    doc = inspect.getdoc(fn) or ""
    if title is None:
        found = doc.split("\n\n")[0]
    else:
        match = re.search(rf"^{title}: (.*?)(?:\n\n|\n[A-Z][A-Za-z, ]*:|\Z)", doc, re.S | re.M)
        found = match.group(1) if match else ""
    return " ".join(found.split())


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def yaml_text(name: str, preset: dict[str, Any]) -> str:
    spec = LOSSES[preset["loss"]]
    settings = {k: v for k, v in spec.settings.items() if v is not inspect.Parameter.empty}
    loss = {
        "name": preset["loss"],
        "settings": settings | preset["loss_settings"],
        "reduction": preset["reduction"],
        **terms_of(preset),
    }
    advantage = preset["advantages"] or {"estimator": "none"}
    lines = [f"# {section(spec.fn, None)} Formula and source: docs/losses.md."]
    lines += yaml_lines("loss", loss, "")
    lines += yaml_lines("advantage", advantage, "")
    return "\n".join(lines) + "\n"


def yaml_lines(key: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, dict) and value:
        inner = [line for k, v in value.items() for line in yaml_lines(k, v, indent + "  ")]
        return [f"{indent}{key}:", *inner]
    if isinstance(value, dict):
        return [f"{indent}{key}: {{}}"]
    text = {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
    return [f"{indent}{key}: {text}"]


if __name__ == "__main__":
    main()
