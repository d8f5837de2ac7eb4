"""Rewards in worker processes: order of results, each kind of failure, and no process left behind."""

from __future__ import annotations

import json
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
from qerl_jax.rewards import pool as pool_module
from qerl_jax.rewards.functions import RewardError
from qerl_jax.rewards.load import load_rewards
from qerl_jax.rewards.outcomes import Crashed, TimedOut, Unparsed, from_json, to_json
from qerl_jax.rewards.pool import WorkerPool

MINE = """
import ctypes, os, re, signal, sys, time

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
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "quit":
            sys.exit("bye")
        if text == "segfault":
            ctypes.string_at(0)
        if text == "memory":
            bytearray(10**18)
        if text == "raise":
            raise KeyError("broken")
        if text == "fork" and os.fork() == 0:
            return [-1.0] * len(completions)  # the child comes back with values of its own
        if text == "forge":  # writes into its worker's connection
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b'\\0\\0\\0\\x12[0,"values",[9.0]]')
                except OSError:
                    pass
        time.sleep(0.05 * (text == "slow"))
        values.append(float(len(text)))
    return values

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
    return [float("jax" in sys.modules)] * len(completions)
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


def test_results_come_in_order(mine):
    texts = ["slow" if i % 3 == 0 else "x" * i for i in range(30)]
    with load_rewards((f"{mine}:act", "soft_format"), 2, 30.0) as rewards:
        assert rewards[f"{mine}:act"](**rows(texts)) == [float(len(text)) for text in texts]
        assert rewards["soft_format"] is functions.soft_format


def test_each_failure_is_one_items(mine):
    """Every kind of failure in one batch; the other rows are graded, and the time limit is reported once."""
    told: list[str] = []
    texts = ["a", "hang", "bb", "exit", "segfault", "ccc", "memory", "exit", "spin", "dddd"]
    with load_rewards((f"{mine}:act",), 2, 1.5, told.append) as rewards:
        reward = rewards[f"{mine}:act"]
        totals, parts = functions.score({"mine": reward}, (1.0,), list("0123456789"), texts, [""] * 10)
        graded = {"a": 1, "bb": 2, "ccc": 3, "dddd": 4}
        assert totals == pytest.approx([graded.get(text, math.nan) for text in texts], nan_ok=True)
        assert parts["mine/timeout"] == [float(text in ("hang", "spin")) for text in texts]
        assert parts["mine/crash"] == [float(text in ("exit", "segfault", "memory")) for text in texts]
        assert reward(**rows(["a", "hang"])) == pytest.approx([1, math.nan], nan_ok=True)
    assert len(told) == 1 and "2 of 10 completions met the time limit" in told[0]


def test_a_reward_that_raises_ends_the_run_with_its_words(mine):
    with load_rewards((f"{mine}:act",), 2, 30.0) as rewards:
        with pytest.raises(RewardError, match=r"mine.py:act' raised KeyError\('broken'\)"):
            rewards[f"{mine}:act"](**rows(["a", "raise"]))
        assert rewards.pool._workers == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_exits_or_returns_no_list_is_an_error_at_once(mine, workers):
    cases = {"act": r"act' raised SystemExit\('bye'\)", "by_name": "returned a dict", "in_one": "returned a str"}
    for function, words in cases.items():
        with load_rewards((f"{mine}:{function}",), workers, 30.0) as rewards, pytest.raises(RewardError, match=words):
            rewards[f"{mine}:{function}"](**rows(["quit"]))


def test_an_interrupt_that_a_reward_raises_is_its_error(mine):
    """It ended the worker with a trace, and the message said only that the process died."""
    words = r"mine.py:act' raised KeyboardInterrupt\(\)"
    with load_rewards((f"{mine}:act",), 1, 30.0) as rewards, pytest.raises(RewardError, match=words):
        rewards[f"{mine}:act"](**rows(["interrupt"]))


def test_a_file_that_exits_is_an_error(tmp_path):
    (tmp_path / "exits.py").write_text("import sys; sys.exit(0)")
    with pytest.raises(RewardError, match=r"failed to load: SystemExit\(0\)"):
        functions.load_reward(f"{tmp_path / 'exits.py'}:f")


def test_a_reward_that_forks_shifts_no_score(mine):
    """The child of a fork would reply, too, and every later score would be that of the task before."""
    texts = ["a", "fork", "bb", "fork", "ccc", "dddd"] * 3
    with load_rewards((f"{mine}:act",), 1, 30.0) as rewards:
        assert rewards[f"{mine}:act"](**rows(texts)) == [float(len(text)) for text in texts]


def test_a_reply_to_another_task_counts_for_none(mine):
    """A reward that writes the reply of task 0 into its worker's connection."""
    pool = WorkerPool([f"{mine}:act"], 1, 30.0)
    with pool._closed_on_error():
        values = pool.grade(f"{mine}:act", [rows([text]) for text in ("a", "bb", "forge", "ccc")])
    pool.close()
    assert values == [[1.0], [2.0], [5.0], [3.0]]


def test_replies_are_never_unpickled(mine, tmp_path):
    """A pickle in the connection that would make a file: the worker counts as crashed."""
    pool = WorkerPool([f"{mine}:act"], 1, 30.0)
    (worker,) = pool._workers
    worker.task, (ours, theirs) = 0, multiprocessing.Pipe()
    worker.connection.close()
    worker.connection = ours
    theirs.send(Evil(tmp_path / "made"))
    assert pool._receive(worker) is Crashed and not (tmp_path / "made").exists()
    pool.close()


class Evil:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("value", [None, 0.5, -1.0, Unparsed(0.0), TimedOut(0.25), Crashed(math.nan)])
def test_values_travel_as_json(value):
    again = from_json(json.loads(json.dumps(to_json(value))))
    assert type(again) is type(value) and (again == value or math.isnan(value))


def test_a_reward_that_never_answers_is_an_error(mine):
    started = time.monotonic()
    words = r"graded none of 4 tasks: 4 were stopped after reward_timeout 0.2 s"
    with load_rewards((f"{mine}:never",), 2, 0.2) as rewards, pytest.raises(RewardError, match=words):
        rewards[f"{mine}:never"](**rows(["x"] * 4))
    assert time.monotonic() - started < 30


def test_how_many_failures_are_too_many(mine, monkeypatch):
    """The first few tasks of a large batch where a reward never answered; as many in a row, over any number of steps,
    where it did: a step may be a single task.
    """
    monkeypatch.setattr(pool_module, "MAX_FAILURES", 4)
    with load_rewards((f"{mine}:never",), 2, 0.2) as rewards, pytest.raises(RewardError, match=r"none of [45] tasks"):
        rewards[f"{mine}:never"](**rows(["x"] * 64))
    with load_rewards((f"{mine}:act",), 1, 30.0) as rewards:
        reward = rewards[f"{mine}:act"]
        for texts in (["a"], ["exit"], ["exit", "exit"], ["b"], ["exit"] * 3):
            assert reward(**rows(texts)) == pytest.approx([math.nan if t == "exit" else 1 for t in texts], nan_ok=True)
        with pytest.raises(RewardError, match=r"none of 4 tasks: 0 were stopped .* in 4 the process died"):
            reward(**rows(["exit"]))


def test_a_file_is_called_with_the_completions_of_one_prompt(mine):
    """A reward may therefore compare within the group, with workers and without."""
    texts, prompts = ["a", "bb", "ccc", "d", "e", "ff"], ["p", "p", "p", "q", "q", "q"]
    same = ["p"] * 6  # two prompts of one text: their place in the batch tells them apart
    for workers in (0, 2):
        with load_rewards((f"{mine}:longest_first",), workers, 30.0) as rewards:
            index = {"prompt_index": [0, 0, 0, 1, 1, 1]}
            assert rewards[f"{mine}:longest_first"](**rows(texts, same), **index) == [0, 0, 1, 0, 0, 1]
            assert rewards[f"{mine}:longest_first"](**rows(texts, prompts)) == [0, 0, 1, 0, 0, 1]


def test_workers_are_replaced_after_a_number_of_tasks(mine):
    pool = WorkerPool([f"{mine}:pid"], 1, 30.0, recycle=3)
    values = [value for (value,) in pool.grade(f"{mine}:pid", [rows(["x"])] * 8)]
    pool.close()
    assert [values.count(pid) for pid in dict.fromkeys(values)] == [3, 3, 2]


def test_a_worker_that_died_unnoticed_costs_no_item(mine):
    pool = WorkerPool([f"{mine}:pid"], 1, 30.0)
    (worker,) = pool._workers
    worker.process.kill()
    worker.process.wait()
    ((value,),) = pool.grade(f"{mine}:pid", [rows(["x"])])
    pool.close()
    assert value != worker.process.pid and value > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_of_this_name", "failed to load"),
        ("import os; os._exit(7)", "ended with 7 while loading"),
        ("", "no function 'f'"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_an_error_before_the_first_step(tmp_path, text, words):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(RewardError, match=words):
        load_rewards((f"{path}:f",), 2, 30.0)


def test_workers_import_no_jax_and_hear_no_stop_signal(mine):
    with load_rewards((f"{mine}:light",), 1, 30.0) as rewards:
        (worker,) = rewards.pool._workers
        assert os.getpgid(worker.process.pid) != os.getpgid(0)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # as a batch system sends it to every process
            worker.process.send_signal(number)
        assert rewards[f"{mine}:light"](**rows(["x"])) == [0.0] and worker.process.poll() is None


def test_no_worker_outlives_the_context(mine):
    with load_rewards((f"{mine}:act",), 2, 30.0) as rewards:
        processes = [worker.process for worker in rewards.pool._workers]
    assert all(process.poll() == -signal.SIGKILL for process in processes)


TRAINER = """
import sys
from qerl_jax.rewards.pool import WorkerPool
pool = WorkerPool([sys.argv[1]], 2, 1000.0)
print(*[worker.process.pid for worker in pool._workers], flush=True)
text = sys.argv[2]
pool.grade(sys.argv[1], [{"prompts": [""], "completions": [text], "answer": [""]}])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the parent's death signal is Linux's")
@pytest.mark.parametrize("text", ["spin", "hang"])
def test_no_worker_outlives_a_killed_trainer(mine, text):
    """SIGKILL while one worker is busy forever and one is idle."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, f"{mine}:act", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
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
