"""SIGKILL at any moment of a run loses nothing: it can always be resumed, and always ends as if it had never been
killed, bit for bit.
"""

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import runs
import small

from qerl_jax import train
from qerl_jax.checkpoint.orbax import MANIFEST_FILE
from qerl_jax.config import dump
from qerl_jax.lowered import as_in_sources
from qerl_jax.reporting.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("kept_programs_forgotten")

FEW, MANY = 3, 160  # steps of a run: of the quick test, of the nightly one
MISSED = 120  # seconds after which a moment that never came is given up
TRIES = 8  # for a moment at the end of a run, which ends if it is missed


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run of steps so short that a process spends its life starting: every part of the program on a tiny model."""
    root = tmp_path_factory.mktemp("kills")
    for count, name in ((16, "many.jsonl"), (3, "few.jsonl")):
        rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(count)]
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text("def reward(completions, **_):\n    return [len(set(c)) for c in completions]\n")
    sets, model = (str(root / "many.jsonl"), str(root / "few.jsonl")), str(small.nvfp4(root / "model"))
    return lambda directory, steps: runs.config(
        directory,
        **{"model": model, "weight_format": None, "dataset": sets, "dataset_weights": (2, 1)},
        **{"reward_funcs": (f"{root / 'reward.py'}:reward",), "reward_weights": None},
        **{"eval_dataset": sets[1], "eval_batch_size": 8, "max_steps": 2 * steps, "max_prompt_length": 120},
        # Shaped and drawn as a rollout, whose programs it then shares.
        **{"eval_samples": 2, "eval_num_generations": 4, "eval_temperature": 1.0, "eval_top_p": 1.0},
    )


def prepared(config, place: Path, steps: int) -> tuple[Path, Path, Path]:
    """(config file, directory) of a run to kill, and the directory of the same run that nobody killed, finished."""
    directory, through = place / "run", place / "through" / "run"
    through.parent.mkdir()
    for file, output in ((place / "config.yaml", directory), (through.parent / "config.yaml", through)):
        file.write_text(dump(config(output, steps)))
    with as_in_sources():  # the process to kill finds its programs
        assert train.main(["--config", str(through.parent / "config.yaml")]) == 0
    return place / "config.yaml", directory, through


def metrics_of(directory: Path) -> int:
    rows = read_metrics(directory)
    return rows[-1]["step"] if rows else 0


# A moment of a run, seen from outside through its files and what it prints.
MOMENTS: dict[str, Callable[[Path, str], bool]] = {
    "in the evaluation before the run": lambda run, said: said.endswith("before training …\n"),
    "in a checkpoint's files": lambda run, said: any((run / "checkpoints").glob(".*.writing/*")),
    "in the removal of a checkpoint": lambda run, said: any(
        path.name.isdigit() and not (path / MANIFEST_FILE).exists() for path in (run / "checkpoints").glob("*")
    ),
    "between metrics and completions": lambda run, said: (
        not (run / "completions" / f"step_{metrics_of(run):06d}.parquet").exists()
    ),
    "between completions and checkpoint": lambda run, said: (
        metrics_of(run) > 0 and not (run / "checkpoints" / f"{metrics_of(run)}").exists()
    ),
    "in the evaluation after the run": lambda run, said: said.endswith("on the same problems …\n"),
    "in the export of the adapter": lambda run, said: any(run.glob(".adapter.*")),
}


SAVES = {"in a checkpoint's files", "in the removal of a checkpoint"}
AT_THE_END = {"in the evaluation after the run", "in the export of the adapter"}


def kill(file: Path, directory: Path, steps: int, name: str | None, moment: Callable[[Path, str], bool]) -> bool:
    """Start or resume the run and kill it at the first sight of the moment, or a step before its last if that moment,
    which may be a millisecond, went by unseen. Where the run ended first it is tried again: a run that has ended
    evaluates and exports once more when it is resumed. Returns whether the moment was seen; a moment of the end that
    went by every time was not.
    """
    output = file.with_suffix(".log")
    for _ in range(TRIES):
        output.write_text("")
        process = runs.start(file, "--resume", "auto", output=output)
        deadline = time.monotonic() + MISSED
        ends, seen = name in AT_THE_END or metrics_of(directory) >= steps - 1, False
        while process.poll() is None and time.monotonic() < deadline:
            if seen := moment(directory, output.read_text()):
                break
            if not ends and metrics_of(directory) >= steps - 1:
                break
            time.sleep(0.001)
        if process.poll() is None:
            break
    else:
        assert process.returncode == 0, output.read_text()
        return False
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, output.read_text()
    return seen


def finish_and_compare(file: Path, directory: Path, through: Path) -> None:
    """The same end: arrays, metrics, completions, adapter, evaluation, and no file more or less."""
    with as_in_sources():
        assert train.main(["--config", str(file), "--resume", "auto"]) == 0
    runs.assert_same_run(through, directory)
    assert runs.read_json(through / "evaluation.json") == runs.read_json(directory / "evaluation.json")
    assert files(directory) == files(through)


def files(directory: Path) -> list[str]:
    """Every file of a run but those that orbax names at random."""
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if "ocdbt" not in str(path) and path.parent.name != "d")


def start_moment(directory: Path, steps: int, rng: random.Random) -> Callable[[Path, str], bool]:
    """A random moment: some time after the start, or after the next step has been recorded."""
    delay, recorded, begun = rng.uniform(0, 1), metrics_of(directory), time.monotonic()
    if rng.random() < 0.3 or recorded >= steps:  # then no step will come
        return lambda run, said: time.monotonic() > begun + 12 * delay
    seen: list[float] = []

    def after_a_step(run: Path, said: str) -> bool:
        if not seen and metrics_of(run) > recorded:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() > seen[0] + 0.4 * delay

    return after_a_step


def test_killed_where_a_step_is_half_recorded(config, tmp_path):
    file, directory, through = prepared(config, tmp_path, FEW)
    moment = "between completions and checkpoint"
    kill(file, directory, FEW, moment, MOMENTS[moment])
    assert 0 < metrics_of(directory) < FEW
    finish_and_compare(file, directory, through)


@pytest.mark.nightly
def test_killed_twenty_times(config, tmp_path):
    """Once at each named moment (those of the end come last), and else at random ones."""
    rng = random.Random(0)
    file, directory, through = prepared(config, tmp_path, MANY)
    named = list(MOMENTS)
    plan, hit = [*named[:5], *[None] * 13, *named[5:]], set()
    for name in [plan[0], *rng.sample(plan[1:-2], len(plan) - 3), *plan[-2:]]:
        seen = kill(file, directory, MANY, name, MOMENTS[name] if name else start_moment(directory, MANY, rng))
        if name and seen:
            hit.add(name)
        where = f"{name} ({'seen' if seen else 'missed'})" if name else "at random"
        print(f"killed {where} with {metrics_of(directory)} steps recorded", flush=True)
    assert hit >= SAVES and len(hit) >= 5, hit
    finish_and_compare(file, directory, through)
