"""Rewards in worker processes: order of results, each kind of failure, and no process left behind."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import is_running

from qerl_jax.rewards import functions
from qerl_jax.rewards.functions import RewardError
from qerl_jax.rewards.load import load_rewards
from qerl_jax.rewards.outcomes import TimedOut, Unparsed
from qerl_jax.rewards.pool import WorkerPool

MINE = """
import ctypes, os, re, signal, sys, time

class Foreign(BaseException):
    pass

def act(prompts, completions, answer, **columns):
    values = []
    for text in completions:
        print("to nowhere", text)
        if text == "hang":
            time.sleep(1000)
        if text == "spin":  # holds the interpreter's lock, ignores signals
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            re.match("(a+)+$", "a" * 60 + "b")
        if text == "exit":
            os._exit(3)
        if text == "quit":
            sys.exit("bye")
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "foreign":
            raise Foreign("late")
        if text == "segfault":
            ctypes.string_at(0)
        if text == "memory":
            bytearray(10**18)
        if text == "raise":
            raise KeyError("broken")
        if text == "fork" and os.fork() == 0:
            return [-1.0] * len(completions)  # the child comes back with values of its own
        if text == "leave" and os.fork() == 0:
            sys.exit()
        if text == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.05 * (text == "slow"))
        values.append(float(len(text)))
    return values

def wait(completions, **columns):
    sleep(completions[0])
    return [1.0] * len(completions)

def sleep(text):
    time.sleep(float(text))

def pid(completions, **columns):
    return [float(os.getpid())] * len(completions)

def longest_first(prompts, completions, **columns):
    return [float(len(text) == max(map(len, completions))) for text in completions]

def never(**columns):
    time.sleep(1000)

def by_name(completions, **columns):
    return {1.0: "a"}

def in_one(completions, **columns):
    return "1"

def light(completions, **columns):
    return [float("jax" in sys.modules or os.environ["JAX_PLATFORMS"] != "cpu")] * len(completions)
"""


@pytest.fixture
def mine(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def rows(texts: list[str], prompts: list[str] | None = None) -> dict:
    return {
        "prompts": prompts or [str(i) for i in range(len(texts))],
        "completions": texts,
        "answer": [""] * len(texts),
    }


def test_results_come_in_order(mine, capfd):
    """What a reward prints goes to standard error."""
    texts = ["slow" if i % 3 == 0 else "x" * i for i in range(30)]
    with load_rewards((f"{mine}:act", "soft_format"), 2, 30.0) as rewards:
        assert rewards[f"{mine}:act"](**rows(texts)) == [float(len(text)) for text in texts]
        assert rewards["soft_format"](**rows(["<think></think><answer></answer>", "x"])) == [1.0, 0.0]
    said = capfd.readouterr()
    assert "to nowhere slow" in said.err and not said.out


def test_each_failure_is_one_items(mine):
    """Every kind of failure in one batch; the other rows are graded, and the time limit is reported once."""
    told: list[str] = []
    texts = ["a", "hang", "bb", "exit", "segfault", "ccc", "stop", "memory", "exit", "spin", "dddd"]
    with load_rewards((f"{mine}:act",), 2, 0.8, told.append) as rewards:
        reward = rewards[f"{mine}:act"]
        totals, parts = functions.score({"mine": reward}, (1.0,), list("0123456789a"), texts, [""] * 11)
        graded = {"a": 1, "bb": 2, "ccc": 3, "dddd": 4}
        assert totals == pytest.approx([graded.get(text, math.nan) for text in texts], nan_ok=True)
        assert parts["mine/timeout"] == [float(text in ("hang", "spin", "stop")) for text in texts]
        assert parts["mine/crash"] == [float(text in ("exit", "segfault", "memory")) for text in texts]
        assert reward(**rows(["a", "hang"])) == pytest.approx([1, math.nan], nan_ok=True)
    assert len(told) == 1 and "3 of 11 completions met the time limit" in told[0]


def test_a_failure_is_that_of_each_completion_of_its_prompt(mine):
    texts, prompts = ["a", "exit", "bb", "dddd"], ["p", "p", "q", "r"]
    with load_rewards((f"{mine}:act",), 1, 30.0) as rewards:
        values = rewards[f"{mine}:act"](**rows(texts, prompts))
    assert values == pytest.approx([math.nan, math.nan, 2, 4], nan_ok=True)


def test_a_reward_that_raises_ends_the_run_with_its_words(mine):
    """And the last line of the reward's own file, also where a library of Python's raised it."""
    (line,) = [n for n, text in enumerate(MINE.splitlines(), 1) if "KeyError" in text]
    with load_rewards((f"{mine}:act", f"{mine}:wait"), 2, 30.0) as rewards:
        with pytest.raises(RewardError, match=rf"act' raised KeyError\('broken'\) in {mine}, line {line}: name"):
            rewards[f"{mine}:act"](**rows(["a", "raise"]))
        (line,) = [n for n, text in enumerate(MINE.splitlines(), 1) if "time.sleep(float" in text]
        with pytest.raises(RewardError, match=rf"raised ValueError\(.*\) in {mine}, line {line}$"):
            rewards[f"{mine}:wait"](**rows(["no number"]))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_exits_or_returns_no_list_is_an_error_at_once(mine, workers):
    cases = [("act", "quit", r"act' raised SystemExit\('bye'\)"), ("by_name", "", "a dict"), ("in_one", "", "a str")]
    cases.append(("act", "foreign", r"act' raised Foreign\('late'\)"))
    if workers:  # an interrupt of the reward's own, and not pytest's
        cases.append(("act", "interrupt", r"act' raised KeyboardInterrupt\(\)"))
    for function, text, words in cases:
        with load_rewards((f"{mine}:{function}",), workers, 30.0) as rewards:
            with pytest.raises(BaseException, match=words) as raised:
                rewards[f"{mine}:{function}"](**rows([text]))
            assert raised.type is RewardError


def test_a_reward_that_forks_shifts_no_score(mine):
    """The child of a fork would reply, too, and every later score would be that of the task before; or end the run."""
    texts = ["a", "fork", "bb", "fork", "ccc", "leave", "dddd"] * 3
    with load_rewards((f"{mine}:act",), 1, 30.0) as rewards:
        assert rewards[f"{mine}:act"](**rows(texts)) == [float(len(text)) for text in texts]


def test_the_time_limit_is_the_limit(mine):
    """Not seconds later: a task of 3 s is not graded under a limit of 1 s, one of 0.2 s is."""
    with load_rewards((f"{mine}:wait",), 2, 1.0) as rewards:
        values = rewards[f"{mine}:wait"](**rows(["0.2", "3"]))
    assert values[0] == 1.0 and isinstance(values[1], TimedOut) and math.isnan(values[1])


def test_how_many_failures_are_too_many(mine):
    """The first few tasks of a large batch where a reward never answered; as many in a row, over any number of steps,
    where it did: a step may be a single task.
    """
    never, act = f"{mine}:never", f"{mine}:act"
    pool = WorkerPool([never], 2, 0.02, max_failures=4)  # which is no limit of the start
    with pytest.raises(RewardError, match=r"none of 4 tasks: 4 were stopped after reward_timeout 0.02 s"):
        pool.grade(never, [rows(["x"])] * 64)
    pool = WorkerPool([act], 1, 30.0, max_failures=4)
    for texts in (["a"], ["exit"], ["exit", "exit"], ["b"], ["exit"] * 3):
        values = [value for (value,) in pool.grade(act, [rows([text]) for text in texts])]
        assert values == pytest.approx([math.nan if text == "exit" else 1 for text in texts], nan_ok=True)
    with pytest.raises(RewardError, match=r"none of 4 tasks: 0 were stopped .* in 4 the process died"):
        pool.grade(act, [rows(["exit"])])


def test_a_file_is_called_with_the_completions_of_one_prompt(mine):
    """A reward may therefore compare within the group, with workers and without."""
    texts, prompts = ["a", "bb", "ccc", "d", "e", "ff"], ["p", "p", "p", "q", "q", "q"]
    same = ["p"] * 6  # two prompts of one text: their place in the batch tells them apart
    for workers in (0, 2):
        with load_rewards((f"{mine}:longest_first",), workers, 30.0) as rewards:
            index = {"prompt_index": [0, 0, 0, 1, 1, 1]}
            assert rewards[f"{mine}:longest_first"](**rows(texts, same), **index) == [0, 0, 1, 0, 0, 1]
            assert rewards[f"{mine}:longest_first"](**rows(texts, prompts)) == [0, 0, 1, 0, 0, 1]


def pids_of(pool: WorkerPool, name: str, tasks: int = 1, text: str = "x") -> list[int]:
    """Process of each task."""
    return [int(value) for (value,) in pool.grade(name, [rows([text])] * tasks)]


def test_a_reward_that_does_not_load_leaves_no_process_behind(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    before = set(multiprocessing.active_children())
    with pytest.raises(RewardError, match=r"slow\.py:f'\] were not loaded within 0 s"):
        WorkerPool([f"{tmp_path / 'slow.py'}:f"], 1, 1.0, start_seconds=0.2)
    assert set(multiprocessing.active_children()) <= before


def test_a_worker_that_stopped_while_idle_costs_no_item(mine):
    """Though its tasks fill its pipe."""
    pool = WorkerPool([f"{mine}:pid"], 1, 0.5, start_seconds=2.5)
    (pid,) = pids_of(pool, f"{mine}:pid", text="x" * 800_000)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    others = set(pids_of(pool, f"{mine}:pid", 3, "x" * 800_000))
    assert pid not in others and time.monotonic() - began < 30 and not is_running(pid)
    pool.close()
    assert not any(map(is_running, others))


class Dying(WorkerPool):
    """Whose worker `victim` dies once, between the second look at the pool and the task that it is given."""

    victim: int | None = None
    looks = 0

    def _started(self):
        pool = super()._started()
        self.looks += self.victim is not None
        if self.looks == 2:
            os.kill(self.victim, signal.SIGKILL)
            while pool.active:
                time.sleep(0.01)
            self.victim, self.looks = None, 0
        return pool


def test_a_worker_that_dies_as_its_tasks_come_costs_no_item(mine):
    """The pool has failed when they are scheduled."""
    pool, name = Dying([f"{mine}:pid"], 1, 30.0), f"{mine}:pid"
    (pool.victim,) = pids_of(pool, name)
    assert len(pids_of(pool, name, 3)) == 3 and pool.victim is None
    pool.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_of_this_name", "failed to load"),
        ("from .util import f", r"failed to load: .*; it can import from the working directory, by full names"),
        ("import os; os._exit(7)", "ended while loading"),
        ("import sys; sys.exit(0)", r"failed to load: SystemExit\(0\)"),
        ("", "no function 'f'"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_an_error_before_the_first_step(tmp_path, text, words):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(RewardError, match=words):
        load_rewards((f"{path}:f",), 2, 30.0)


def test_a_worker_has_the_public_names(tmp_path):
    """Though it begins with a bare package, whose submodules alone it imports."""
    path = tmp_path / "named.py"
    path.write_text("from qerl_jax import *\ndef f(**_): return [Config.num_generations]")
    with load_rewards((f"{path}:f",), 1, 30.0) as rewards:
        assert rewards[f"{path}:f"](**rows(["x"])) == [8.0]


def test_workers_import_no_jax_and_hear_no_stop_signal(mine, monkeypatch):
    """SIGTERM and the like, as a batch system sends them to every process. JAX in a reward takes the CPU."""
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    pool = WorkerPool([f"{mine}:light", f"{mine}:pid"], 1, 30.0)
    (pid,) = pids_of(pool, f"{mine}:pid")
    assert os.getpgid(pid) != os.getpgid(0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(pid, number)
    assert pool.grade(f"{mine}:light", [rows(["x"])]) == [[0.0]] and pids_of(pool, f"{mine}:pid") == [pid]
    pool.close()
    assert not is_running(pid)


TRAINER = """
import sys
from qerl_jax.rewards.pool import WorkerPool
name, pid = sys.argv[1:3]
if __name__ == "__main__":
    pool = WorkerPool([name, pid], 2, 1000.0)
    task = {"prompts": [""], "completions": ["x"], "answer": [""]}
    print(*[int(value) for (value,) in pool.grade(pid, [task] * 50)], flush=True)
    pool.grade(name, [task | {"completions": [sys.argv[3]]}])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the parent's death signal is Linux's")
@pytest.mark.parametrize("text", ["spin", pytest.param("hang", marks=pytest.mark.nightly)])
def test_no_worker_outlives_a_killed_trainer(mine, text):
    """SIGKILL while one worker is busy forever and one is idle."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, f"{mine}:act", f"{mine}:pid", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        pids = {int(pid) for pid in process.stdout.readline().split()}
        assert pids and all(map(is_running, pids))
        time.sleep(0.3)
        process.kill()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


def test_math_verify_is_stopped_where_it_does_not_end():
    """A power that would take hours to expand; the other rows are graded, without signals of the main thread."""
    pytest.importorskip("math_verify")
    texts = ["<answer>4</answer>", "<answer>2^{2^{2^{2^{2^{2}}}}}</answer>", "none", "<answer>5</answer>"]
    with load_rewards(("math_verify",), 1, 2.0) as rewards:
        values = rewards["math_verify"](prompts=["p"] * 4, completions=texts, answer=["4"] * 4)
    assert values[0] == 1 and values[3] == 0
    assert isinstance(values[1], TimedOut) and math.isnan(values[1])
    assert isinstance(values[2], Unparsed)
