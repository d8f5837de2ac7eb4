"""metrics.jsonl and completions/: cut back to a step, whole lines only."""

import math
import re

import numpy as np
import pyarrow.parquet
import pytest
import runs

from qerl_jax.checkpoint.run_files import OWNED, PLOTS_DIR
from qerl_jax.checkpoint.safetensors import CheckpointError
from qerl_jax.reporting import metrics as sink
from qerl_jax.reporting.plots import _PLOTS, figures, write_plots


def test_cut_back(tmp_path):
    for step in (1, 2, 3):
        sink.MetricsFile(tmp_path).append(
            step, {"reward": step / 2, "kl": math.nan, "loss": -math.inf, "num_tokens": 10 * step}
        )
        sink.write_completions(tmp_path, step, {"completion": ["a", "b"]})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # a kill in the middle of a line
    (tmp_path / "completions" / "step_000002.tmp").write_text("")  # one in that of a file
    assert [row["step"] for row in sink.read_metrics(tmp_path)] == [1, 2, 3]
    assert sink.cut_back(tmp_path, 2) == 20
    assert sink.read_metrics(tmp_path)[-1] == {"step": 2, "reward": 1.0, "kl": None, "loss": None, "num_tokens": 20}
    assert sorted(p.name for p in (tmp_path / "completions").iterdir()) == [
        "step_000001.parquet",
        "step_000002.parquet",
    ]
    assert pyarrow.parquet.read_table(tmp_path / "completions" / "step_000001.parquet").to_pydict() == {
        "completion": ["a", "b"]
    }
    (tmp_path / "completions" / "step_notes.txt").write_text("a file of one's own stays")
    assert sink.cut_back(tmp_path, 0) == 0 and sink.read_metrics(tmp_path) == []


@pytest.mark.parametrize(
    "line",
    ['{"step": 2, "rew', "[1]", '{"step": "2", "num_tokens": 3}', '{"step": 2, "num_tokens": 3.5}', '{"step": 2}', ""],
)
def test_a_damaged_line_that_no_kill_explains_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "num_tokens": 5}}\n{line}\n{{"step": 3, "num_tokens": 9}}\n')
    with pytest.raises(CheckpointError, match=re.escape(f"{path}, line 2 is not a step's metrics")):
        sink.read_metrics(tmp_path)


def test_a_full_disk_names_the_file(tmp_path):
    """A limit on the size of files stands for the full disk; the lines that are there stay."""
    sink.MetricsFile(tmp_path).append(1, {"num_tokens": 5})
    with runs.full_disk(40):
        with pytest.raises(OSError, match=re.escape(f"{tmp_path / 'metrics.jsonl'} cannot be written: File too large")):
            sink.MetricsFile(tmp_path).append(2, {"num_tokens": 9})
        with pytest.raises(OSError, match=r"completions/step_000002\.parquet cannot be written"):
            sink.write_completions(tmp_path, 2, {"completion": ["a", "b"]})
    assert [row["step"] for row in sink.read_metrics(tmp_path)] == [1]
    assert sink.cut_back(tmp_path, 1) == 5 and not list((tmp_path / "completions").iterdir())


def test_plots_leave_out_what_was_not_recorded(tmp_path):
    rows = [{"step": s, "reward": s / 10, "reward_std": 0.1, "entropy": 1.0, "aqn/sigma": 0.0} for s in range(1, 30)]
    assert sorted(path.stem for path in write_plots(tmp_path, rows)) == ["entropy", "reward"]
    assert write_plots(tmp_path, []) == []
    assert {f"{name}.png" for name in _PLOTS} == set(OWNED[PLOTS_DIR])  # what --overwrite deletes


def test_a_value_of_one_step_is_seen_on_the_axis_of_all():
    [(name, figure)] = figures([{"step": 1}, {"step": 2, "entropy": 1.0}, {"step": 3}])
    [axes] = figure.axes
    assert name == "entropy"
    assert axes.get_xlim() == (0.5, 3.5) and [line.get_marker() for line in axes.get_lines()] == ["."] * 3


def test_every_line_of_a_plot_is_the_metric_of_its_name():
    """Of three steps, whose moving average is themselves."""
    from matplotlib.figure import Figure

    names = {
        "reward": {"all rewards": "reward"},
        "accuracy": {"share correct": "accuracy"},
        "entropy": {"trained policy": "entropy", "sampled policy, under noise": "sampling/entropy"},
        "length": {
            "longest": "completions/max_length",
            "shortest": "completions/min_length",
            "average": "completions/mean_length",
        },
        "mismatch": {
            "largest |Δ logprob|": "sampling/sampling_logp_difference/max",
            "mean |Δ logprob|": "sampling/sampling_logp_difference/mean",
            "KL(sampled ‖ trainer)": "sampling/kl",
        },
    }
    shown = ["reward_std", "aqn/sigma", *(metric for lines in names.values() for metric in lines.values())]
    rows = [{"step": step} | {name: 20.0 + 10 * i + step for i, name in enumerate(shown)} for step in (4, 5, 6)]
    for plot, (_, draw) in _PLOTS.items():
        figure = Figure()
        draw(axes := figure.add_subplot(), rows)
        lines = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
        assert {name: line.get_ydata().tolist() for name, line in lines.items()} == {
            name: [row[metric] for row in rows] for name, metric in names[plot].items()
        }
        assert all(line.get_xdata().tolist() == [4, 5, 6] for line in lines.values())
        assert axes.get_yscale() == ("log" if plot == "mismatch" else "linear")
        if plot == "entropy":
            [sigma] = figure.axes[1].get_lines()
            assert figure.axes[1].get_yscale() == "log"
            assert sigma.get_xdata().tolist() == [4, 5, 6]
            assert sigma.get_ydata().tolist() == [row["aqn/sigma"] for row in rows]
        if plot == "reward":  # 44 ± 24 to 46 ± 26
            [band] = axes.collections
            assert [band.get_datalim(axes.transData).y0, band.get_datalim(axes.transData).y1] == [20.0, 72.0]
    _PLOTS["mismatch"][1](axes := Figure().add_subplot(), [dict.fromkeys(shown, 1e-6) | {"step": 1}])  # without noise
    assert [line.get_ydata().tolist() for line in axes.get_lines()] == [[1e-6]] * 3
    _PLOTS["mismatch"][1](axes := Figure().add_subplot(), [dict.fromkeys(shown, 0.0) | {"step": 1}])
    assert np.isnan([line.get_ydata() for line in axes.get_lines()]).all()  # 0 has no logarithm


@pytest.mark.parametrize(
    ("plot", "title", "noise"),
    [
        ("accuracy", "Share of correct completions in training", ", sampled under noise"),
        ("entropy", "Entropy of the policy", ", and AQN's σ"),
        ("mismatch", "Rollout against trainer", ", the noise between them"),
    ],
)
def test_a_plot_names_noise_where_there_was_some(plot, title, noise):
    from matplotlib.figure import Figure

    names = ("accuracy", "entropy", "sampling/kl", "sampling/sampling_logp_difference/mean")
    least = 0.0009999999999999992  # of a logarithmic schedule to 1e-3; a linear axis of it had no extent in logarithms
    for sigmas, wanted in (((0.0, 0.0), title), ((0.0, least), title + noise)):
        axes = Figure().add_subplot()
        _PLOTS[plot][1](axes, [dict.fromkeys(names, 0.5) | {"step": 1, "aqn/sigma": sigma} for sigma in sigmas])
        assert axes.get_title() == wanted
        assert plot != "accuracy" or axes.get_ylim() == (-0.02, 1.02)


def test_a_curve_has_its_moving_average_beside_it():
    """Of 45 steps the mean of three, of fewer at the beginning."""
    from matplotlib.figure import Figure

    axes, values = Figure().add_subplot(), [float(7 * step % 11) for step in range(45)]
    _PLOTS["accuracy"][1](axes, [{"step": 1 + step, "accuracy": value} for step, value in enumerate(values)])
    (steps, points), (same, means) = (line.get_data() for line in axes.lines)
    assert list(steps) == list(same) == list(range(1, 46)) and list(points) == values
    assert means == pytest.approx([np.mean(values[max(0, step - 2) : step + 1]) for step in range(45)])


def test_the_rewards_band_is_their_deviation_to_either_side():
    from matplotlib.figure import Figure

    axes, rows = Figure().add_subplot(), [(1, 1.0, 0.25), (2, 2.0, 0.5), (3, 1.0, 0.0)]
    _PLOTS["reward"][1](axes, [{"step": s, "reward": mean, "reward_std": std} for s, mean, std in rows])
    [band] = axes.collections[0].get_paths()
    assert set(map(tuple, band.vertices)) == {(1, 0.75), (1, 1.25), (2, 1.5), (2, 2.5), (3, 1.0)}
