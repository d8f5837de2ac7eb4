"""report.md: figures worked out by hand, links that exist, and what somebody should look at."""

import dataclasses
import importlib.metadata
import io
import platform
import re
import types
from pathlib import Path

import jax
import pytest
from rich.console import Console

from qerl_jax.config import Config
from qerl_jax.evaluation import Evaluation
from qerl_jax.reporting.plots import write_plots
from qerl_jax.reporting.progress import TrainingProgress
from qerl_jax.reporting.report import Ending, _versions, render, write_report


def rows(count: int) -> list[dict]:
    return [
        {
            "step": s, "reward": s / 10, "reward_std": 0.1, "accuracy": s / 20, "time/rollout": 3.0,
            "time/update": 1.0, "skipped": 0.0,
        }
        for s in range(1, count + 1)
    ]  # fmt: skip


def test_a_finished_run(tmp_path):
    config = Config(
        model="m", max_steps=200, seed=3, lora_target_modules=("q_proj",), output_dir=str(tmp_path), resume="auto"
    ).with_max_prompt_length(4096)
    metrics = rows(20)
    write_plots(tmp_path, metrics)
    before, after = Evaluation(0.5, 0.4, 0.6, 0.9, 1, 0, 12.5, 200, 1), Evaluation(0.75, 0.7, 0.8, 0.9, 1, 0, 9, 200, 1)
    ending = Ending(20, "", {"before": before, "after": after}, {"rollout": 60.0, "evaluation": 20.0})
    text = write_report(tmp_path, config, metrics, ending).read_text()
    assert "finished step 20 of 200" in text
    assert "| before | pass@1 50.0 % (95 % interval 40.0–60.0, 200 problems) |" in text
    assert "| after | pass@1 75.0 %" in text
    settings = text.split("## Settings")[1].split("##")[0]
    assert re.findall(r"\| `(\w+)` ", settings) == ["model", "output_dir", "seed", "max_steps", "lora_target_modules"]
    assert "| `max_prompt_length` | 80 | None |" in render(
        "n", dataclasses.replace(config, max_prompt_length=80), metrics, ending, []
    )
    assert "| `seed` | 3 | 0 |" in settings
    links = re.findall(r"!\[\w+\]\((.+?)\)", text)
    assert "plots/accuracy.png" in links and all(
        (tmp_path / link).is_file() and not link.startswith("/") for link in links
    )
    assert f"| jax | {jax.__version__} |" in text and "`nonfinite/`" not in text


def test_a_stopped_run_with_something_to_look_at(tmp_path):
    metrics = rows(3)
    metrics[1] |= {"skipped": 2.0, "completions/failed": 1.0}
    metrics[2] |= {"grad_norm": 0.0, "frac_reward_zero_std": 1.0}
    ending = Ending(3, "SIGTERM", {}, {})
    config = Config(model="m", max_steps=200, system_prompt="Think.\n3 | 4?")
    text = write_report(tmp_path, config, metrics, ending).read_text()
    assert "| `system_prompt` | Think.\\n3 \\| 4? | None |\n" in text
    assert "stopped by SIGTERM after step 3 of 200" in text and "evaluation |" not in text
    for words in ("2 updates were not finite", "1 completions", "- 1 of 3 steps trained nothing: the rewards of every"):
        assert words in text, words
    assert "first step | last step" in text and "| reward | 0.1 | 0.3 |" in text


def test_every_row_and_note_says_what_its_number_is():
    """A row for each metric, from the first two of 20 steps and the last two; other steps, and null, in no mean. Times
    add up over all steps.
    """
    names = (
        "reward", "accuracy", "entropy", "sampling/entropy", "completions/mean_length", "completions/clipped_ratio",
        "frac_reward_zero_std", "grad_norm", "tokens_per_second", "step_time",
    )  # fmt: skip
    metrics = [{name: 100.0 for name in names} for _ in range(20)]
    for i, name in enumerate(names, 1):
        metrics[0][name], metrics[1][name], metrics[18][name], metrics[19][name] = i, i + 1, None, 10 * i
    metrics[5] |= {"aqn/sigma": 0.01, "skipped": 2, "completions/failed": 3}
    metrics[6] |= {"skipped": 4, "completions/failed": 5, "time/rollout": 1.0, "time/update": 2.0}
    metrics[7] |= {"time/rollout": 4.0, "time/update": None}
    config = Config(model="m", dataset=("a", "b"), max_steps=40, num_iterations=2)
    ending = Ending(
        20, "", {}, {"rollout": 9.0, "checkpoint": 3.0}, {"sigma": "mine", "train_dataset": "train_dataset"}
    )
    head, notes, *_ = (text := render("run", config, metrics, ending, ["x.png"])).split("\n- ", 1)
    assert head.rstrip().splitlines() == [
        "# run",
        "",
        "m on a, b: finished step 20 of 20.",
        "",
        "| in training, mean of | first 2 steps | last 2 steps |",
        "|---|---|---|",
        "| reward (noise included) | 1.5 | 10 |",
        "| share correct (noise included) | 2.5 | 20 |",
        "| entropy, nats a token | 3.5 | 30 |",
        "| entropy of the sampled policy, nats a token (noise included) | 4.5 | 40 |",
        "| completion length, tokens | 5.5 | 50 |",
        "| share cut off at max_completion_length | 6.5 | 60 |",
        "| share of groups with equal rewards | 7.5 | 70 |",
        "| gradient norm | 8.5 | 80 |",
        "| rollout, tokens/s | 9.5 | 90 |",
        "| seconds a step | 10.5 | 100 |",
    ]
    assert notes.split("\n\n")[0].splitlines() == [
        "sigma was given to `train`: `mine`.",
        "- train_dataset was given to `train`.",
        "- 1 of 20 steps trained nothing: loss, gradient or new parameters of updates were not finite (batches in "
        "nonfinite/); lower learning_rate, or look for values that are not finite in the model.",
        "- 6 updates were not finite and changed nothing; their batches are in `nonfinite/`.",
        "- 8 completions whose largest logit was not finite were left out.",
    ]
    assert "\n![x](plots/x.png)\n" in text
    versions = dict(re.findall(r"^\| (\S+) \| (.*) \|$", text.split("## Versions")[1], re.M))
    assert versions["Python"] == platform.python_version() and versions["system"] == platform.platform()
    assert versions["device"] == f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    several = [types.SimpleNamespace(device_kind=kind) for kind in ("H200", "H100", "H200")]
    assert ("device", "3 × H100, H200") in _versions(several)
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy"):
        assert versions[name] == importlib.metadata.version(name)
    assert text.split("## Time")[1].split("##")[0].strip().splitlines() == [
        "| phase | seconds | share |",
        "|---|---|---|",
        "| rollout | 5.0 | 50 % |",
        "| update | 2.0 | 20 % |",
        "| checkpoint (since the last start) | 3.0 | 30 % |",
    ]


def test_a_run_stopped_before_its_first_step(tmp_path):
    text = write_report(tmp_path, Config(model="m", max_steps=200), [], Ending(0, "SIGINT", {}, {})).read_text()
    assert "stopped by SIGINT after step 0" in text and "![" not in text


def test_a_run_in_the_working_directory_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "run-7").mkdir()
    monkeypatch.chdir(tmp_path / "run-7")
    assert write_report(Path(), Config(max_steps=1), [], Ending(1, "", {}, {})).read_text().startswith("# run-7\n")


@pytest.mark.parametrize(("width", "shown"), [(80, "length 512"), (60, "nothing trained"), (120, "━")])
def test_in_a_narrow_terminal_step_and_time_left_are_whole(width, shown):
    """The numbers between them give way, from the right. A step that trained nothing has no entropy."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    metrics = {"reward": 1.2, "entropy": 0.123, "aqn/sigma": 0.01, "completions/mean_length": 512.3}
    with TrainingProgress(0, 200, console) as progress:
        progress.update(7, metrics | {"tokens_per_second": 12345.6, "step_time": 8.1})
        progress.update(120, metrics | {"entropy": float("nan"), "tokens_per_second": 12345.6, "step_time": 8.1})
    frame = [line for line in console.file.getvalue().splitlines() if "step 120/200" in line][-1]
    assert re.search(r" \d:\d\d:\d\d", frame) and shown in frame
