"""Who reads which split: training the `train` files and the bundled training problems, the evaluation the `test`
files, by the files themselves.
"""

import dataclasses
import json
from concurrent.futures import Future

import pytest
import runs
from rich.console import Console

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.config import Config
from qerl_jax.data.files import DataError
from qerl_jax.data.presets import PROMPT_FORMATS
from qerl_jax.data.problems import load_dataset
from qerl_jax.run import prepare
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.prepare import load, load_problems


def read(items) -> list[tuple[int, str, str]]:
    return [(item.problem.id, item.problem.prompt, item.problem.answer) for item in items]


def rows(split: str) -> list[tuple[str, str]]:
    return [(f"What is {i} + {i} ({split})?", str(2 * i)) for i in range(5)]


def of_package(split: str, count: int) -> list[tuple[str, str]]:
    return [(one.prompt, one.answer) for one in load_dataset("arithmetic", split, limit=count).problems]


@pytest.mark.parametrize("is_bundled", [False, True])
def test_training_and_evaluation_read_their_own_splits(tmp_path, is_bundled):
    """Two sets, ids one after the other, those of records that are left out among them, in the shares and by the seed
    of the config; the evaluation of as many problems as were asked for."""
    for split in ("train", "test"):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows(split)]
        lines.append(json.dumps({"question": "What is nothing?", "answer": None}))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    evaluated = "arithmetic" if is_bundled else str(tmp_path)
    config = Config(model="tiny", dataset=(str(tmp_path), "arithmetic"), eval_dataset=evaluated, eval_samples=3)
    config = dataclasses.replace(config, dataset_weights=(3, 1), seed=7).with_max_prompt_length(4096)
    stream, evaluation = load_problems(config, load_tokenizer(model_path("tiny")), Console(quiet=True))
    assert (stream.weights, stream.seed, stream.shuffled, stream.key) == ((3, 1), 7, True, None)
    files, bundled = (
        [(one.problem.id, one.problem.prompt, one.problem.answer) for one in part] for part in stream.sets
    )
    assert files == [(i, question, answer) for i, (question, answer) in enumerate(rows("train"))]
    assert bundled[:20] == [(6 + i, *row) for i, row in enumerate(of_package("train", 20))]
    wanted = of_package("test", 3) if is_bundled else rows("test")[:3]
    assert read(evaluation) == [(i, *row) for i, row in enumerate(wanted)]


def test_each_dataset_must_have_its_own_split(tmp_path):
    """Before anything is loaded."""
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / f"{split}.jsonl").touch()

    def check(trained_on: str, evaluated: str) -> None:
        places = {"dataset": str(tmp_path / trained_on), "eval_dataset": str(tmp_path / evaluated)}
        prepare.check(
            with_rewards(Config("tiny", max_completion_length=16, output_dir=str(tmp_path / "run"), **places))
        )

    check("train", "test")
    for wrong in ("train", "test"):
        with pytest.raises(DataError, match="has no file of the split '" + ("test" if wrong == "train" else "train")):
            check(wrong, wrong)


def test_an_evaluation_needs_answers_and_training_does_not(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "Why?"}\n')
    rest = {"answer_column": "", "reward_funcs": "strict_format", "max_prompt_length": 512}
    config = Config("tiny", dataset=str(tmp_path / "rows.jsonl"), **rest)
    tokenizer = load_tokenizer(model_path("tiny"))
    assert len(load_problems(config, tokenizer, Console(quiet=True))[0].sets[0]) == 1
    with pytest.raises(DataError, match=r"rows\.jsonl' has no answers to evaluate by"):
        asked = dataclasses.replace(config, eval_dataset=str(tmp_path / "rows.jsonl"))
        load_problems(asked, tokenizer, Console(quiet=True))


def test_the_prompt_format_of_a_config_reaches_training_and_evaluation():
    given = {"dataset": str(runs.PROBLEMS), "eval_dataset": "arithmetic", "eval_samples": 1, "max_prompt_length": 512}
    config, asked = Config("tiny", prompt_format="think_answer", **given), PROMPT_FORMATS["think_answer"]
    tokenizer = load_tokenizer(model_path("tiny"))
    stream, evaluation = load_problems(config, tokenizer, Console(quiet=True))
    for item in stream.sets[0][0], evaluation[0]:
        assert tokenizer.decode(list(item.tokens)).startswith(
            f"<|im_start|>system\n{asked}<|im_end|>\n<|im_start|>user"
        )


def test_settings_of_a_prompts_length_reach_training_and_evaluation():
    tokenizer, settings = load_tokenizer(model_path("tiny")), {"eval_dataset": "arithmetic", "eval_samples": 2}
    settings |= {"dataset": str(runs.PROBLEMS), "max_prompt_length": 9}
    config = Config(model="tiny", overlong_prompts="truncate_left", **settings)
    stream, evaluation = load_problems(config, tokenizer, Console(quiet=True))
    for item in stream.sets[0][0], evaluation[0]:
        assert len(item.tokens) == 9 and tokenizer.decode(list(item.tokens)).endswith("<|im_start|>assistant\n")
    with pytest.raises(DataError, match="all 1000 prompts are longer than max_prompt_length 9"):
        load_problems(Config(model="tiny", **settings | {"eval_samples": 1000}), tokenizer, Console(quiet=True))


def test_a_dataset_that_is_read_meanwhile_and_refused_ends_the_loading():
    read, refused = Future(), Future()
    read.set_result(None)
    refused.set_exception(DataError("no such column"))
    with pytest.raises(DataError, match="no such column"):
        load(Config(model="tiny", lora_rank=2, dataset="arithmetic"), tokenizer=read, problems=refused)
