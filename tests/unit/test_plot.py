import json
import math

import numpy as np
import pytest

from megatron_rl_loss import ConfigError
from megatron_rl_loss.cli import main
from megatron_rl_loss.plot import plot_runs, read_run


def write(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def rows(values, name="reward", first=1):
    return [{"step": first + i, name: value} for i, value in enumerate(values)]


def test_seeds_are_averaged_over_the_steps_that_all_have(tmp_path):
    write(tmp_path / "run" / "seed0", rows([0.0, 2.0, 4.0]))
    write(tmp_path / "run" / "seed1", rows([2.0, 2.0]))
    run = read_run(str(tmp_path / "run"))
    steps, mean, deviation = run.curve("reward")
    assert (run.label, steps.tolist(), mean.tolist()) == ("run", [1, 2], [1.0, 2.0])
    np.testing.assert_allclose(deviation, [math.sqrt(2.0), 0.0])


def test_steps_that_a_resumed_run_repeated_count_once_and_the_last_one_wins(tmp_path):
    folder = write(tmp_path / "run", rows([1.0, 2.0, 3.0]))
    write(folder, rows([20.0, 30.0, 40.0], first=2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # killed while writing
    steps, mean, deviation = read_run(str(folder)).curve("reward")
    assert (steps.tolist(), mean.tolist()) == ([1, 2, 3, 4], [1.0, 20.0, 30.0, 40.0])
    assert not deviation.any()


def test_a_label_may_name_seeds_in_different_folders(tmp_path):
    a, b = write(tmp_path / "a", rows([1.0])), write(tmp_path / "b", rows([3.0]))
    run = read_run(f"mine={a},{b}")
    assert (run.label, len(run.seeds), run.curve("reward")[1].tolist()) == ("mine", 2, [2.0])


def test_smoothing_takes_the_mean_up_to_each_step(tmp_path):
    run = read_run(str(write(tmp_path / "run", rows([0.0, 2.0, 4.0, 6.0]))))
    assert run.curve("reward", smooth=2)[1].tolist() == [0.0, 1.0, 3.0, 5.0]


def test_the_command_draws_every_run_and_metric(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    for seed in (0, 1):
        both = [{**row, "loss": 1.0} for row in rows([0.1, 0.2])]
        write(tmp_path / "grpo" / str(seed), both)
    write(tmp_path / "gspo", rows([0.3, 0.4, 0.5]))
    out = str(tmp_path / "new.png")
    names = [str(tmp_path / "grpo"), str(tmp_path / "gspo")]
    assert main(["plot", *names, "--out", out]) == 0
    assert capsys.readouterr().out.strip() == out
    panels = {axis.get_title(): axis for axis in drawn[0].axes if axis.get_visible()}
    assert set(panels) == {"reward", "loss"}
    assert [line.get_ydata().tolist() for line in panels["reward"].lines] == [
        [0.1, 0.2],
        [0.3, 0.4, 0.5],
    ]
    assert len(panels["reward"].collections) == 1  # the band of the run with seeds
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "grpo (mean ± s.d. of 2 seeds)",
        "gspo",
    ]


def test_a_png_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    run = read_run(str(write(tmp_path / "run", rows([0.1, float("nan"), 0.2]))))
    assert plot_runs([run], tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_folders_and_metrics_are_named(tmp_path, capsys):
    assert main(["plot", str(tmp_path)]) == 2
    assert "has no metrics.jsonl, nor has a folder in it" in capsys.readouterr().err
    run = read_run(str(write(tmp_path / "run", rows([0.1]))))
    with pytest.raises(ConfigError, match="no run has rewrad in all of its seeds; there are: rew"):
        plot_runs([run], tmp_path / "p.png", metrics=["rewrad"])
