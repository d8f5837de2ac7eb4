"""Records of an evaluation: what a kill may leave, what is refused, and a real process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import runs

from qerl_jax.evaluate import main
from qerl_jax.evaluation.records import RecordsError, open_records
from qerl_jax.evaluation.summary import Item
from qerl_jax.run.devices import DETERMINISTIC_FLAGS

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
    assert json.loads(header) == {"version": 1, "settings": SETTINGS} and len(lines) == 3 and lines[-1] == ""


def test_every_cut_leaves_whole_parts(tmp_path):
    """The file of a process that was killed after any of its bytes."""
    path = tmp_path / "records.jsonl"
    write(path, IDS)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        items = sum(end <= size for end in ends) - 1
        kept = 5 if items == 5 else max(items, 0) // 2 * 2
        assert write(path, IDS[kept:]) == IDS[:kept], size
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.0}, "were written with temperature 0.6, this call has 0.0: name another file"),
        ({"dataset": "gsm8k"}, "dataset 'arithmetic', this call has 'gsm8k'"),
        ({"few_shot": "wei"}, "few_shot None, this call has 'wei'"),
    ],
)
def test_other_settings_are_refused(tmp_path, change, words):
    path = tmp_path / "records.jsonl"
    write(path, IDS[:2])
    before = path.read_bytes()
    with pytest.raises(RecordsError, match=words):
        write(path, IDS[2:4], SETTINGS | change)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "\n", "{}\n", "[1]\n", "not JSON\n", '{"settings": 3, "version": 1}\n', "x"])
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
        ("{}", "line 4 is no item of an evaluation: {} has other fields than"),
        ("[1]", r"line 4 is no item of an evaluation: \[1\] has other"),
        ("[", "line 4 is no item"),
        (json.dumps(sound), "problem 3 where"),
        (json.dumps(sound | {"verdicts": ["correct"]}), r"verdicts is \['correct'\] in an item of 2 completions"),
        (json.dumps(sound | {"verdicts": ["correct", "good"]}), r"verdicts is \['correct', 'good'\]"),
        (json.dumps(sound | {"lengths": [7, None]}), r"lengths is \[7, None\]"),
        (json.dumps(sound | {"answers": "½"}), "answers is '½'"),
        (json.dumps(sound | {"finish": ["eos", 0]}), "finish is"),
        (json.dumps(sound | {"majority": 2}), "majority is 2 in an item of 2"),
        (json.dumps(sound | {"prompt": None}), "prompt is None"),
    ):
        path.write_text(good + line + "\n")
        with pytest.raises(RecordsError, match=words):
            write(path, [])
    path.write_text(good)
    with pytest.raises(RecordsError, match="line 4 holds problem 5 where the end should be"):
        write(path, [5])
        write(path, [], expected=IDS[:2], at_once=1)


def test_one_process_at_a_time(tmp_path):
    path = tmp_path / "records.jsonl"
    with (
        open_records(path, SETTINGS, IDS, 2, 2),
        pytest.raises(RecordsError, match="are being written by another process"),
        open_records(path, SETTINGS, IDS, 2, 2),
    ):
        pass


FLAGS = ["--dataset", "arithmetic", "--samples", "12", "--num-generations", "3", "--batch-size", "4",
         "--dtype", "float32", "--max-completion-length", "48", "--problems-at-once", "2",
         "--deterministic"]  # fmt: skip


def start(*flags: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "qerl_jax.evaluate", "tiny", *FLAGS, *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def test_a_killed_evaluation_ends_as_if_nobody_had_killed_it(tmp_path, monkeypatch, capsys):
    """SIGKILL after some parts, in the next one; then the same records and the same result, byte for byte. Other
    settings are refused, and the finished records need no model.
    """
    through, killed = tmp_path / "through.jsonl", tmp_path / "killed.jsonl"
    flags = [os.environ.get("XLA_FLAGS", ""), *DETERMINISTIC_FLAGS]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))  # in this process JAX has started already
    assert main(["tiny", *FLAGS, "--records", str(through), "--output", str(tmp_path / "through.json")]) == 0
    process = start("--records", str(killed))
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if killed.exists() and killed.read_bytes().count(b"\n") >= 5:
            break
        time.sleep(0.001)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    there = killed.read_bytes()
    assert 5 <= there.count(b"\n") < 13 and through.read_bytes().startswith(there)
    output = finish(start("--records", str(killed), "--output", str(tmp_path / "killed.json")))
    lines = there.count(b"\n") - 1
    assert f"{lines // 2 * 2} of 12 problems are in the records" in output
    assert killed.read_bytes() == through.read_bytes()
    assert (tmp_path / "killed.json").read_bytes() == (tmp_path / "through.json").read_bytes()
    result = runs.read_json(tmp_path / "through.json")
    assert result["problems"] == 12 and set(result["estimates"]) == {"avg@3", "pass@2", "pass@3", "maj@3"}
    assert main(["tiny", *FLAGS, "--records", str(killed), "--temperature", "0.5"]) == 2
    assert "with temperature 0.6, this call has 0.5" in capsys.readouterr().err
