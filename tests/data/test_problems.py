"""Datasets and prompts: columns, errors with line numbers, order as a function of seed and epoch."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from qerl_jax.data.problems import DataError, Problem, at_cursor, gold_answer, load_dataset
from qerl_jax.data.prompts import encode, encode_problems, to_prompts
from qerl_jax.io.assets import model_path
from qerl_jax.io.load import load_tokenizer

ROWS = [
    {"question": "How many?", "answer": "Two and two is <<2+2=4>>4.\n#### 4"},
    {"question": "Cost?", "answer": "#### 1,200"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(model_path("tiny"))


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_local_files(tmp_path, suffix):
    dataset = load_dataset(write(tmp_path / f"data{suffix}", ROWS), "train")
    assert dataset.problems == [Problem(0, "How many?", "4"), Problem(1, "Cost?", "1,200")]
    assert "<answer>" in dataset.system_prompt


def test_columns(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"problem": "p", "solution": 7}])
    assert load_dataset(path, "train", "problem", "solution").problems == [Problem(0, "p", "7")]
    with pytest.raises(DataError, match=r"row 1 has no 'question'; its columns are \['problem', 'solution'\]"):
        load_dataset(path, "train")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"question": "a", "answer": "1"}\n{"question": ', r"data\.jsonl, line 2 is not JSON"),
        ('{"question": "a", "answer": "####  "}', "row 1 has an empty answer"),
        ("[1, 2]", "row 1 is a list"),
        ("", "holds no problems"),
    ],
)
def test_bad_lines(tmp_path, text, words):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        load_dataset(str(path), "train")


def test_unknown_names(tmp_path):
    with pytest.raises(DataError, match="'gsm9k' is neither"):
        load_dataset("gsm9k", "train")
    with pytest.raises(DataError, match="does not exist"):
        load_dataset(str(tmp_path / "none.jsonl"), "train")
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(DataError, match="not a parquet file"):
        load_dataset(str(tmp_path / "x.parquet"), "train")


def test_gold_answer():
    assert gold_answer("a #### b #### 12 ") == "12"
    assert gold_answer(" 12 ") == "12"


def test_order_is_a_function_of_seed_and_epoch():
    items = list(range(10))
    stream = [at_cursor(items, seed=3, cursor=c, count=4) for c in range(0, 40, 4)]
    flat = [x for part in stream for x in part]
    assert flat == at_cursor(items, 3, 0, 40)  # however it is cut
    assert all(Counter(flat[i : i + 10]) == Counter(items) for i in range(0, 40, 10))  # each epoch holds each once
    assert flat[:10] != flat[10:20] and flat != at_cursor(items, 4, 0, 40)


def test_generated_problems_are_disjoint():
    train, test = load_dataset("arithmetic", "train").problems, load_dataset("arithmetic", "test").problems
    assert len(train) >= 4_000 and len(test) >= 1000
    assert not {p.prompt for p in train} & {p.prompt for p in test}
    assert all(p.answer.lstrip("-").isdigit() for p in test)


def test_over_long_prompts_are_dropped_and_counted(tokenizer):
    problems = [Problem(0, "Tom has 3 apples.", "3"), Problem(1, "Tom has 3 apples. " * 50, "3")]
    kept, dropped = encode_problems(problems, tokenizer, "", 64)
    assert [item.problem.id for item in kept] == [0] and dropped == 1
    with pytest.raises(DataError, match="max_prompt_length 2; the shortest has"):
        encode_problems(problems, tokenizer, "", 2)
    with pytest.raises(DataError, match="no tokenizer"):
        encode_problems(problems, None, "", 64)


def test_prompts_have_a_fixed_width_and_their_ids(tokenizer):
    kept, _ = encode_problems([Problem(7, "Tom has 3 apples.", "3"), Problem(9, "Ann.", "1")], tokenizer, "", 64)
    prompts = to_prompts(kept, 64, 0)
    assert prompts.tokens.shape == (2, 64) and prompts.ids.tolist() == [7, 9]
    assert [len(item.tokens) for item in kept] == prompts.lengths.tolist()


def test_prompt_without_a_chat_template():
    class Plain:
        chat_template = None

        def __call__(self, texts):
            return {"input_ids": [[ord(c) for c in text] for text in texts]}

    assert ["".join(map(chr, ids)) for ids in encode(["p", "q"], Plain(), "s")] == ["s\n\np", "s\n\nq"]
    assert ["".join(map(chr, ids)) for ids in encode(["p"], Plain(), "")] == ["p"]
