"""Presets: five invented records in each published schema, from a local copy and as the hub would give them."""

import json
import re
import types
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from huggingface_hub import errors

from qerl_jax.config import Config
from qerl_jax.data.files import open_file
from qerl_jax.data.presets import ANSWER_LINE_SYSTEM_PROMPT, PRESETS, PROMPT_FORMATS
from qerl_jax.data.problems import DataError, _hub, is_out_of_reach, load_dataset
from qerl_jax.run.choose_rewards import dataset_rewards
from qerl_jax.run.dry_run import absent_datasets


def refused_by_hub(message: str) -> Exception:
    error = errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)
    error.args = (message,)
    return error


FIXTURES = Path(__file__).parent / "presets"
TEXT = pa.string()
MESSAGES = pa.list_(pa.struct([("content", TEXT), ("role", TEXT)]))
TESTS = pa.list_(pa.struct([(name, TEXT) for name in ("fn_name", "input", "output", "type")]))
LIMITS = [(name, TEXT) for name in ("difficulty", "memory_limit", "problem_url", "time_limit")]


def texts(*names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, TEXT) for name in names]


# Columns and types of the dataset cards; of miromind, which has none, those that its authors' script names.
SCHEMAS = {
    "gsm8k": texts("question", "answer"),
    "bigmath": [
        *texts("prompt", "solution", "source"),
        ("domain", pa.list_(TEXT)),
        ("llama8b_solve_rate", pa.float64()),
    ],
    "dapomath": [
        *texts("prompt", "solution", "data_source", "ability"),
        ("source_prompt", MESSAGES),
        ("reward_model", pa.struct(texts("ground_truth", "style"))),
        ("extra_info", pa.struct(texts("index"))),
    ],
    "miromind": [*texts("problem", "clean_answer"), ("pass_ratio", pa.float64())],
    "codeforces": [
        *texts("source", "task_type", "in_source_id", "problem", "gold_standard_solution", "problem_id"),
        ("metadata", pa.struct([*LIMITS, ("memory_limit_bytes", pa.int64())])),
        ("verification_info", pa.struct([("language", TEXT), ("test_cases", TESTS)])),
        ("test_reward", pa.float64()),
    ],
    "math": texts("problem", "level", "solution", "type"),
    "math500": [*texts("problem", "solution", "answer", "subject", "unique_id"), ("level", pa.int64())],
    "aime24": [("id", pa.int64()), *texts("problem", "solution", "url")],
    "aime25": texts("problem", "answer", "id"),
    "amc23": [("id", pa.int64()), *texts("question"), ("answer", pa.float64()), *texts("url")],
}
SCHEMAS["bigmath_hard"] = SCHEMAS["bigmath"]

# By hand from the fixtures: split, file, ids kept, their answers, and why the fifth is left out.
EXPECTED = {
    "gsm8k": ("train", "train", [0, 1, 2, 4], ["36", "1,200", "-4", "3"], "no single number after '####'"),
    "bigmath": (
        "train", "level_3_4_5/train-00000-of-00001", [0, 2, 4], ["3", r"\sqrt{2}", "5,040"], "'prompt' over 1024",
    ),
    "bigmath_hard": ("train", "level_4_5/train-00000-of-00001", [0, 2, 4], ["3", r"\sqrt{2}", "5,040"], "empty answer"),
    "dapomath": ("train", "en/train-00000-of-00001", [0, 1, 3, 4], ["9", "1", "20", "7"], "'source_prompt' over 1024"),
    "miromind": (
        "train", "data/train-00000-of-00001", [0, 1, 3, 4], ["15", "42", r"\frac{3}{4}", "10"], "'problem' over 1024",
    ),
    "codeforces": ("train", "data/train-00000-of-00001", [0, 1, 2, 4], ["", "", "", ""], "no 'verification_info'"),
    "math": (
        "train",
        "data/train-00000-of-00001",
        [0, 1, 2, 4],
        ["30", r"\frac{1}{8}", "(x-3)(x+3)", r"\frac{1}{2}"],
        r"no \boxed{…}",
    ),
    "math500": ("test", "test", [0, 1, 2, 3, 4], ["9", "25", "49", "121", "169"], None),
    "aime24": ("test", "data/test-00000-of-00001", [0, 1, 3, 4], ["042", "7", "900", "11"], r"no \boxed{…}"),
    "aime25": ("test", "test", [0, 1, 2, 4], ["70", "16", "082", "5"], "empty answer"),
    "amc23": ("test", "data/test-00000-of-00001", [0, 1, 2, 3], ["27", "-1", "3159", "0.5"], "no 'answer'"),
}  # fmt: skip


def records(name: str) -> list[dict]:
    folder = FIXTURES / ("bigmath" if name == "bigmath_hard" else name)
    return [json.loads(line) for line in (folder / f"{EXPECTED[name][1]}.jsonl").read_text().splitlines()]


def table(name: str) -> pa.Table:
    return pa.Table.from_pylist(records(name), pa.schema(SCHEMAS[name]))


def check(name: str, dataset) -> None:
    _, _, ids, answers, reason = EXPECTED[name]
    preset, rows = PRESETS[name], records(name)
    assert [problem.id for problem in dataset.problems] == ids
    assert [problem.answer for problem in dataset.problems] == answers
    assert dataset.size == 5 and dataset.system_prompt == preset.system_prompt
    assert (len(dataset.notes) == 0) if reason is None else (reason in dataset.notes[0])
    for problem in dataset.problems:
        asked = rows[problem.id][preset.prompt_column]
        if name == "dapomath":
            assert problem.messages == (("user", asked[0]["content"]),) and problem.prompt == asked[0]["content"]
        else:
            assert problem.messages is None and problem.prompt == asked
        assert dict(problem.extra) == {column: rows[problem.id][column] for column in preset.extra}


def test_every_preset_has_a_fixture():
    assert set(PRESETS) == set(SCHEMAS) == set(EXPECTED)
    for name in PRESETS:
        assert set(records(name)[0]) == {column for column, _ in SCHEMAS[name]} and len(records(name)) == 5


# Address on the hub and reward; subset, splits, columns, answers and limits show in EXPECTED.
PUBLISHED = {
    "gsm8k": ("openai/gsm8k", "answer"),
    "bigmath": ("open-r1/Big-Math-RL-Verified-Processed", "math_verify"),
    "bigmath_hard": ("open-r1/Big-Math-RL-Verified-Processed", "math_verify"),
    "dapomath": ("open-r1/DAPO-Math-17k-Processed", "dapo"),
    "miromind": ("miromind-ai/MiroMind-M1-RL-62K", "dapo"),
    "codeforces": ("open-r1/verifiable-coding-problems-python_decontaminated-tested-shuffled", "code"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", "math_verify"),
    "math500": ("HuggingFaceH4/MATH-500", "math_verify"),
    **{name: (f"math-ai/{name}", "math_verify") for name in ("aime24", "aime25", "amc23")},
}


def test_address_and_reward():
    assert {name: (preset.hub_id, *preset.rewards) for name, preset in PRESETS.items()} == PUBLISHED
    assert {weight for preset in PRESETS.values() for weight in preset.rewards.values()} == {1}
    assert PRESETS["gsm8k"].subset == "main" and PRESETS["gsm8k"].splits == PRESETS["math"].splits == ("train", "test")


@pytest.mark.parametrize("name", PRESETS)
def test_from_a_directory_of_json_lines(name):
    folder = FIXTURES / ("bigmath" if name == "bigmath_hard" else name)
    check(name, load_dataset(f"{name}:{folder}", EXPECTED[name][0]))


@pytest.mark.parametrize("name", PRESETS)
def test_from_parquet_in_the_published_schema(name, tmp_path):
    """Laid out as the hub does; and flat, as one file of the subset."""
    file = tmp_path / "copy" / f"{EXPECTED[name][1]}.parquet"
    file.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(table(name), file)
    check(name, load_dataset(f"{name}:{tmp_path / 'copy'}", EXPECTED[name][0]))
    check(name, load_dataset(f"{name}:{file}", EXPECTED[name][0]))


@pytest.mark.parametrize("name", PRESETS)
def test_from_the_hub(name, tmp_path):
    """The hub's library is asked for the published address, subset and split, and its rows are read as a file's."""
    asked, preset, split = [], PRESETS[name], EXPECTED[name][0]
    wanted = {preset.prompt_column, *preset.extra, *(column for column, _ in preset.answers)}

    def load(address, subset, split):
        asked.append((address, subset, split))
        return datasets.Dataset(table(name))

    found = _hub(name, preset, split, wanted, load)
    pyarrow.parquet.write_table(table(name), tmp_path / "rows.parquet")
    file = open_file(tmp_path / "rows.parquet", wanted)
    assert (sorted(found.columns), list(found.records)) == (sorted(file.columns), list(file.records))
    assert asked == [(preset.hub_id, preset.subset, split)]


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if len(preset.answers) > 1])
def test_of_several_columns_with_an_answer_the_first_counts(name, tmp_path):
    """And each of them where it is the only one."""
    preset, columns = PRESETS[name], [column for column, _ in PRESETS[name].answers]
    for present in (columns, columns[:1], columns[1:]):
        values = {column: f"so \\boxed{{{i}}}" for i, column in enumerate(columns) if column in present}
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({preset.prompt_column: "?", **values}))
        [problem] = load_dataset(f"{name}:{file}", "test").problems
        read = dict(preset.answers)[present[0]]
        assert problem.answer == read(values[present[0]]) and str(columns.index(present[0])) in problem.answer


def test_without_network_the_error_names_the_local_form():
    with pytest.raises(DataError, match=r"cannot read openai/gsm8k from the Hugging Face hub: .*gsm8k:DIRECTORY"):
        load_dataset("gsm8k", "train")  # conftest sets HF_HUB_OFFLINE
    with pytest.raises(DataError, match=r"'bigmath' has no split 'test' on the hub, only \['train'\]"):
        load_dataset("bigmath", "test")


@pytest.mark.parametrize(
    ("answer", "cached", "is_out"),
    [
        (None, False, False),
        (OSError("no route to host"), False, True),
        (OSError("no route to host"), True, False),
        (refused_by_hub("no such dataset"), False, False),
    ],
)
def test_a_hub_without_a_connection_is_asked_once(answer, cached, is_out, tmp_path):
    """Unless its cache has the dataset, or it answers, whatever it says. A dry run says what a run would download."""

    def dataset_info(hub_id: str, timeout: float) -> None:
        assert hub_id == "openai/gsm8k" and timeout <= 10
        if answer is not None:
            raise answer

    if cached:
        (tmp_path / "datasets--openai--gsm8k" / "blobs").mkdir(parents=True)
    assert is_out_of_reach("openai/gsm8k", tmp_path, types.SimpleNamespace(dataset_info=dataset_info)) == is_out
    line = "gsm8k is not on this machine: a run downloads it from the Hugging Face hub (openai/gsm8k)."
    config = Config("tiny", dataset=("gsm8k", "arithmetic", "gsm8k:copy"), eval_dataset="gsm8k")
    assert list(absent_datasets(config, tmp_path)) == ([] if cached else [line])


@pytest.mark.parametrize(
    "kind", [datasets.exceptions.DatasetGenerationError, datasets.exceptions.SplitsVerificationError]
)
def test_what_the_hubs_library_raises_is_one_line(kind):
    def load(*_, **__):
        raise kind("no\nsuch rows")

    with pytest.raises(DataError, match=r"cannot read openai/gsm8k from .*: no such rows; a local copy is read with"):
        _hub("gsm8k", PRESETS["gsm8k"], "train", {"question"}, load)


def test_two_subsets_side_by_side_are_not_mixed_up(tmp_path):
    """A local copy without the subset's folder is taken as that subset; one with another subset's only is refused."""
    (tmp_path / "level_5").mkdir()
    with pytest.raises(DataError, match="has no file of the split 'train'"):
        load_dataset(f"bigmath:{tmp_path}", "train")


def test_a_prompt_may_have_as_many_characters_as_the_limit(tmp_path):
    rows = [{"prompt": "x" * length, "solution": "1"} for length in (1024, 1025)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [len(problem.prompt) for problem in load_dataset(f"bigmath:{tmp_path}", "train").problems] == [1024]


def test_mathematics_asks_as_qwen_does():
    """Qwen2.5-Math's own system prompt, to the letter; QeRL's tags are a choice."""
    boxed = "Please reason step by step, and put your final answer within " + chr(92) + "boxed{}."
    mathematics = {name for name, preset in PRESETS.items() if preset.system_prompt == boxed}
    assert mathematics == set(PRESETS) - {"dapomath", "miromind", "codeforces"}
    tags = re.findall(r"</?(?:think|answer)>", PROMPT_FORMATS["think_answer"])
    assert tags == ["<think>", "</think>", "<answer>", "</answer>"]
    path = f"gsm8k:{FIXTURES / 'gsm8k'}"
    assert load_dataset(path, "train").system_prompt == load_dataset("arithmetic", "train").system_prompt == boxed
    assert load_dataset(path, "train", asks_itself=True).system_prompt == ""
    assert load_dataset(path, "train", asks_itself=True, system_prompt="Hi").system_prompt == "Hi"
    for name in (path, "arithmetic"):
        assert load_dataset(name, "train", system_prompt="").system_prompt == ""
    assert "Answer: " in ANSWER_LINE_SYSTEM_PROMPT == PRESETS["miromind"].system_prompt
    assert "```python" in PRESETS["codeforces"].system_prompt


def test_what_a_preset_needs_and_what_was_asked_for_beside_it():
    dataset = load_dataset(f"codeforces:{FIXTURES / 'codeforces'}", "train", reward_columns=["metadata", "test_reward"])
    assert [problem.id for problem in dataset.problems] == [0, 1, 2, 4]  # the fourth has metadata, but no tests
    assert set(dataset.problems[0].extra) == {"verification_info", "metadata", "test_reward"}


def test_rewards_of_datasets():
    assert dataset_rewards(["arithmetic"]) == dataset_rewards([str(FIXTURES / "gsm8k")]) == dataset_rewards(["gsm8k"])
    with pytest.raises(DataError, match=r"different rewards \(gsm8k \['answer'\], dapomath \['dapo'\]\)"):
        dataset_rewards(["gsm8k", "dapomath"])
