"""`tools/compare_rollouts.py` with stand-ins for the benchmarks: all start, one times at a time, ours last."""

import json
import sys

import pytest

VLLM = """
import json, sys, time
from pathlib import Path
out, name = Path(sys.argv[sys.argv.index("--out") + 1]), sys.argv[sys.argv.index("--format") + 1]
note = lambda what: (out / "order").open("a").write(f"{what} {name}\\n")
note("start")
if name == FAILS:
    sys.exit("no memory")
print("READY", flush=True)
input()
note("time")
time.sleep(0.2)
note("end")
(out / "vllm.json").write_text(json.dumps({"rows": []}))
print("timed", *sys.argv[1:])
"""
OURS = """
import sys
from pathlib import Path
assert Path(sys.argv[sys.argv.index("--rival") + 1]).exists()
(Path(sys.argv[sys.argv.index("--out") + 1]) / "order").open("a").write("ours\\n")
print("rollout", *sys.argv[1:])
"""


@pytest.fixture
def compare(tool, monkeypatch, tmp_path):
    """Runs the program on stand-ins; returns the order of what they did."""
    module = tool("compare_rollouts")
    monkeypatch.setattr(module, "TOOLS", tmp_path)
    (tmp_path / "bench_rollout.py").write_text(OURS)

    def run(*arguments: str, fails: str = "") -> list[str]:
        (tmp_path / "bench_vllm.py").write_text(VLLM.replace("FAILS", json.dumps(fails)))
        command = ["compare_rollouts.py", "7B", "--out", str(tmp_path / "out"), *arguments]
        monkeypatch.setattr(sys, "argv", command)
        try:
            module.main()
        finally:
            found = (tmp_path / "out" / "order").read_text().splitlines()
        return found

    return run


def test_one_side_is_timed_at_a_time(compare, capsys):
    order = compare("--batch", "8", "--in-process")
    assert sorted(order[:2]) == ["start bf16", "start nvfp4"]
    assert order[2:] == ["time nvfp4", "end nvfp4", "time bf16", "end bf16", "ours"]
    said = capsys.readouterr().out
    assert "--in-process" in said and "--native-sampler" not in said and "rollout 7B --batch 8 --new-tokens 256" in said


def test_an_engine_that_does_not_start_ends_the_comparison(compare, tmp_path):
    with pytest.raises(SystemExit, match=r"(?s)vllm-7B-bf16 is not ready:.*no memory"):
        compare(fails="bf16")
    order = (tmp_path / "out" / "order").read_text()
    assert "time" not in order and "ours" not in order
