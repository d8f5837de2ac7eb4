"""The figures of an evaluation over completions written here, and the description people read."""

import array
import dataclasses
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax import keys
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import EncodedProblem
from qerl_jax.evaluation import Evaluation, evaluate, harness
from qerl_jax.evaluation.grading import CORRECT, NO_GOLD, WRONG
from qerl_jax.evaluation.statistics import Estimate
from qerl_jax.evaluation.summary import Item, summarize
from qerl_jax.models.lora import LoraConfig
from qerl_jax.reporting.metrics import read_evaluations, write_evaluations
from qerl_jax.rewards.outcomes import Crashed, TimedOut, Unparsed
from qerl_jax.types import Engine, FinishReason, Policy, Rollout, Sampling


def test_results_survive_the_process(tmp_path):
    estimates = {"pass@1": Estimate(0.5, 0.4, 0.6)}
    result = Evaluation(0.5, 0.4, 0.6, 0.9, 1.0, 0.0, 12.5, 200, 1, ungraded=(3, 4), estimates=estimates)
    write_evaluations(tmp_path, {"before": result})
    assert read_evaluations(tmp_path) == {"before": result}
    assert hash(result) == hash(dataclasses.replace(result, estimates={}))


def test_every_figure_has_its_place_in_the_table_and_the_curves():
    """No two are equal. Curves have no vote of one completion, nor one where no answers are extracted."""
    result = Evaluation(
        0.125, 0.0625, 0.25, 0.5, 0.75, 0.3125, 12.25, 200, 4, failed=5, maj_at_k=0.375, ties=6, unreadable=0.4375,
        ungradable=7, ungraded=(8, 9), sampling_error=0.015,
        estimates={"avg@4": Estimate(0.125, 0.0625, 0.25), "maj@4": Estimate(0.375, 0.0, 1.0)},
    )  # fmt: skip
    assert result.table() == [
        "200 problems, 4 completions of each; intervals: over problems",
        "avg@4 12.5 % (95 % interval 6.2–25.0)",
        "maj@4 37.5 % (95 % interval 0.0–100.0)",
        "avg@4 with other samples on the same problems: standard error 1.5 points",
        "format 75.0 %, truncated 31.2 %, no answer 43.8 %, mean length 12.2 tokens",
        "6 votes were ties: the answer given first counts",
        "5 completions whose largest logit was not finite count as wrong",
        "7 completions whose grading met reward_timeout or crashed count as wrong",
        "2 problems are left out: their gold answers cannot be read (ids 8, 9)",
    ]
    assert result.describe() == (
        "avg@4 12.5 % (95 % interval 6.2–25.0, 200 problems, 5 completions whose largest logit was not finite, "
        "2 more have an unreadable gold answer)"
    )
    curves = {"accuracy": 0.125, "pass_at_k": 0.5, "format": 0.75, "truncated": 0.3125, "mean_length": 12.25}
    curves = {f"eval/{name}": value for name, value in curves.items()}
    assert result.metrics() == curves | {"eval/maj_at_k": 0.375}
    once = dataclasses.replace(result, generations=1)
    assert once.metrics() == dataclasses.replace(result, maj_at_k=None).metrics() == curves
    sound = dataclasses.replace(once, failed=0, ties=0, ungradable=0, ungraded=(), sampling_error=None, estimates={})
    assert sound.table() == ["200 problems, 1 completion of each; intervals: over problems", result.table()[4]]
    assert sound.describe() == "pass@1 12.5 % (95 % interval 6.2–25.0, 200 problems)"


SAMPLING = Sampling(9, num_generations=3)
RIGHT = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0]])  # four problems, three completions each


@pytest.fixture
def written():
    """`evaluate` of a policy whose rollout is written here: completion g of problem p gives p's answer where `RIGHT`,
    else that of the next problem. The second one of the last problem is cut off, its last one failed.
    """
    tokenizer = load_tokenizer(model_path("tiny"))
    model = types.SimpleNamespace(pad_token_id=0)
    policy = Policy(None, None, None, model, LoraConfig(), tokenizer=tokenizer)
    calls = []

    def generate(policy, prompts, sampling, key, engine):
        rows = []
        for p, right in enumerate(RIGHT):
            for g, own in enumerate(right):
                answer = 10 + (p if own else (p + 1) % len(RIGHT))
                text = f"<think>{g}</think><answer>{answer}</answer>" if p else f"<answer>{answer}</answer>"
                start = np.asarray(prompts.tokens)[p, : int(prompts.lengths[p])]
                rows.append((p, [*start, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]))
        width = max(len(row) for _, row in rows)
        tokens = np.array([[*row, *[0] * (width - len(row))] for _, row in rows], np.int32)
        index = jnp.asarray([p for p, _ in rows], jnp.int32)
        finish = [FinishReason.EOS] * 10 + [FinishReason.LENGTH, FinishReason.FAILED]
        lengths = jnp.asarray([len(row) for _, row in rows], jnp.int32)
        logprobs = jnp.zeros(tokens.shape, jnp.float32)
        calls.append((prompts, sampling, key, engine, lengths - prompts.lengths[index]))
        finish = jnp.asarray(finish, jnp.int8)
        starts = jnp.asarray(prompts.lengths[index])
        return Rollout(jnp.asarray(tokens), logprobs, starts, lengths, finish, index)

    return functools.partial(evaluate, policy, sample=generate), calls


def test_several_completions_a_problem(written):
    """Each with its own problem's answer; pass@3 is the share of problems solved at least once, not the mean."""
    evaluated, calls = written
    problems = [Problem(7 + i, f"What is {i}?", str(10 + i)) for i in range(4)]
    result = evaluated(problems, Sampling(9, num_generations=3), seed=5, engine=Engine(slots=2))
    [(prompts, sampling, key, engine, lengths)] = calls
    assert (sampling, engine) == (Sampling(9, num_generations=3), Engine(slots=2))
    assert prompts.ids.tolist() == [7, 8, 9, 10]
    expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), 3), 0)  # purpose 3: EVALUATE
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(expected)) and keys.Purpose.EVALUATE == 3
    assert (result.problems, result.generations, result.failed) == (4, 3, 1)
    assert result.accuracy == pytest.approx(5 / 12) and result.pass_at_k == 3 / 4
    resamples = [np.mean(values) for values in itertools.product([1 / 3, 0, 1, 1 / 3], repeat=4)]
    assert (result.low, result.high) == pytest.approx(np.quantile(resamples, (0.025, 0.975)))
    assert result.format == 9 / 12 and result.truncated == pytest.approx(1 / 12)
    assert result.mean_length == pytest.approx(np.mean(lengths))
    assert result.describe().startswith("avg@3 41.7 %")
    # Votes: problem 0 has 10, 11, 11, problem 1 has 12 three times, problem 2 its own 12 three times, problem 3 has 10
    # and 13 (its last one failed): one of four is right, one is a tie that the first answer wins.
    assert (result.maj_at_k, result.ties, result.unreadable) == (1 / 4, 1, 0.0)
    assert {name: estimate.value for name, estimate in result.estimates.items()} == {
        "avg@3": pytest.approx(5 / 12),
        "pass@2": pytest.approx((2 / 3 + 0 + 1 + 2 / 3) / 4),  # 1 of 3 right: two of the three pairs hold it
        "pass@3": 3 / 4,
        "maj@3": 1 / 4,
    }
    assert result.metrics()["eval/maj_at_k"] == 1 / 4
    assert result.sampling_error == pytest.approx(np.sqrt((1 / 3 + 0 + 0 + 1 / 3) / 3) / 4)  # 0.118
    with pytest.raises(ValueError, match="no problems to evaluate"):
        evaluated([], Sampling(9))


def test_plain_problems_are_encoded_as_the_arguments_say(written):
    evaluated, calls = written
    problems = [Problem(i, f"What is {i}?", str(10 + i)) for i in range(4)]
    longer = Problem(9, "word " * 150, "1")
    evaluated([longer, *problems], SAMPLING, system_prompt="Be brief.", max_prompt_length=150)
    [(prompts, *_)] = calls
    assert prompts.ids.tolist() == [0, 1, 2, 3]
    tokenizer = load_tokenizer(model_path("tiny"))
    for i, (tokens, length) in enumerate(zip(prompts.tokens.tolist(), prompts.lengths.tolist(), strict=True)):
        text = tokenizer.decode(tokens[:length])
        assert "Be brief." in text and f"What is {i}?" in text


def test_what_counts_as_correct_is_a_reward_above_zero(written):
    """None and 0 are wrong, any share of 1 is right; the reward sees each problem's own prompt and answer."""
    evaluated, _ = written
    problems = [Problem(i, f"What is {i}?", str(10 + i)) for i in range(4)]
    seen = []

    def reward(*, prompts, answer, prompt_index, **_):
        seen.extend(zip(prompts, answer, prompt_index, strict=True))
        return [None, 0.2, 0.0] * 4

    result = evaluated(problems, Sampling(9, num_generations=3), reward=reward)
    assert (result.accuracy, result.pass_at_k) == (pytest.approx(1 / 3), 1.0)
    assert seen == [(f"What is {p}?", str(10 + p), p) for p in range(4) for _ in range(3)]


def test_a_gold_answer_that_cannot_be_read_counts_in_no_figure(written):
    """Problem 2, the only one with three correct completions: left out and listed, not wrong."""
    evaluated, _ = written
    problems = [Problem(7 + i, f"What is {i}?", "" if i == 2 else str(10 + i)) for i in range(4)]
    result = evaluated(problems, Sampling(9, num_generations=3))
    assert (result.ungraded, result.problems) == ((9,), 3)
    assert result.accuracy == pytest.approx(2 / 9) and result.pass_at_k == pytest.approx(2 / 3)
    assert "1 problems are left out: their gold answers cannot be read (ids 9)" in result.table()
    assert "1 more have an unreadable gold answer" in result.describe()
    read = Item(3, "?", "1", ["1", "2"], ["1", "2"], [CORRECT, WRONG], [5, 6], ["eos", "length"], 0, False)
    form = "<think></think><answer>1</answer>"
    unread = Item(9, "?", "", [form, form], ["1", "1"], [NO_GOLD] * 2, [70, 80], ["length", "failed"], 0, True)
    assert summarize([unread, read]) == dataclasses.replace(summarize([read]), ungraded=(9,))
    with pytest.raises(ValueError, match="none of 4 gold answers can be read; the first is ''"):
        evaluated([Problem(i, "What?", "") for i in range(4)], Sampling(9, num_generations=3))


def test_a_completion_whose_logits_were_not_finite_is_wrong_whatever_it_says(written):
    """The last of the twelve, which its reward would pay for; nor does it vote: 10 and 13 are left, a tie."""
    evaluated, _ = written
    problems = [Problem(i, f"What is {i}?", str(10 + i)) for i in range(4)]
    grader = dataclasses.replace(harness.ANSWER, reward=lambda completions, **_: [1.0] * len(completions))
    result = evaluated(problems, SAMPLING, reward=grader)
    assert result.accuracy == pytest.approx(11 / 12)
    result = evaluated(problems, SAMPLING)
    assert (result.ties, result.failed) == (1, 1)


def test_grading_that_failed_is_counted(written):
    evaluated, _ = written
    values = [1.0, TimedOut(math.nan), Crashed(math.nan), Unparsed(0.0), 0.0, TimedOut(0.5)] * 2
    problems = [Problem(i, f"What is {i}?", "1") for i in range(4)]
    result = evaluated(problems, Sampling(9, num_generations=3), reward=lambda **_: values)
    # A program that met the limit keeps its share of the tests; the last completion of all is one that failed.
    assert result.accuracy == pytest.approx(3 / 12)
    assert (result.ungradable, result.unreadable, result.maj_at_k) == (4, pytest.approx(2 / 12), None)
    assert set(result.estimates) == {"avg@3", "pass@2", "pass@3"}  # nobody voted


def test_parts_of_an_evaluation_have_the_width_of_its_longest_prompt_wherever_it_begins():
    """So that one which goes on samples what it would have sampled."""
    problems = [EncodedProblem(Problem(i, "?", "1"), array.array("i", [5] * n)) for i, n in enumerate((9, 2, 3, 4))]
    seen = []

    def complete(prompts, key):
        seen.append((prompts.tokens.shape, prompts.ids.tolist(), jax.random.key_data(key).tolist()))
        raise InterruptedError

    for start in (0, 2):
        with pytest.raises(InterruptedError):
            next(harness.sampled_items(complete, None, problems, harness.ANSWER, at_once=2, start=start))
    (shape, ids, key), (later_shape, later_ids, later_key) = seen
    assert shape == later_shape == (2, 9) and key == later_key and (ids, later_ids) == ([0, 1], [2, 3])
