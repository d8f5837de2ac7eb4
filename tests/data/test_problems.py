"""Dataset files: columns, errors that name the line, bad records counted, conversations, typos, large files."""

import json
import os
import tracemalloc
from decimal import Decimal

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from qerl_jax.data.files import DataError, open_file, split_files
from qerl_jax.data.presets import PROMPT_FORMATS, Unusable, boxed_answer, gold_answer
from qerl_jax.data.problems import Problem, load_dataset
from qerl_jax.messages import Given

ROWS = [
    {"question": "How many?", "answer": "Two and two is <<2+2=4>>4.\n#### 4"},
    {"question": "Cost?", "answer": "#### 1,200"},
]


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
    assert dataset.system_prompt == PROMPT_FORMATS["boxed"] and dataset.notes == () and dataset.size == 2


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_columns(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", [{"problem": "p", "solution": 7.0, "level": 3, "proof": "…"}])
    dataset = load_dataset(path, "train", "problem", "solution", reward_columns=["level"])
    assert dataset.problems == [Problem(0, "p", "7", extra={"level": 3})]
    assert hash(dataset.problems[0]) == hash(Problem(0, "p", "7"))
    with pytest.raises(TypeError):
        dataset.problems[0].extra["level"] = 4
    named = {"prompt_column": "problem", "answer_column": "solution"}
    for column, told, flags in (
        ("question", "set prompt_column$", {}),
        ("answer", "set answer_column", {"prompt_column": "problem"}),
        (
            "levels",
            "reward_columns or data_order asks for it; did you mean 'level'",
            named | {"reward_columns": ["levels"]},
        ),
    ):
        words = rf"data\{suffix} has no column '{column}'; its columns are \[.*'level'.*\]: {told}"
        with pytest.raises(DataError, match=words):
            load_dataset(path, "train", **flags)
    with pytest.raises(DataError, match=r"\['prompts'\] are arguments that every reward has"):
        load_dataset(path, "train", "problem", "solution", reward_columns=["prompts"])


@pytest.mark.parametrize("first", range(5))
def test_a_record_that_lacks_a_column_is_left_out_and_counted(tmp_path, first):
    """The same in any order. The reward never sees None for a column that was asked for."""
    rows = [{"question": "p", "answer": "7", "level": 3}, {"question": "q", "answer": "8"},
            {"question": "r", "answer": "9", "level": None}, {"answer": "10"}, {"question": "s"}]  # fmt: skip
    path = write(tmp_path / "data.jsonl", rows[first:] + rows[:first])
    dataset = load_dataset(path, "train", reward_columns=["level"])
    assert [problem.extra["level"] for problem in dataset.problems] == [3] and dataset.size == 5
    assert "left out 4 of 5 records: " in dataset.notes[0]
    for reason in ("2 × no 'level'", "1 × no 'question'", "1 × no 'answer'"):
        assert f"{reason} (first: " in dataset.notes[0]
    assert sorted(problem.prompt for problem in load_dataset(path, "train").problems) == ["p", "q", "r"]


def test_every_file_of_a_directory_has_its_columns(tmp_path):
    rows = {"question": "1?", "answer": "1", "level": 1}, {"question": "2?", "answer": "2", "hint": "x"}
    for number, row in enumerate(rows):
        (tmp_path / f"train-{number}.jsonl").write_text(json.dumps(row))
    assert load_dataset(str(tmp_path), "train").unread == ("hint", "level")
    (tmp_path / "train-1.jsonl").write_text('{"question": "2?"}')
    with pytest.raises(DataError, match=r"train-1\.jsonl has no column 'answer'"):
        load_dataset(str(tmp_path), "train")


def test_a_number_behind_the_splits_name_is_another_name(tmp_path):
    for name in ("train1.parquet", "training.parquet", "train_a.parquet", "train-0.parquet"):
        (tmp_path / name).touch()
    assert [path.name for path in split_files(tmp_path, "train")] == ["train-0.parquet", "train_a.parquet"]


def test_a_subsets_own_folder_comes_before_data(tmp_path):
    for folder in ("data", "level_5"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").touch()
    assert split_files(tmp_path, "train", "level_5") == [tmp_path / "level_5" / "train.jsonl"]
    for subset in (None, "level_4"):
        assert split_files(tmp_path, "train", subset) == [tmp_path / "data" / "train.jsonl"]
    (tmp_path / "data/train.jsonl").rename(tmp_path / "train.jsonl")  # data/ is empty now
    assert split_files(tmp_path, "train") == [tmp_path / "train.jsonl"]


def test_directories(tmp_path):
    """Shards in the order of their names; another split and other files stay out."""
    for name, question in (("train-00001-of-00002", "b"), ("train-00000-of-00002", "a"), ("test", "c"), ("extra", "d")):
        write(tmp_path / f"{name}.jsonl", [{"question": question, "answer": "1"}])
    assert [p.prompt for p in load_dataset(str(tmp_path), "train").problems] == ["a", "b"]
    assert [(p.id, p.prompt) for p in load_dataset(str(tmp_path), "test", first_id=7).problems] == [(7, "c")]
    with pytest.raises(
        DataError, match=r"no file of the split 'valid', named valid\.…, valid-… or valid_… .* it holds \['extra.jsonl'"
    ):
        split_files(tmp_path, "valid")
    write(tmp_path / "train.parquet", ROWS)
    with pytest.raises(DataError, match=r"holds the split 'train' as \.jsonl and \.parquet: name one of the files"):
        load_dataset(str(tmp_path), "train")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "x.jsonl",
            b'{"question": "a", "answer": "1"}\n\n{"question": ',
            r"x\.jsonl, line 3 .*, column 14$",
        ),
        ("x.jsonl", b'{"question": "a", "answer": "1"}\n{"question": "\xff"}', r"x\.jsonl, line 2 is not UTF-8"),
        ("x.jsonl", b'{"question": "a", "answer": "1", "answer": "2"}', "line 1 .*: the key 'answer' is given twice"),
        ("x.jsonl", b'{"question": "a", "answer": "1"}\n[1, 2]', r"x\.jsonl, line 2 is a list, expected an object"),
        ("x.jsonl", b"[" * 100_000, r"x\.jsonl, line 1 is not JSON"),
        ("x.jsonl", b'{"question": "a", "answer": ' + b"9" * 5000 + b"}", r"x\.jsonl, line 1 is not JSON"),
        (
            "x.jsonl",
            b'{"question": "a", "answer": "####  "}',
            r"left out 1 × no single number after '####' in 'ans",
        ),
        ("x.jsonl", b"{}", r"x\.jsonl holds no problems"),
        ("x.jsonl", b"", r"x\.jsonl holds no problems"),
        ("x.parquet", b"PAR1" + b"\0" * 40 + b"PAR1", "not a parquet file"),
        ("x.json", b'{"a": 1}', "holds a dict, expected a list"),
        ("x.json", b"[1]", "row 1 is a int, expected an object"),
        ("x.json", b"[", r"x\.json is not JSON: Expecting value: line 1 column 2"),
        ("x.json", b"\xff\xfe", r"x\.json is not UTF-8 text: 'utf-8' codec can't decode byte 0xff"),
        ("x.csv", b"question,answer\n", r"x\.csv does not end in one of"),
    ],
)
def test_bad_files_are_errors(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_dataset(str(tmp_path / name), "train")


def test_parquet_text_that_is_not_utf8(tmp_path):
    text = pyarrow.array([b"1", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"question": text, "answer": text}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet is not a parquet file that can be read: 'utf-8' codec"):
        load_dataset(str(tmp_path / "x.parquet"), "train")


def test_bad_records_are_left_out_counted_and_told_once(tmp_path):
    good = {"question": "q", "answer": "1"}
    bad = [
        {"question": "q", "answer": "#### many"},
        {"question": "q", "answer": None},
        {"question": "q"},
        {"question": " ", "answer": "1"},
        {"question": {"text": "q"}, "answer": "1"},
        {"question": "q", "answer": float("nan")},
        {"question": "q", "answer": ""},
        {"question": "q", "answer": "#### 3 or 4"},
        {"question": "\ud800", "answer": "1"},
    ]
    path = write(tmp_path / "data.jsonl", [good, *bad, good])
    dataset = load_dataset(path, "train")
    assert [problem.id for problem in dataset.problems] == [0, 10] and dataset.size == 11
    assert dataset.notes == (
        f"{path}: left out 9 of 11 records: "
        f"2 × no single number after '####' in 'answer' (first: {path}, line 2); "
        f"3 × no 'answer' (first: {path}, line 3); "
        f"1 × empty 'question' (first: {path}, line 5); "
        f"1 × 'question' is neither text nor a number (first: {path}, line 6); "
        f"1 × empty answer in 'answer' (first: {path}, line 8); "
        f"1 × 'question' is not valid Unicode (first: {path}, line 10)",
    )


def test_limit_reads_no_further(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n' * 3 + "not JSON\n")
    assert load_dataset(str(path), "test", limit=3).size == 3
    with pytest.raises(DataError, match="line 4"):
        load_dataset(str(path), "test", limit=4)
    assert len(load_dataset("arithmetic", "test", limit=5).problems) == 5
    with pytest.raises(DataError, match="0 problems of dataset 'arithmetic' were asked for"):
        load_dataset("arithmetic", "test", limit=0)
    path.write_text('{"question": "a"}\n' + '{"question": "b", "answer": "1"}\n' * 3)
    dataset = load_dataset(str(path), "test", limit=2)  # usable ones
    assert ([problem.id for problem in dataset.problems], dataset.size) == ([1, 2], 3)


CHAT = [{"role": "user", "content": "u1"}, {"role": "assistant", "content": "a1"}, {"role": "user", "content": "u2"}]
TURNS = tuple((turn["role"], turn["content"]) for turn in CHAT)


@pytest.mark.parametrize(
    ("own", "system_prompt", "expected"),
    [
        ("own", None, "own"), ("own", "other", "other"), ("own", "", "own"), (None, None, PROMPT_FORMATS["boxed"]),
        (None, "other", "other"), (None, "", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_conversations_and_their_system_message(tmp_path, suffix, own, system_prompt, expected):
    system = [{"role": "system", "content": own}] if own else []
    path = write(tmp_path / f"data{suffix}", [{"question": [*system, *CHAT], "answer": "1"}])
    problem = load_dataset(path, "train", system_prompt=system_prompt).problems[0]
    assert problem.messages == ((("system", expected),) if expected else ()) + TURNS
    assert problem.prompt == "u2"


def test_a_message_in_parts_is_its_text(tmp_path):
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]
    path = write(tmp_path / "data.jsonl", [{"question": [{"role": "user", "content": parts}], "answer": "1"}])
    assert load_dataset(path, "train").problems[0].prompt == "How many?"


IMAGE, TOOL = {"type": "image", "image": "x.png"}, {"role": "tool", "content": "4"}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": [IMAGE, {"type": "text", "text": "What is it?"}]}], "images and sound are not"),
        ([CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{}]}, TOOL, CHAT[2]], "tools are not"),
        ([CHAT[0], TOOL, CHAT[2]], "tools are not supported"),
    ],
)
def test_messages_for_what_is_not_supported_are_told(tmp_path, messages, words):
    path = write(tmp_path / "data.jsonl", [{"question": messages, "answer": "1"}])
    with pytest.raises(DataError, match=rf"holds no problems: left out 1 × 'question' holds .*: .*{words}"):
        load_dataset(path, "train")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["u"],
        CHAT[:2],
        [{"role": "system", "content": "s"}],
        [{"role": "tool", "content": "u"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "\udc00"}],
        [CHAT[0], {"role": "system", "content": "s"}, CHAT[2]],
    ],
)
def test_conversations_that_cannot_be_gone_on_with(tmp_path, messages):
    path = write(tmp_path / "data.jsonl", [{"question": "q", "answer": "1"}, {"question": messages, "answer": "1"}])
    dataset = load_dataset(path, "train")
    assert dataset.size == 2 and len(dataset.problems) == 1 and "1 × 'question'" in dataset.notes[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gsm9k", "'gsm9k' is neither .*; did you mean 'gsm8k'"),
        ("arithmetics", "did you mean 'arithmetic'"),
        ("bigmth:/some/where", "'bigmth:/some/where' is neither one of .*; did you mean 'bigmath:/some/where'"),
        ("openai/gsm8k", r"does not exist in \S+; did you mean 'gsm8k'"),
        ("open-r1/Big-Math-RL-Verified-Processed", r"; did you mean 'bigmath'\?"),
        ("nothing", r"'nothing' is neither one of \['aime24', 'aime25', 'amc23', 'arithmetic', .* '.parquet'\]$"),
        ("none.jsonl", rf"'none\.jsonl' does not exist in {os.path.realpath('.')}$"),
        (
            "trl-lib/tldr",
            r"'trl-lib/tldr' does not exist in \S+; of the hub only presets are read: datasets\.load_dataset",
        ),
        ("math:none", r"directory 'none' does not exist in"),
    ],
)
def test_unknown_names_suggest_the_nearest(name, words):
    with pytest.raises(DataError, match=words):
        load_dataset(name, "train")


def test_gold_answers():
    assert gold_answer("a #### b #### 12 ") == "12" and gold_answer("4 #### 5\n#### $1,200.50 ") == "$1,200.50"
    assert gold_answer(" 12 ") == "12" and gold_answer("x + 1") == "x + 1"
    assert boxed_answer(r"\boxed{1}, no: \boxed{\frac{1}{2}} and on") == r"\frac{1}{2}"
    for read, text in ((gold_answer, " "), (gold_answer, "1 ####"), (boxed_answer, "12"), (boxed_answer, r"\boxed{ }")):
        with pytest.raises(Unusable):
            read(text)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_large_files_are_not_held_in_memory(tmp_path, suffix):
    """20 MB of a column that nobody asked for: the peak stays under a tenth of it."""
    rows = [{"question": f"q{i}", "answer": "1", "proof": "x" * 10_000} for i in range(2000)]
    path = tmp_path / f"data{suffix}"
    write(path, rows)
    rows.clear()
    tracemalloc.start()
    dataset = load_dataset(str(path), "train")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset.problems) == 2000 and peak < 2e6


def test_a_row_of_a_large_parquet_file_is_counted_from_its_beginning(tmp_path):
    """Beyond the rows that are read together."""
    rows = [{"question": f"q{i}", "answer": "" if i == 1999 else "1"} for i in range(2000)]
    write(tmp_path / "data.parquet", rows)
    [note] = load_dataset(str(tmp_path / "data.parquet"), "train").notes
    assert note.endswith("data.parquet, row 2000)")


def test_only_wanted_columns_of_a_parquet_file_are_read(tmp_path):
    path = tmp_path / "data.parquet"
    write(path, [{"question": "q", "answer": "1", "proof": "x"}])
    source = open_file(path, {"question", "absent"})
    assert source.columns == ["question", "answer", "proof"]
    assert list(source.records) == [("row 1", {"question": "q"})]


@pytest.mark.parametrize("kind", [pyarrow.float32(), pyarrow.float16()])
def test_a_narrow_float_is_the_decimal_that_was_written(kind, tmp_path):
    """Alone or in a list; and a missing one is none, for a reward as for a gold answer."""
    columns = {
        "question": ["p", "q", "r", "s"],
        "answer": pyarrow.array([2.55, 0.1, 3.0, 4.0], kind),
        "level": pyarrow.array([0.3, 0.0, 1.7, None], pyarrow.float32()),
        "parts": pyarrow.array([[0.7], [], [1.1, 2.0], []], pyarrow.list_(kind)),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    memory = datasets.Dataset.from_parquet(str(tmp_path / "a.parquet"), cache_dir=str(tmp_path))
    for name in str(tmp_path / "a.parquet"), Given("train_dataset", memory):
        dataset = load_dataset(name, "train", reward_columns=["level", "parts"])
        found = [(problem.answer, problem.extra["level"], problem.extra["parts"]) for problem in dataset.problems]
        assert found == [("2.55", 0.3, [0.7]), ("0.1", 0.0, []), ("3", 1.7, [1.1, 2.0])]
        assert "left out 1 of 4 records: 1 × no 'level' (first: " in dataset.notes[0]


def test_records_in_memory():
    rows = [{"question": "p", "n": 1}, {"question": "", "n": 2}, {"question": "q", "n": 3}]
    dataset = load_dataset(Given("mine", rows), "train", answer_column="", reward_columns=["n"])
    assert [(p.id, p.prompt, p.answer, p.extra["n"]) for p in dataset.problems] == [(0, "p", "", 1), (2, "q", "", 3)]
    assert dataset.notes == ("mine: left out 1 of 3 records: 1 × empty 'question' (first: mine, row 2)",)
    with pytest.raises(DataError, match=r"mine has no column 'answer'; its columns are \['n', 'question'\]"):
        load_dataset(Given("mine", rows), "train")
    with pytest.raises(DataError, match="mine, row 1 is a str, expected an object with columns"):
        load_dataset(Given("mine", {"question": ["p"]}), "train")
    with pytest.raises(DataError, match="mine holds no problems"):
        load_dataset(Given("mine", []), "train")


def test_records_of_pandas(tmp_path):
    """NumPy's numbers and arrays are read as Python's, as from the file that they came from."""
    pandas = pytest.importorskip("pandas")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    numbers = {"level": [3, 4], "share": np.float32([2.55, 0.5]), "parts": [np.float32([0.1]), np.float32([])]}
    frame = pandas.DataFrame({"question": [messages, messages], "answer": [4.5, 5.0], **numbers})
    frame.to_parquet(tmp_path / "x.parquet")
    records = pandas.read_parquet(tmp_path / "x.parquet").to_dict("records")
    assert isinstance(records[0]["question"], np.ndarray)
    records[0] |= {"level": np.int64(3), "share": np.float32(2.55)}
    for name in (Given("mine", records), str(tmp_path / "x.parquet")):
        problems = load_dataset(name, "train", reward_columns=list(numbers)).problems
        assert [(p.prompt, p.answer, len(p.messages)) for p in problems] == [("q", "4.5", 2), ("q", "5", 2)]
        assert [dict(p.extra) for p in problems] == [
            {"level": 3, "share": 2.55, "parts": [0.1]},
            {"level": 4, "share": 0.5, "parts": []},
        ]
        assert [type(problems[0].extra[name]) for name in numbers] == [int, float, list]


def test_missing_values_of_pandas():
    pandas = pytest.importorskip("pandas")
    rows = [
        {"question": "p", "answer": value, "n": other} for value, other in ((1, pandas.NaT), (pandas.NA, 2), (3, 4))
    ]
    dataset = load_dataset(Given("mine", rows), "train", reward_columns=["n"])
    assert [p.answer for p in dataset.problems] == ["3"]
    assert all(words in dataset.notes[0] for words in ("1 × no 'answer'", "1 × no 'n'"))


def test_answers_that_are_decimals():
    values = [Decimal("4.50"), Decimal("NaN"), Decimal("Infinity"), np.float64("nan"), np.bool_(True)]
    dataset = load_dataset(Given("mine", [{"question": "p", "answer": value} for value in values]), "train")
    assert [p.answer for p in dataset.problems] == ["4.50"]
    assert all(
        words in dataset.notes[0]
        for words in ("2 × no 'answer'", "1 × 'answer' is not finite", "1 × 'answer' is neither")
    )


def test_json_with_an_object_a_line(tmp_path):
    """As `datasets` writes under the name .json, too."""
    lines = [json.dumps({"question": name, "answer": "1"}) for name in "ab"]
    (tmp_path / "x.json").write_text("\n".join(lines))
    assert [p.prompt for p in load_dataset(str(tmp_path / "x.json"), "train").problems] == ["a", "b"]
    (tmp_path / "x.json").write_text("\n".join([*lines, "{"]))
    with pytest.raises(DataError, match=r"x\.json, line 3 is not JSON"):
        load_dataset(str(tmp_path / "x.json"), "train")


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_records_that_came_from_python_are_asked_for_again(name):
    with pytest.raises(DataError, match=rf'the records of {name} were given to train\(…\) .* resume="auto" goes on'):
        load_dataset(name, "train")
