"""Who reads which split: training the `train` files and the generator's training problems, the evaluation the `test`
files, by the files themselves.
"""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.config import Config
from qerl_jax.data.arithmetic import problems
from qerl_jax.data.presets import PROMPT_FORMATS
from qerl_jax.run.prepare import load_problems


def read(items) -> list[tuple[int, str, str]]:
    return [(item.problem.id, item.problem.prompt, item.problem.answer) for item in items]


def rows(split: str) -> list[tuple[str, str]]:
    return [(f"What is {i} + {i} ({split})?", str(2 * i)) for i in range(5)]


@pytest.mark.parametrize("generated", [False, True])
def test_training_and_evaluation_read_their_own_splits(tmp_path, generated):
    """Two sets, ids one after the other; the evaluation of as many problems as were asked for."""
    for split in ("train", "test"):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows(split)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    evaluated = "arithmetic" if generated else str(tmp_path)
    config = Config(model="tiny", dataset=(str(tmp_path), "arithmetic"), eval_dataset=evaluated, eval_samples=3)
    stream, evaluation = load_problems(config, load_tokenizer(model_path("tiny")), Console(quiet=True))
    files, generator = (
        [(one.problem.id, one.problem.prompt, one.problem.answer) for one in part] for part in stream.sets
    )
    assert files == [(i, question, answer) for i, (question, answer) in enumerate(rows("train"))]
    assert generator[:20] == [(5 + i, *row) for i, row in enumerate(problems("train", 20))]
    wanted = problems("heldout", 3) if generated else rows("test")[:3]
    assert read(evaluation) == [(i, *row) for i, row in enumerate(wanted)]


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({"prompt_format": "think_answer"}, PROMPT_FORMATS["think_answer"]),
        ({"system_prompt": "Be brief."}, "Be brief."),
    ],
)
def test_the_system_prompt_of_a_config_reaches_training_and_evaluation(settings, asked):
    config = Config(model="tiny", dataset="arithmetic", eval_dataset="arithmetic", eval_samples=1, **settings)
    tokenizer = load_tokenizer(model_path("tiny"))
    stream, evaluation = load_problems(config, tokenizer, Console(quiet=True))
    for item in stream.sets[0][0], evaluation[0]:
        assert tokenizer.decode(list(item.tokens)).startswith(
            f"<|im_start|>system\n{asked}<|im_end|>\n<|im_start|>user"
        )
