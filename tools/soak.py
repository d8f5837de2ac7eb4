"""Trains the bundled policy for a long time, or kills one run a hundred times: does memory grow, is anything lost?

    python tools/soak.py memory [--minutes 30] [--record FILE]
    python tools/soak.py kills [--kills 50] [--terminations 50] [--steps 120] [--record FILE]

`memory` samples the resident memory of the trainer and of each of its workers, once a second. The first fifth is
warm-up; exit code 1 if the mean of the last fifth exceeds that of the second by more than 2 %. It also prints the slope
of a straight line through what follows the warm-up.

`kills` ends one run at random moments, by SIGKILL and by SIGTERM in random order, resumes it each time, lets it finish,
and compares it with a run that nobody ended: arrays of the last checkpoint, metrics, completions, adapter and
evaluation, to the bit. Exit code 1 if they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

import runs  # noqa: E402
import small  # noqa: E402
from processes import is_running  # noqa: E402

from qerl_jax import train  # noqa: E402
from qerl_jax.command_line import process  # noqa: E402
from qerl_jax.config import dump  # noqa: E402
from qerl_jax.reporting.metrics import read_metrics  # noqa: E402

ALLOWED = 1.02  # growth of resident memory after the warm-up
REWARD = '''
def letters(completions, **columns):
    """A reward of one's own is graded in worker processes."""
    return [float(len(text)) for text in completions]
'''


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def children(pid: int) -> list[int]:
    """Processes that the main thread of a process has started."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextlib.contextmanager
def ending(run: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """The process, killed at the end of the block if it still runs."""
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def memory(minutes: float, place: Path) -> dict:
    """Samples of a run of so many minutes, and what they say."""
    (place / "letters.py").write_text(REWARD)
    config = runs.config(
        place / "run",
        **{"max_steps": 2_000_000, "batch_size": 32, "save_steps": 20, "reward_workers": 2},
        **{"reward_funcs": ("answer", f"{place / 'letters.py'}:letters"), "reward_weights": (1.0, 0.01)},
    )
    (place / "config.yaml").write_text(dump(config))
    samples: list[tuple[float, int, int]] = []
    command = runs.command(place / "config.yaml")
    with (
        (place / "log").open("w") as log,
        ending(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)) as run,
    ):
        runs.wait_for_step(place / "run", 1, run)
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < 60 * minutes:
            if run.poll() is not None:
                raise RuntimeError(f"the run ended early: {(place / 'log').read_text()[-2000:]}")
            workers = [resident_bytes(child) for child in children(run.pid)]
            samples.append((elapsed, resident_bytes(run.pid), sum(workers)))
            time.sleep(1)
    steps = read_metrics(place / "run")[-1]["step"]
    found = {"minutes": minutes, "steps": steps, "samples": len(samples)}
    seconds = np.array([sample[0] for sample in samples])
    for i, name in enumerate(("trainer", "workers"), 1):
        found |= {f"{name}_{key}": value for key, value in growth(seconds, [sample[i] for sample in samples]).items()}
    return found


def growth(seconds: np.ndarray, values: Sequence[int]) -> dict[str, float]:
    """Means of the second and the last fifth in MB, their ratio, and the slope after the first in MB an hour."""
    megabytes, fifth = np.array(values) / 1e6, len(values) // 5
    early, late = megabytes[fifth : 2 * fifth].mean(), megabytes[-fifth:].mean()
    slope = np.polyfit(seconds[fifth:], megabytes[fifth:], 1)[0] * 3600
    return {"early_mb": float(early), "late_mb": float(late), "ratio": float(late / early), "mb_an_hour": float(slope)}


def kills(by_kill: int, by_termination: int, steps: int, place: Path, seed: int = 0) -> dict:
    """Ends a run so many times and compares it with one that was left alone."""
    rng = random.Random(seed)
    for count, name in ((16, "many.jsonl"), (3, "few.jsonl")):
        rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(count)]
        (place / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets, model = (
        (str(place / "many.jsonl"), str(place / "few.jsonl")),
        str(in_fork(lambda: small.nvfp4(place / "model")) or place / "model"),
    )
    files = {}
    for name in ("through", "ended"):
        config = runs.config(
            place / name,
            **{"model": model, "weight_format": None, "dataset": sets, "dataset_weights": (2, 1)},
            **{"eval_dataset": sets[1], "eval_samples": 4, "max_steps": 2 * steps, "max_prompt_length": 120},
            **{"compilation_cache_dir": str(place / "programs")},
        )
        files[name] = place / f"{name}.yaml"
        files[name].write_text(dump(config))
    log, began, codes = place / "log", time.monotonic(), Counter()
    finish(files["through"], log)
    plan = [signal.SIGKILL] * by_kill + [signal.SIGTERM] * by_termination
    rng.shuffle(plan)
    for i, number in enumerate(plan):
        child = fork(files["ended"], log)
        moment = wait_for_moment(place / "ended", steps, child, rng)
        code = ended(child)
        if code is not None and code:
            raise RuntimeError(f"a run ended by itself with {code}: {log.read_text()[-2000:]}")
        if code is None:
            os.kill(child, number)
            while (code := ended(child)) is None:
                time.sleep(0.01)
        codes[f"{number.name} {code}"] += 1
        print(
            f"{i + 1}/{len(plan)} {number.name} {moment}: exit code {code}, {last_step(place / 'ended')} steps",
            flush=True,
        )
    finish(files["ended"], log)
    traces = log.read_text().count("Traceback (most recent call last)")
    runs.assert_same_run(place / "through", place / "ended")
    assert runs.read_json(place / "through/evaluation.json") == runs.read_json(place / "ended/evaluation.json")
    return {"steps": steps, "seconds": time.monotonic() - began, "traces": traces, "codes": dict(codes), "same": True}


def in_fork(call: Callable[[], object]) -> None:
    """Call a function that initializes JAX, after which a fork of this process would hang."""
    child = os.fork()
    if child == 0:
        try:
            call()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def fork(config_file: Path, log: Path) -> int:
    """Process id of a run, begun or resumed in a fork of this process, which has imported everything."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            jax.config.update("jax_disable_most_optimizations", True)  # compiles faster
            process.end(lambda: train.main(["--config", str(config_file), "--resume", "auto"]))
        except SystemExit as stop:
            sys.stdout.flush()
            os._exit(int(stop.code or 0))
        finally:
            os._exit(70)
    return child


def ended(child: int) -> int | None:
    """Exit code of a process that has ended; None while it runs."""
    with contextlib.suppress(ChildProcessError):
        done, status = os.waitpid(child, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if done else None
    return 0


def finish(config_file: Path, log: Path) -> None:
    """Run to the end."""
    code, child = None, fork(config_file, log)
    while (code := ended(child)) is None:
        time.sleep(0.05)
    if code:
        raise RuntimeError(f"the run ended with {code}: {log.read_text()[-2000:]}")


def last_step(directory: Path) -> int:
    """The last step with metrics."""
    rows = read_metrics(directory)
    return rows[-1]["step"] if rows else 0


def wait_for_moment(directory: Path, steps: int, child: int, rng: random.Random) -> str:
    """Wait for a random moment: one of the start, or soon after the next step has been recorded."""
    recorded, began = last_step(directory), time.monotonic()
    if rng.random() < 0.3 or recorded >= steps - 1:
        delay = rng.uniform(0, 5)
        time.sleep(delay)
        return f"{delay:.1f} s after the start"
    while last_step(directory) <= recorded and is_running(child) and time.monotonic() < began + 120:
        time.sleep(0.005)
    delay = rng.uniform(0, 0.4)
    time.sleep(delay)
    return f"{delay:.2f} s after step {last_step(directory)}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["memory", "kills"])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--terminations", type=int, default=50)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--record", type=Path, help="file to which the result is appended as a JSON line")
    args = parser.parse_args()
    ours = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": ours}
    with tempfile.TemporaryDirectory(prefix="qerl-soak-") as folder:
        if args.mode == "memory":
            found = memory(args.minutes, Path(folder))
            good = max(found["trainer_ratio"], found["workers_ratio"]) <= ALLOWED
        else:
            found = kills(args.kills, args.terminations, args.steps, Path(folder))
            good = found["traces"] == 0
    print(json.dumps(found, indent=1))
    if args.record:
        with args.record.open("a") as file:
            file.write(json.dumps({"mode": args.mode, **found}) + "\n")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
