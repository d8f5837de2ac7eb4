"""Input that is wrong on purpose, through the readers themselves: each refusal names the file or field, at once."""

import json
import math
import os
import time

import jinja2.sandbox
import pyarrow
import pyarrow.parquet
import pytest
import small

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.hf_config import parse_config
from qerl_jax.checkpoint.safetensors import CheckpointError
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.config import Config, ConfigError
from qerl_jax.data import prompts
from qerl_jax.data.files import DataError
from qerl_jax.data.problems import MAX_CHARACTERS, load_dataset
from qerl_jax.messages import shown
from qerl_jax.rewards.mathematics import dapo
from qerl_jax.rollout.shapes import ending_note

HUGE = 10**401


def test_long_values_are_cut_in_messages():
    assert shown("a[/b]") == "'a[/b]'"
    assert shown(HUGE) == "1" + "0" * 59 + "…" + "0" * 20 + " (402 characters)"
    assert shown(10**5000) == f"a number of {(10**5000).bit_length()} bits"


class Tokenizer:
    """As much of a tokenizer as a chat template needs."""

    def __init__(self, template: str):
        self.chat_template = template
        self.added_tokens_decoder, self.special_tokens_map = {}, {}

    def get_chat_template(self):
        return self.chat_template

    def apply_chat_template(self, turns, **_):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
        environment.globals["range"] = range
        template = environment.from_string(self.chat_template)
        return [template.render(messages=messages) for messages in turns]

    def __call__(self, texts, **_):
        return {"input_ids": [[1] for _ in texts]}


def test_a_chat_template_that_repeats_its_text():
    problems = load_dataset("arithmetic", "train", limit=2).problems
    with pytest.raises(DataError, match="chat template makes 3,000,"):
        prompts.encode(problems, Tokenizer("{{ messages[-1].content }}{{ 'a' * 3000000 }}"), "")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, HUGE) for key in ("hidden_size", "rope_theta", "eos_token_id")),
        ("num_hidden_layers", 10**7),
        ("max_position_embeddings", 2**31),
        ("rms_norm_eps", math.inf),
    ],
)
def test_sizes_of_a_model(key, value):
    with pytest.raises(CheckpointError, match=f"^config.json: {key} "):
        parse_config({**small.CONFIG, key: value}, {}, "config.json")


def test_sizes_that_are_too_large_together():
    with pytest.raises(CheckpointError, match=r"parameters, at most 1e\+13 are supported"):
        parse_config({**small.CONFIG, "hidden_size": 2**30, "vocab_size": 2**31 - 1, "head_dim": 2}, {}, "config.json")


def test_the_tokens_that_end_a_completion_are_told():
    tokenizer = load_tokenizer(model_path("tiny"))
    config = parse_config({**small.CONFIG, "eos_token_id": None}, {}, "config.json")
    assert "name no EOS token: every completion goes on to" in ending_note(config, tokenizer)
    config = parse_config(small.CONFIG, {"eos_token_id": 0}, "config.json")
    assert ending_note(config, tokenizer) == "a completion ends with '<|endoftext|>' (0) or '<|im_end|>' (2)"
    assert ending_note(config, None) == "a completion ends with 0 or 2"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seed": HUGE}, "seed must be at most 2147483647, got 1000"),
        ({"epsilon_high": -1.0}, "epsilon_high must be at least 0"),
        ({"output_dir": os.fsdecode(b"run\xff")}, r"output_dir must be valid UTF-8 .*, got 'run\\udcff'"),
        ({"dataset": (os.fsdecode(b"\xff"),)}, "dataset must be valid UTF-8"),
        ({"adapter": "a\0b"}, r"adapter must be valid UTF-8 without zero bytes, got 'a\\x00b'"),
    ],
)
def test_values_of_a_config(values, words):
    with pytest.raises(ConfigError, match=words):
        Config(model="m", **values)


ROW = '{"question": "q", "answer": %s}\n'


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("1e400", "'answer' is not finite"),
        ("-Infinity", "'answer' is not finite"),
        (f'"{"1" * (MAX_CHARACTERS + 1)}"', "'answer' over 1000000 characters"),
    ],
)
def test_answers_that_are_none(tmp_path, answer, reason):
    (tmp_path / "rows.jsonl").write_text(ROW % answer + ROW % HUGE)
    found = load_dataset(str(tmp_path / "rows.jsonl"), "train")
    assert [problem.answer for problem in found.problems] == [str(HUGE)]
    assert f"1 × {reason}" in found.notes[0]


def test_prompts_beyond_any_model_are_not_encoded(tmp_path):
    rows = [{"question": "a" * (MAX_CHARACTERS + 1), "answer": "1"}, {"question": "q", "answer": "1"}]
    (tmp_path / "rows.jsonl").write_text("".join(map(json.dumps, rows)).replace("}{", "}\n{"))
    found = load_dataset(str(tmp_path / "rows.jsonl"), "train")
    assert [problem.id for problem in found.problems] == [1]


def test_columns_given_twice(tmp_path):
    columns = [pyarrow.array([value]) for value in ("a", "b", "c", "1")]
    for names in (("question", "question", "note", "answer"), ("note", "question", "note", "answer")):
        table = pyarrow.Table.from_arrays(columns, names=list(names))
        pyarrow.parquet.write_table(table, tmp_path / f"{names[0]}.parquet")
    with pytest.raises(DataError, match=r"question.parquet has two columns 'question'"):
        load_dataset(str(tmp_path / "question.parquet"), "train")
    [problem] = load_dataset(str(tmp_path / "note.parquet"), "train").problems  # another, which is not read
    assert (problem.prompt, problem.answer) == ("b", "1")


def test_dapo_takes_no_time_for_a_long_gold_answer():
    """20 KB took 5 s."""
    gold, began = "\\text{" * 4000, time.perf_counter()
    assert dapo(completions=["Answer: 1", "Answer: x = 1"], answer=[gold, f"{'y = ' * 9_000}1"]) == [0, 1]
    assert time.perf_counter() - began < 1
