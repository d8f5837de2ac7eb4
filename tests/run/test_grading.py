"""Grading while the rollout is sampled: the result of grading afterwards, each task graded once."""

import array
import dataclasses
import pathlib
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers import assert_trees_equal
from rich.console import Console

from qerl_jax.config import Config
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import EncodedProblem
from qerl_jax.data.stream import ProblemStream
from qerl_jax.messages import Given
from qerl_jax.parallel import Replicas
from qerl_jax.rewards import functions, load
from qerl_jax.rewards.pool import WorkerPool
from qerl_jax.rollout.engine import Progress
from qerl_jax.run.choose_rewards import reward_rows
from qerl_jax.run.grading import Grading
from qerl_jax.run.prepare import Run
from qerl_jax.types import FinishReason, Policy, Rollout

EOS, THINK, STUCK, DYING = 2, 10, 77, 78
# Values depend on the others of the prompt. Every call leaves a file.
REWARD = """
import os, pathlib, tempfile, time

def ranked(prompts, completions, hint, prompt_index, **_):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    os.close(tempfile.mkstemp(prefix="call", dir=pathlib.Path(__file__).parent)[0])
    if "77" in texts[0]:
        time.sleep(1000)
    if "78" in texts[0]:
        os._exit(1)
    return [None if "9" in text else len(text) / len(max(texts, key=len)) + prompt_index[0] for text in texts]
"""


def test_columns_of_each_row_are_those_of_its_prompt():
    """Two prompts of different datasets, in any order of their completions."""
    extras = {"level": 3, "answer": 7}, {"level": 4, "hint": "b"}
    problems = [Problem(0, "3?", "c", extra=extras[0]), Problem(1, "4?", "d", extra=extras[1])]
    config = Config("tiny", max_completion_length=10, overlong_buffer=2, reward_timeout=5)
    rows, columns = reward_rows(config, problems, [1, 0, 0], ["x", "y", "z"], [7, 8, 9])
    assert rows == (["4?", "3?", "3?"], ["x", "y", "z"], ["d", "c", "c"])
    assert columns == {
        "level": [4, 3, 3], "hint": ["b", None, None], "prompt_index": [1, 0, 0], "completion_lengths": [7, 8, 9],
        "max_completion_length": [10] * 3, "overlong_buffer": [2] * 3, "reward_timeout": [5.0] * 3,
    }  # fmt: skip
    asked = dataclasses.replace(config, reward_columns=("answer",))  # not by data_order alone
    assert reward_rows(asked, problems, [1, 0], ["x", "y"], [7, 8])[1]["answer"] == [None, 7]
    assert reward_rows(dataclasses.replace(config, answer_column=""), problems, [0], ["x"], [1])[0][2] == []


@pytest.mark.parametrize("replicas", [pytest.param(Replicas(), marks=pytest.mark.nightly), Replicas(1, 2)])
def test_grading_beside_sampling_changes_nothing(tmp_path, monkeypatch, replicas):
    """A group whose grading hangs, one whose worker dies, a failed row, one without a token, messages, a column that
    one prompt lacks, a prompt that opens a block of thoughts, and a function that sees the whole batch. Rows end in
    another order, the last is left to the end; and then one of a group is cut afterwards, which is graded again. Each
    text is decoded once. A built-in reward is graded in workers, too.
    """
    problems = [
        EncodedProblem(Problem(n, f"{n}?", str(n), extra={"hint": n} if n != 3 else {}), array.array("i", [5, n]))
        for n in range(5 * replicas.count)
    ]
    talk = dataclasses.replace(problems[1].problem, messages=(("user", "1?"),))
    problems[1] = EncodedProblem(talk, problems[1].tokens)
    own = list(replicas.share(len(problems)))
    problems[own[3]] = EncodedProblem(problems[own[3]].problem, array.array("i", [5, THINK]))
    groups = [[[STUCK], [4]], [[DYING, EOS], []], [[6, 9, EOS], [8]], [[7, EOS], [7, EOS]], [[3, 3], [3, EOS]]]
    texts = ["77", "4", "78", "", "6 9", "8", "<think>7", "<think>7", "3 3", "3"]
    (tmp_path / "mine.py").write_text(REWARD)
    names = f"{tmp_path}/mine.py:ranked", "answer", "overlong"
    decoded, graded, taken, whole, grade = [], [], [], [], WorkerPool.grade

    def decode(ids):
        assert isinstance(ids, np.ndarray)
        decoded.append(tuple(ids))
        return " ".join("<think>" if i == THINK else str(i) for i in ids)

    def digits(completions, **_):
        graded.extend(completions)
        return [float("".join(filter(str.isdigit, text)) or 0) for text in completions]

    def noted(pool, name, tasks, begun):
        taken.append(len({future for _, future in begun.values()}))
        return grade(pool, name, tasks, begun)

    monkeypatch.setitem(functions.BUILT_IN, "answer", digits)
    monkeypatch.setattr(load, "IN_WORKERS", ("overlong",))
    monkeypatch.setattr(WorkerPool, "grade", noted)

    def batch(completions, **columns):
        whole.append((completions, columns))
        return [len(completions) + value for value in range(len(completions))]

    config = Config(
        "m", batch_size=2 * len(problems), num_generations=2, max_completion_length=4, overlong_buffer=3,
        reward_funcs=(*names, "batch"), reward_weights=(1.0, 2.0, 3.0, 4.0),
    )  # fmt: skip
    model, tokenizer = SimpleNamespace(eos_token_ids=(99, EOS)), SimpleNamespace(decode=decode)
    policy = Policy({}, {}, {}, model, None, tokenizer=tokenizer)
    rollout = rolled_out([problems[p] for p in own], own, groups)
    stream, found, rows = ProblemStream((problems,), None, 0), [], dict(enumerate(ids for g in groups for ids in g))
    ended = [{row: rows[row] for row in some} for some in ([9, 1, 6], [0, 8, 3, 2], [7, 5], [4])]
    with load.load_rewards(names, 2, 1.0) as rewards:
        rewards["batch"] = batch
        run = Run(config, pathlib.Path(), Console(), policy, rewards, stream, [], replicas=replicas)
        for chunks, again in ((), 0), (ended, 0), ([{9: [3, EOS], 8: [3, 3, 3]}], 1):
            before, grading, count = len(list(tmp_path.glob("call*"))), Grading(run, problems), 0
            decoded.clear(), graded.clear()
            for completions in chunks:
                count += len(completions)
                grading.begin(Progress(min(count + 3, 10), 10, 0, completions))  # three more, by their limits, as sent
            assert len(graded) == min(count, 9)
            found.append(grading.finish(rollout))
            assert len(list(tmp_path.glob("call*"))) - before == 5 + again and len(graded) == 10 + again
            assert len(decoded) == len(set(decoded))
    after, *others = found
    assert whole == whole[:1] * 3 and after.completions == texts
    assert taken == [0, 0, 4, 9, 0, 1]  # prompts and completions whose grading had begun
    for beside in others:
        assert after.completions == beside.completions
        assert_trees_equal((after.rewards, after.reward_parts), (beside.rewards, beside.reward_parts))
    parts = after.reward_parts
    assert parts[f"{names[0]}/timeout"].tolist() == [1.0] * 2 + [0.0] * 8
    assert parts[f"{names[0]}/crash"].tolist() == [0.0] * 2 + [1.0] * 2 + [0.0] * 6
    assert np.isnan(after.rewards[:6]).tolist() == [True] * 4 + [False, True] and np.isfinite(after.rewards[6:10]).all()


def rolled_out(problems: list[EncodedProblem], own: list[int], groups: list[list[list[int]]]) -> Rollout:
    """The completions of prompts, of which row 5 has failed."""
    prompts, rows = (
        [list(item.tokens) for item in problems for _ in range(2)],
        [ids for group in groups for ids in group],
    )
    tokens = np.array([(prompt + ids + [0] * 4)[:6] for prompt, ids in zip(prompts, rows, strict=True)], np.int32)
    finish = [FinishReason.EOS if ids[-1:] == [EOS] else FinishReason.LENGTH for ids in rows]
    finish[5] = FinishReason.FAILED
    lengths, index = np.array([2 + len(ids) for ids in rows], np.int32), np.repeat(np.array(own, np.int32), 2)
    arrays = tokens, tokens.astype(np.float32), np.full_like(lengths, 2), lengths, np.array(finish, np.int8), index
    return Rollout(*map(jax.device_put, arrays))


def test_only_what_cannot_hold_up_sampling_begins_and_only_the_next_call_takes_it(monkeypatch):
    """Without workers neither a built-in reward whose time has no bound, nor a function given as an object."""
    calls = []

    def noting(name):
        return lambda completions, **_: calls.append((name, *completions)) or [0.0] * len(completions)

    for name in ("answer", "overlong"):
        monkeypatch.setitem(functions.BUILT_IN, name, noting(name))
    monkeypatch.setattr(load, "IN_WORKERS", ("overlong",))
    first, other = (
        functions.as_rows(["p"], [text], ["a"], prompt_index=[0], completion_lengths=[1]) for text in ("first", "other")
    )
    with load.load_rewards(("answer", "overlong", Given("mine", noting("mine"))), 0, 1.0) as rewards:
        for whole in (True, False):
            rewards.begin(first, whole)
        assert calls == [("answer", "first")]
        for rows in (first, first):
            rewards["answer"](**rows)
        rewards.begin(first, False)
        for rows in (other, first):
            rewards["answer"](**rows)
    assert calls == [("answer", text) for text in ("first", "first", "first", "other", "first")]
