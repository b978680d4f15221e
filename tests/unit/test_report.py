import json

import pytest

from megatron_rl_loss import ConfigError
from megatron_rl_loss.report import RunLog, plot_run, read_metrics, summary_table
from megatron_rl_loss.trainer import mean_metrics

STEPS = [{"reward": 0.1 * step, "loss": -0.5 * step, "num_tokens": 3.0} for step in (1, 2, 3)]


def run(folder, **places):
    with RunLog(folder, active=True, total_steps=3, **places) as log:
        for step, metrics in enumerate(STEPS, start=1):
            log.log(step, metrics)


def test_metrics_are_written_as_json_lines(tmp_path, capsys):
    run(tmp_path / "new" / "run")
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert "step 3/3  reward 0.3  loss -1.5" in capsys.readouterr().err


def test_a_repeated_step_counts_once(tmp_path):
    run(tmp_path, progress=False)
    run(tmp_path, progress=False)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0]["loss"] == -0.5


def test_other_ranks_write_nothing(tmp_path):
    with RunLog(tmp_path / "run", active=False, total_steps=1) as log:
        log.log(1, STEPS[0])
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_every_metric(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, tensorboard=True, progress=False)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == [-0.5, -1.0, -1.5]


def test_wandb_works_offline(tmp_path):
    pytest.importorskip("wandb")
    run(tmp_path, wandb=True, wandb_mode="offline", progress=False)
    assert list(tmp_path.glob("wandb/offline-run-*"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write to .*file/run.*run\.dir"):
        RunLog(tmp_path / "file" / "run", active=True, total_steps=1)
    with pytest.raises(ConfigError, match="metrics.jsonl is missing"):
        read_metrics(tmp_path)


def test_the_plot_and_the_table_show_reward_and_loss(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"step": i, **metrics} for i, metrics in enumerate(STEPS, start=1)]
    assert plot_run(tmp_path, rows).read_bytes().startswith(b"\x89PNG")
    header, *lines = summary_table(rows).splitlines()
    assert header.split() == ["step", "reward", "loss"] and lines[2].split() == ["3", "0.3", "-1.5"]


def test_a_long_table_shows_its_first_and_last_steps():
    rows = [{"step": i, "loss": 0.0} for i in range(1, 101)]
    steps = [line.split()[0] for line in summary_table(rows).splitlines()[1:]]
    assert steps == [*map(str, range(1, 9)), "...", *map(str, range(94, 101))]


def test_metrics_of_several_updates_are_averaged_but_for_extremes():
    merged = mean_metrics(
        [
            {"loss": 1.0, "ratio_max": 3.0, "learning_rate": 1e-5},
            {"loss": 2.0, "ratio_max": 1.0, "learning_rate": 2e-5},
        ]
    )
    assert merged == {"loss": 1.5, "ratio_max": 3.0, "learning_rate": 2e-5}


def test_a_resumed_run_drops_later_steps_and_what_an_earlier_life_still_writes(tmp_path):
    with RunLog(tmp_path, active=True, total_steps=4, progress=False) as earlier:
        for step in (1, 2, 3):
            earlier.log(step, {"loss": float(step)})
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"step": 4, "lo')  # killed while it wrote
        with RunLog(tmp_path, active=True, total_steps=4, progress=False) as log:
            assert [row["step"] for row in log.forget_after(2)] == [1, 2]
            log.log(3, {"loss": 30.0})
            earlier.log(4, {"loss": 4.0})
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 2.0},
        {"step": 3, "loss": 30.0},
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_ranks_that_log_nothing_have_nothing_to_forget(tmp_path):
    assert RunLog(tmp_path, active=False, total_steps=4).forget_after(2) == []
