"""Records of an evaluation: what a kill may leave, what is refused, and how an evaluation goes on."""

import array
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import pytest
import runs
import small
from replicas import on_replicas

from qerl_jax import generate
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.command import STOPPED
from qerl_jax.data.problems import Problem, load_dataset
from qerl_jax.data.prompts import EncodedProblem
from qerl_jax.evaluate import _settings, main, parse, run
from qerl_jax.evaluation.records import RecordsError, open_records
from qerl_jax.evaluation.summary import Item
from qerl_jax.models.lora import LoraConfig

GOLDEN = Path(__file__).parents[1] / "golden"
SETTINGS = {"temperature": 0.6, "dataset": "arithmetic", "samples": None}
IDS = [3, 5, 8, 9, 11]


def item(number: int) -> Item:
    return Item(number, "Was?\n", "½", ["<answer>½</answer>", "\u2028"], ["½", None], ["correct", "unreadable"],
                [7, 1], ["eos", "length"], 0, False)  # fmt: skip


def write(path, ids, settings=SETTINGS, at_once=2, expected=IDS) -> list[int]:
    """Append items of problems; returns the ids that were there before."""
    with open_records(path, settings, expected, at_once, 2) as records:
        before = [one.id for one in records.items]
        records.append([item(number) for number in ids])
    return before


def test_items_come_back(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    assert write(path, IDS[:2]) == []
    with open_records(path, SETTINGS, IDS, 2, 2) as records:
        assert records.items == [item(3), item(5)]
    header, *lines = path.read_text().split("\n")
    assert json.loads(header) == {"settings": SETTINGS} and len(lines) == 3 and lines[-1] == ""


def test_every_cut_leaves_whole_parts(tmp_path):
    """The file of a process that was killed after some of its bytes, most of them about the ends of lines."""
    path = tmp_path / "records.jsonl"
    write(path, IDS)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for size in sorted({0, *range(1, len(whole), 29), *(end + by for end in ends for by in (-1, 0, 1))}):
        path.write_bytes(whole[:size])
        items = sum(end <= size for end in ends) - 1
        kept = 5 if items == 5 else max(items, 0) // 2 * 2
        assert write(path, IDS[kept:]) == IDS[:kept], size
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.0}, "were written with temperature 0.6, this call has 0.0: name another file"),
        ({"split": "test"}, "split None, this call has 'test'"),
    ],
)
def test_other_settings_are_refused(tmp_path, change, words):
    """Also one that only the file or only this call has."""
    path = tmp_path / "records.jsonl"
    write(path, IDS[:2])
    before = path.read_bytes()
    with pytest.raises(RecordsError, match=words):
        write(path, IDS[2:4], SETTINGS | change)
    assert path.read_bytes() == before
    write(tmp_path / "other.jsonl", IDS[:2], SETTINGS | {"split": "test"})
    with pytest.raises(RecordsError, match="split 'test', this call has None"):
        write(tmp_path / "other.jsonl", IDS[2:4])


def test_records_know_the_files_behind_the_flags(tmp_path):
    """An adapter that was trained on, a dataset whose second answer was mended, and parts of another size are other
    settings; so are another version of JAX and another device.
    """
    adapter = shutil.copytree(GOLDEN / "adapter_with_norms", tmp_path / "adapter")
    arguments, _ = parse(["tiny", "--dataset", "arithmetic", "--adapter", str(adapter)])
    items = [EncodedProblem(Problem(i, "?", "1"), array.array("i", [i])) for i in range(2)]
    mended = [items[0], dataclasses.replace(items[1], problem=Problem(1, "?", "2"))]

    def settings(problems: list[EncodedProblem], at_once: int = 4) -> dict:
        return _settings(arguments, model_path("tiny"), problems, at_once)

    def changed(one: dict, other: dict) -> set[str]:
        return {name for name in one | other if one.get(name) != other.get(name)}

    first, device = settings(items), jax.local_devices()[0].device_kind
    assert (first["jax"], first["device"]) == (jax.__version__, device)
    assert changed(first, settings(mended)) == {"prompts_and_answers"}
    assert changed(first, settings(items, at_once=8)) == {"problems_at_once"}
    weights = bytearray((adapter / "adapter_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (adapter / "adapter_model.safetensors").write_bytes(weights)
    assert changed(first, settings(items)) == {"adapter_files"}


def test_a_date_in_prompts_is_that_of_the_adapters_run_and_then_of_the_records(tmp_path, capsys):
    """Llama 3.2's template writes the current one, with which the records of yesterday would be refused today."""
    model, run = small.bf16(tmp_path / "model", shards=1), tmp_path / "run"
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ strftime_now('%d %b %Y') }}")
    export_adapter(load_policy(model, lora=LoraConfig(1)), run / "adapter")
    (run / "checkpoints/3").mkdir(parents=True)
    manifest = {"config": {}, "inputs": {"date in prompts": "2024-07-06"}, "arrays": {}}
    small.write_json(run / "checkpoints/3/manifest.json", manifest)

    def prompt(*flags: str) -> str:
        def generate(policy, prompts, *_):
            raise ValueError(policy.tokenizer.decode(prompts.tokens[0]))

        words = [str(model), "--adapter", str(run / "adapter"), *FLAGS, *flags]
        assert main(words, generate) == 2
        return capsys.readouterr().err

    records = "--records", str(tmp_path / "records.jsonl")
    first = prompt(*records)
    assert "06 Jul 2024" in first
    shutil.rmtree(run / "checkpoints")
    assert prompt(*records) == first != prompt()


@pytest.mark.parametrize("content", ["", "\n", "{}\n", "[1]\n", "not JSON\n", '{"settings": 3}\n', "x"])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "records.jsonl"
    path.write_text(content)
    if content == "":  # a file that was made before
        assert write(path, IDS[:2]) == []
        return
    with pytest.raises(RecordsError, match="holds something else than records of an evaluation"):
        write(path, IDS[:2])
    assert path.read_text() == content


def test_lines_that_are_no_items_are_named(tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, IDS[:2])
    good = path.read_text()
    sound = json.loads(good.split("\n")[1])
    for line, words in (
        ("{}", "line 4 is no item of an evaluation"),
        ("[1]", "line 4 is no item of an evaluation"),
        ("[", "line 4 is no item of an evaluation"),
        (json.dumps(sound), "problem 3 where"),
        *(
            (json.dumps(sound | {name: sound[name][:1]}), "line 4 is no item of 2 completions")
            for name in ("completions", "answers", "verdicts", "lengths", "finish")
        ),
    ):
        path.write_text(good + line + "\n")
        with pytest.raises(RecordsError, match=words):
            write(path, [])
    path.write_text(good)
    with pytest.raises(RecordsError, match="line 4 holds problem 5 where the end should be"):
        write(path, [5])
        write(path, [], expected=IDS[:2], at_once=1)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(""),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: (path.rename(path.with_name("kept")), path.write_bytes(path.with_name("kept").read_bytes())),
    ],
    ids=["removed", "emptied", "cut", "replaced"],
)
def test_a_file_that_changes_under_its_writer_is_an_error(tmp_path, change):
    path = tmp_path / "records.jsonl"
    with open_records(path, SETTINGS, IDS, 2, 2) as records:
        records.append([item(3), item(5)])
        records.append([])
        change(path)
        with pytest.raises(RecordsError, match="removed or changed by another program after 2 problems"):
            records.append([item(8)])


def test_one_process_at_a_time(tmp_path):
    path = tmp_path / "records.jsonl"
    with (
        open_records(path, SETTINGS, IDS, 2, 2),
        pytest.raises(RecordsError, match="are being written by another process"),
        open_records(path, SETTINGS, IDS, 2, 2),
    ):
        pass


FLAGS = ["--dataset", "arithmetic", "--samples", "8", "--num-generations", "3", "--batch-size", "4",
         "--dtype", "float32", "--max-prompt-length", "120", "--max-completion-length", "12",
         "--problems-at-once", "2"]  # fmt: skip


def test_an_interrupted_evaluation_ends_as_if_nobody_had_stopped_it(tmp_path, capsys):
    """Ctrl-C in the third of four parts; then the same records and the same result, byte for byte, of the problems of
    the test split, also where two replicas go on. Other settings are refused.
    """
    model = str(small.bf16(tmp_path / "model", shards=1))
    through, stopped, calls = tmp_path / "through.jsonl", tmp_path / "stopped.jsonl", []
    assert main([model, *FLAGS, "--records", str(through), "--output", str(tmp_path / "through.json")]) == 0

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(*arguments, **options)

    assert main([model, *FLAGS, "--records", str(stopped)], interrupted) == STOPPED
    there, shared = stopped.read_bytes(), tmp_path / "shared.jsonl"
    shared.write_bytes(there)
    assert there.count(b"\n") == 5 and through.read_bytes().startswith(there)
    capsys.readouterr()
    assert main([model, *FLAGS, "--records", str(stopped), "--output", str(tmp_path / "stopped.json")]) == 0
    told = capsys.readouterr().out
    assert "4 of 8 problems are in the records" in told
    for silence in ("reading and tokenizing arithmetic …", f"loading {model} …", "sampling; the first problems wait"):
        assert silence in told
    assert stopped.read_bytes() == through.read_bytes()
    assert (tmp_path / "stopped.json").read_bytes() == (tmp_path / "through.json").read_bytes()
    result = runs.read_json(tmp_path / "through.json")
    given = parse([model, *FLAGS, "--records", str(shared), "--devices", "2"])
    found = on_replicas(2, lambda replicas: run(*given, generate, replicas))
    assert [json.loads(json.dumps(dataclasses.asdict(one))) for one in found] == [result] * 2
    assert shared.read_bytes() == through.read_bytes()
    assert result["problems"] == 8 and set(result["estimates"]) == {"avg@3", "pass@2", "pass@3", "maj@3"}
    items = [json.loads(line) for line in through.read_text().splitlines()[1:]]
    problems = load_dataset("arithmetic", "test", limit=8).problems
    assert [(item["prompt"], item["gold"]) for item in items] == [(one.prompt, one.answer) for one in problems]
    assert main([model, *FLAGS, "--records", str(stopped), "--temperature", "0.5"]) == 2
    assert "with temperature 0.6, this call has 0.5" in capsys.readouterr().err
