"""Rewards of the user's in a training run: every kind of failure, and TRL's way to give them."""

import array
import dataclasses
import datetime
import math
import multiprocessing
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest
import runs
from rich.console import Console

from qerl_jax import train
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.safetensors import read_json
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.config import Config, ConfigError, dump, to_mapping
from qerl_jax.data.files import DataError
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import EncodedProblem, encode_problems
from qerl_jax.data.stream import ProblemStream
from qerl_jax.messages import Given
from qerl_jax.parallel import ALONE
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.rewards.load import Rewards
from qerl_jax.run import prepare
from qerl_jax.run.choose_rewards import correctness_reward, verdict_reward
from qerl_jax.run.hooks import Hooks, with_objects
from qerl_jax.run.sample import sample_lines, try_rewards

pytestmark = pytest.mark.usefixtures("nothing_drawn")

# Counts its calls in a folder, whatever worker it runs in. The first one is the trial before the run, with a whole
# group; a step makes two, one for each prompt.
REWARD = """
import os, pathlib, time

def flaky(prompts, completions, answer, **columns):
    assert len(set(prompts)) == 1 and len(completions) == 4
    number = 0
    while True:
        try:
            os.close(os.open(pathlib.Path(__file__).parent / f"call{number}", os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            number += 1
    if number == 3:
        time.sleep(1000)
    if number == 5:
        time.sleep(0.5)  # until pebble knows who has the task: of one who dies before, it is graded anew
        os._exit(1)
    if number >= 7:
        raise ValueError("no more")
    return [float(length) for length in columns["completion_lengths"]]
"""


def short(place: Path, **changes: object) -> Config:
    """A run into `run` with few programs."""
    few = {"num_iterations": 1, "beta": 0.0, "train_norms": False, "dynamic_sampling": False}
    return runs.config(place / "run", **runs.on_small(place) | few | changes)


def test_a_run_outlives_a_reward_that_hangs_and_dies_and_ends_well_when_it_raises(tmp_path, capfd):
    """Step 1 is graded, in step 2 one group hangs, in step 3 one worker dies, in step 4 the reward raises: three steps
    of metrics, exit code 2 with the reason, and the checkpoints from before.
    """
    (tmp_path / "mine.py").write_text(REWARD)
    name = f"{tmp_path}/mine.py:flaky"
    config = short(
        tmp_path, reward_funcs=(name, "overlong"), reward_weights=(1.0, 1.0), reward_workers=2, reward_timeout=1.5
    )
    file = tmp_path / "config.yaml"
    file.write_text(dump(config))
    code, said = train.main(["--config", str(file)]), capfd.readouterr()
    text = " ".join((said.out + said.err).split())
    assert code == 2 and f"error: reward '{name}' raised ValueError('no more')" in text
    assert text.count("met the time limit (reward_timeout)") == 1 and "4 of 8 completions met" in text
    rows = read_metrics(tmp_path / "run")
    assert [row[f"rewards/{name}/timeout_rate"] for row in rows] == [0, 0.5, 0]
    assert [row[f"rewards/{name}/crash_rate"] for row in rows] == [0, 0, 0.5]
    assert [row[f"rewards/{name}/parse_failure_rate"] for row in rows] == [0, 0, 0]
    assert all(math.isfinite(row["loss"]) and row["skipped"] == 0 for row in rows)
    table = pyarrow.parquet.read_table(tmp_path / "run" / "completions" / "step_000002.parquet").to_pydict()
    assert [math.isnan(value) for value in table["reward"]] == [late == 1 for late in table[f"rewards/{name}/timeout"]]
    for total, length, late in zip(table["reward"], table["length"], table[f"rewards/{name}/timeout"], strict=True):
        # max_completion_length 24, its fifth 4 tokens: the penalty begins after 20
        assert late or total == pytest.approx(length - max(length - 20, 0) / 4)
    assert {p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()} == {"2", "3"}
    (tmp_path / "mine.py").write_text(REWARD.replace(">= 7", ">= 99"))
    assert train.main(["--config", str(file), "--resume", "auto"]) == 2 and multiprocessing.active_children() == []
    assert f"reward {name} is not what it was" in capfd.readouterr().err


def test_a_trl_users_functions_and_records(tmp_path, capsys):
    """A run as TRL's trainer takes it: a function of messages and a coroutine function beside a name, and records in a
    `datasets.Dataset`. The function gets what TRL would pass; with another one, or other records, nothing is resumed.
    """
    seen = []

    def longer(prompts, completions, solution, answer, **_):
        assert answer == [3 + solution[0][0]] * 4  # a number as in the records, a text to the reward "answer"
        seen.append((prompts, completions, solution))
        return [float(len(completion[0]["content"])) for completion in completions]

    async def half(completions, **_):
        return [0.5] * len(completions)

    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    questions = [[*talk, {"role": "user", "content": f"Tom has {n} apples. How many?"}] for n in (3, 4, 5, 6)]
    records = datasets.Dataset.from_dict(
        {"prompt": questions, "answer": [3, 4, 5, 6], "solution": [[n] for n in range(4)], "unused": list("abcd")}
    )
    config = short(
        tmp_path, prompt_column="prompt", reward_columns=("solution", "answer"), max_steps=1, sigma_start=0.0,
        sigma_end=0.0, reward_funcs=None, reward_weights=(2.0, 1.0, 4.0),
    )  # fmt: skip
    given = {"reward_funcs": [longer, half, "answer"], "train_dataset": records}
    given["problems"] = lambda step: [3 - step, 1]
    state = train.train(config, **given)
    table = pyarrow.parquet.read_table(tmp_path / "run" / "completions" / "step_000001.parquet").to_pydict()
    tried, *step = seen
    assert len(tried[1]) == 4 and len(step) == 2  # before anything was compiled; one call a group
    texts = [message["content"] for _, completions, _ in step for (message,) in completions]
    assert texts == table["completion"] and {len(message) for _, c, _ in step for (message,) in c} == {2}
    assert [solutions[0] for _, _, solutions in step] == [[3], [1]]  # as `problems` says
    for prompts, completions, solutions in step:
        (number,) = {solution[0] for solution in solutions}
        assert prompts == [questions[number]] * 4 and {m["role"] for (m,) in completions} == {"assistant"}
    for i, text in enumerate(texts):
        assert table["rewards/longer"][i] == len(text) and table["rewards/half"][i] == 0.5
        assert table["reward"][i] == 2 * len(text) + 0.5 + 4 * table["rewards/answer"][i]
    manifest = read_json(tmp_path / "run/checkpoints/1/manifest.json")
    assert datetime.date.fromisoformat(manifest["inputs"]["date in prompts"]) <= datetime.date.today()
    text = (tmp_path / "run/config.yaml").read_text()
    assert "- train_dataset" in text and "- longer" in text
    report = (tmp_path / "run/report.md").read_text()
    assert "- reward_funcs was given to `train`: `longer, half`." in report

    def other(completions, **_):
        return [1.0] * len(completions)

    other.__name__ = "longer"
    again = dataclasses.replace(config, resume="auto")
    for changes, words in (
        ({"reward_funcs": [other, half, "answer"]}, "reward longer is not what it was"),
        ({"problems": lambda step: [0, 2]}, "hook problems is not what it was"),
        ({"train_dataset": list(records)[::-1]}, "dataset train_dataset is not what it was"),
    ):
        with pytest.raises(ConfigError, match=words):
            train.train(again, **(given | changes))
    words = "was begun by train.* in Python with train_dataset, eval_dataset, longer, half: call it again with the same"
    again = ["--config", str(tmp_path / "run/config.yaml"), "--eval-dataset", "eval_dataset"]
    for more in ["--resume", "auto"], ["--dry-run"]:
        with pytest.raises(ConfigError, match=words):
            train.parse([*again, *more])
    assert int(state.step) == 1


def test_accuracy_is_counted_by_a_verdict_of_the_largest_weight_the_first_among_equals():
    assert verdict_reward({"mine.py:f": 3.0, "code": 1.0, "answer": 2.0, "dapo": 2.0, "overlong": 4.0}) == "answer"
    assert verdict_reward({"mine.py:f": 3.0, "code": 1.0}) == "code"
    assert verdict_reward({"soft_format": 0.2, "strict_format": 1.0, "overlong": 1.0, "mine.py:answer": 2.0}) is None


def test_rewards_are_tried_on_a_group_of_the_first_training_problem(tmp_path):
    for split, number in ("train", 2), ("test", 9):
        (tmp_path / f"{split}.jsonl").write_text(f'{{"question": "1 + {number - 1}?", "answer": "{number}"}}\n')
    seen = []

    def spy(**columns):
        seen.append(columns)
        return [0.0] * len(columns["completions"])

    config = Config("tiny", dataset=str(tmp_path), reward_funcs="spy", reward_weights=1.0, num_generations=4)
    try_rewards(config, Rewards(spy=spy), download=False)
    [columns] = seen
    assert (columns["prompts"], columns["answer"], columns["prompt_index"]) == (["1 + 1?"] * 4, ["2"] * 4, [0] * 4)
    right, wrong = "So it is \\boxed{2}.", "So it is \\boxed{3}."
    assert columns["completions"] == [right, wrong, "I do not know.", right]
    sets = ("gsm8k", str(tmp_path))  # the first, which nobody downloads, does not end the trials
    hinted = dataclasses.replace(config, dataset=sets, reward_columns=("hint",))
    with pytest.raises(DataError, match="has no column 'hint'"):
        try_rewards(hinted, Rewards(spy=spy), download=False)
    ordered = dataclasses.replace(config, data_order="level")  # whose column rewards get, too
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "2", "level": 5}\n')
    try_rewards(ordered, Rewards(spy=spy), download=False)
    assert seen.pop()["level"] == [5] * 4
    # A dry run shows all three, in groups of two.
    config = dataclasses.replace(config, num_generations=2, reward_weights=(1.0,))
    tokenizer = load_tokenizer(model_path("tiny"))
    items, _ = encode_problems([Problem(0, "1 + 1?", "2")], tokenizer, "", 64)
    config = dataclasses.replace(config, reward_funcs=("spy", "other"), reward_weights=(2.0, 0.5))
    paying = {"spy": lambda **named: spy(**named) and [1.0, 0.5, 0.25, 9.0], "other": lambda **_: [8.0, 2.0, 6.0, 9.0]}
    assert list(sample_lines(config, Rewards(**paying), tokenizer, items)) == [
        "The first prompt:",
        tokenizer.decode(list(items[0].tokens)),
        "The reward is 2 × spy, 0.5 × other. It pays, where the answer is '2':",
        "  6 for a right answer, '<think>…</think><answer>2</answer>' (spy 1, other 8)",
        "  2 for a wrong answer, '<think>…</think><answer>3</answer>' (spy 0.5, other 2)",
        "  3.5 for an unreadable answer, 'I do not know.' (spy 0.25, other 6)",
    ]
    assert seen[1]["prompt_index"] == [0, 0, 1, 1] and seen[1]["answer"] == ["2"] * 4
    limits = {"completion_lengths": 16, "max_completion_length": 1024, "overlong_buffer": 204, "reward_timeout": 20}
    assert {name: seen[1][name] for name in limits} == {name: [limit] * 4 for name, limit in limits.items()}
    same = {"spy": lambda **_: [1.0, 1.0, 0.0, 9.0], "other": lambda **_: [None] * 4}
    assert list(sample_lines(config, Rewards(**same), tokenizer, items))[-1] == (
        "reward_funcs: spy, other gave the right and the wrong answer the same: check the type of what is compared, "
        "and the form that is read"
    )
    assert list(sample_lines(config, Rewards(**dict.fromkeys(paying, same["other"])), tokenizer, items))[-2:] == [
        "  None for an unreadable answer, 'I do not know.' (spy None, other None)",
        "No reward pays a number for any of them: completions without one train nothing.",
    ]
    one_pays = {"spy": lambda **_: [None, 1.0, None, 9.0], "other": lambda **_: [None] * 4}
    assert list(sample_lines(config, Rewards(**one_pays), tokenizer, items))[-1].startswith("  None for an unreadable")
    programs = dataclasses.replace(config, reward_funcs=("code",), reward_weights=(1.0,))
    assert list(sample_lines(programs, Rewards(code=lambda **_: [0.0, 0.0]), tokenizer, items))[3:] == [
        "  0 for an unreadable answer, 'I do not know.' (code 0)"
    ]
    without_answer, _ = encode_problems([Problem(0, "1 + 1?", "")], tokenizer, "", 64)
    one = dict.fromkeys(paying, lambda **_: [1.0, 0.0])
    assert list(sample_lines(config, Rewards(**one), tokenizer, without_answer))[2:] == [
        "The reward is 2 × spy, 0.5 × other. It pays:",
        "  2.5 for an unreadable answer, 'I do not know.' (spy 1, other 1)",
        "No answer is known (answer_column), so that what a right one is paid is not shown.",
    ]
    hub = dataclasses.replace(
        config, dataset=("gsm8k",), overlong_prompts="drop"
    )  # of a made-up prompt the end is shown
    whole, end = (
        list(sample_lines(dataclasses.replace(hub, max_prompt_length=most), Rewards(**paying), tokenizer, []))[1]
        for most in (400, 9)
    )
    assert whole.endswith(end) and "a problem of gsm8k" in whole and len(end) < len(whole)


def test_objects_that_are_no_rewards_and_no_records(tmp_path):
    config = Config("tiny", output_dir=str(tmp_path / "run"))
    for given, words in (
        ({"reward_funcs": [max, max]}, "reward_funcs names 'max' twice"),
        (
            {"train_dataset": iter([])},
            "train_dataset is a list_iterator, which is read only once: give a datasets.Dataset",
        ),
        ({"train_dataset": ""}, "train_dataset is a str: give .*, or a dataset by its name, is Config's dataset"),
        ({"eval_dataset": {}}, r"eval_dataset is a dict: give a datasets.Dataset \(one split\) or a list of dicts;"),
    ):
        with pytest.raises(ConfigError, match=words):
            train.train(config, **given)

    def answer(**_):
        return []

    for changes, does in (
        ({"dynamic_sampling": True}, "dynamic_sampling True draws others"),
        ({"data_order": "level"}, "data_order 'level' orders them"),
    ):
        with pytest.raises(ConfigError, match=f"{does}: give one"):
            train.train(dataclasses.replace(config, **changes), problems=lambda step: [0])
    local = dataclasses.replace(config, dataset="arithmetic", batch_size=16, max_completion_length=16)
    for given, words in (
        (lambda step: [0], r"problems\(0\) returned 1 ids, expected the 2 of a rollout"),
        (lambda step: "ab", r"problems\(0\) returned 'ab', expected 2 ids, the numbers of records, from 0"),
        (lambda step: [0, 9999], r"problems\(0\) returned 9999, but no problem, or an unusable one, has this id"),
        (lambda: [0, 1], r"problems is called as problems\(0\), with the step: too many positional arguments"),
    ):
        for dry_run in True, False:
            with pytest.raises(ConfigError, match=words):
                train.train(local, Console(quiet=True), problems=given, dry_run=dry_run)
    assert not (tmp_path / "run").exists()
    items = [EncodedProblem(Problem(number, "", ""), array.array("i")) for number in range(4)]
    stream = ProblemStream((items[:2], items[3:]), None, seed=0)
    assert Hooks(problems=lambda step: (3, step)).problems_at(1, stream, 2, ALONE) == [items[3], items[1]]
    for ids, words in (([1], r"returned 1 ids, expected the 2 of a rollout"), ([2, 0], "returned 2, but no problem")):
        with pytest.raises(ValueError, match=words):
            Hooks(problems=lambda step, ids=ids: ids).problems_at(0, stream, 2, ALONE)
    with pytest.raises(ConfigError, match="a function called 'answer', as a built-in reward is: rename it"):
        train.train(config, reward_funcs=[answer])
    held_out = [{"question": "p", "answer": "1"}]
    assert with_objects(config, min, None, None).reward_funcs == with_objects(config, [min], None, None).reward_funcs
    assert with_objects(config, "dapo", None, None).reward_funcs == ("dapo",)
    with pytest.raises(ConfigError, match="got <built-in function min>: give functions to train"):
        Config(reward_funcs=[min])
    evaluated = with_objects(dataclasses.replace(config, dataset="arithmetic"), None, None, held_out)
    evaluated = evaluated.with_max_prompt_length(4096)
    _, problems = prepare.load_problems(evaluated, load_tokenizer(model_path("tiny")), Console())
    assert [item.problem.prompt for item in problems] == ["p"] and correctness_reward(
        evaluated.eval_dataset
    ) == "answer"
    assert to_mapping(Config("m", dataset=Given("mine", []))) == to_mapping(Config("m", dataset="mine"))
    assert type(to_mapping(Config("m", eval_dataset=Given("mine", [])))["eval_dataset"]) is str
