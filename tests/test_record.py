"""`tools/record.py`: result files say where a commit is known from, and keep what another call measured."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A repository with one commit of two files, and its git."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "tools" / "results").mkdir(parents=True)
    for name in ("code.py", "tools/results/rows.json"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    return tmp_path, git


def test_git_says_the_commit(tool, checkout):
    root, git = checkout
    record, head = tool("record"), git("rev-parse", "--short", "HEAD")
    assert record.commit_of(None, root) == (head, "git")
    assert record.commit_of(head[:5], root) == (head, "git")
    with pytest.raises(SystemExit, match="--commit says 1234567, but this checkout is at " + head):
        record.commit_of("1234567", root)


def test_a_changed_file_marks_the_commit_but_results_do_not(tool, checkout):
    root, git = checkout
    record, head = tool("record"), git("rev-parse", "--short", "HEAD")
    (root / "tools/results/rows.json").write_text("2")
    (root / "untracked").write_text("2")
    assert record.commit_of(None, root) == (head, "git")
    (root / "code.py").write_text("2")
    assert record.commit_of(None, root) == (head + "-dirty", "git")


def test_rows_of_two_calls(tool, tmp_path, monkeypatch):
    """A later call replaces the same case and leaves the others with the commit that they were measured at."""
    record, path = tool("record"), tmp_path / "results" / "rollout.json"
    commits = iter([("aaa", "git"), ("bbb-dirty", "git"), ("ccc", "--commit")])
    monkeypatch.setattr(record, "commit_of", lambda given: next(commits))
    rows = [{"batch": 8, "tokens_per_s": 1.0}, {"batch": 32, "tokens_per_s": 2.0}]
    record.write_rows(path, rows, None, {"gpu": "a GPU"})
    record.write_rows(path, [{"batch": 32, "tokens_per_s": 3.0, "kv_cache_dtype": "auto"}], None, {"gpu": "a GPU"})
    record.write_rows(
        path, [{"batch": 32, "tokens_per_s": 4.0, "kv_cache_dtype": "fp8_e4m3"}], None, {"gpu": "another"}
    )
    stored = json.loads(path.read_text())
    assert [(row["commit"], row["tokens_per_s"]) for row in stored["rows"]] == [
        ("aaa", 1.0),
        ("bbb-dirty", 3.0),
        ("ccc", 4.0),
    ]
    assert {"date", "command", "driver"} < stored["meta"].keys()
    assert (stored["meta"]["gpu"], stored["meta"]["commit_from"]) == ("another", "--commit")


def test_merged_rows_stand_beside_those_of_other_cases(tool, tmp_path):
    """As if written there: the same case is replaced, and `meta` is that of the other file."""
    record = tool("record")
    there, here = tmp_path / "there.json", tmp_path / "here.json"
    about = {"commit": "new", "date": "2026-01-02", "command": "python a.py --out /x"}
    there.write_text(json.dumps({"meta": about, "rows": [{"batch": 8, "seconds": 1.0}]}))
    old = [{"batch": 8, "seconds": 2.0, "commit": "old"}, {"batch": 32, "seconds": 3.0, "commit": "old"}]
    here.write_text(json.dumps({"meta": {}, "rows": old}))
    record.merge(there, here)
    stored = json.loads(here.read_text())
    assert stored["rows"] == [old[1], {"commit": "new", "date": "2026-01-02", "batch": 8, "seconds": 1.0}]
    assert stored["meta"] == {**about, "command": "python a.py"}
