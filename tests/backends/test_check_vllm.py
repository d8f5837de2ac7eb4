"""`tools/check_vllm.py`: each command has flags that its program takes, and a failure does not stop the rest."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from qerl_jax import train
from qerl_jax.config import flags


@pytest.fixture
def check(tool, monkeypatch, tmp_path):
    """The program, with `qerl_jax` and the tools replaced by a program that ends with 0, but for commands named."""
    module = tool("check_vllm")
    (tmp_path / "stand_in.py").write_text("import sys\nprint('ran')\nsys.exit(int('FAILS' in sys.argv))")
    real, ran = module.Checks.run, {}

    def run(self, name, *command, cpu=False):
        ran[name] = [str(word) for word in command]
        if name.startswith("tiny-train"):
            (self.work / "tiny" / "adapter").mkdir(parents=True)
        if name == "0.5B-train":
            (self.work / "train").mkdir()
            (self.work / "train" / "metrics.jsonl").write_text("{}\n")
        return real(self, name, tmp_path / "stand_in.py", *(["FAILS"] if "compare" in name else []))

    monkeypatch.setattr(module.Checks, "run", run)
    monkeypatch.setattr("bench_vllm.adapter_directory", lambda size, rank, folder: None)

    def main(*stages):
        out = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["check_vllm.py", *out, "--stages", *stages])
        return module.main(), ran, json.loads((tmp_path / "out" / "summary.json").read_text())

    return main


def test_every_command_is_taken(check, tool):
    code, ran, results = check("tiny", "0.5B", "7B", "train", "serve")
    assert code == 1 and {row["name"] for row in results if row["code"]} == {name for name in ran if "compare" in name}
    assert {row["name"] for row in results} == ran.keys()
    for name in ("tiny-train", "0.5B-train"):
        config = train.parse(ran[name][2:])
    assert (config.rollout_backend, config.train_norms, config.num_rollouts) == ("vllm", True, 2)
    evaluate = importlib.import_module("qerl_jax.evaluate")
    kind = flags.fields_of_config(evaluate._FIELDS, (evaluate._OwnArguments,))
    for backend in ("vllm", "jax"):
        arguments = flags.parse(kind, ran[f"tiny-evaluate-{backend}"][2:], "evaluate", "")
        assert evaluate._config(arguments).rollout_backend == backend
    compared = [words for name, words in ran.items() if name.endswith("-compare")]
    assert [Path(words[0]).name for words in compared] == ["compare_vllm.py"] * 4
    parser = tool("compare_vllm").parser()
    for words in compared:
        assert parser.parse_args(words[1:]).adapter is not None
    assert [ran[f"serve-{kind}"][1] for kind in ("merged", "merged-nvfp4", "vllm")] == ["--answer"] * 3
