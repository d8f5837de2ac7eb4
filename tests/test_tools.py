"""Every program of `tools` starts and explains itself; those that are cheap do a little of their work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted(path.stem for path in (ROOT / "tools").glob("*.py") if "ArgumentParser(" in path.read_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(name, tool, monkeypatch, capsys):
    """The program can be imported, and its flags are described."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        tool(name).main()
    assert end.value.code == 0 and "usage: " in capsys.readouterr().out


def test_every_planted_bug_occurs_in_the_code(tool):
    """A change of the code that leaves a bug of `tools/mutations.toml` behind has to mend it."""
    assert len(tool("mutate").load()) >= 30


def test_random_policies_have_the_published_spread(tool, monkeypatch):
    """Standard deviation of dequantized weights is that of bf16 ones, 0.02."""
    random_policy = tool("random_policy")
    weight = random_policy._nvfp4(jax.random.key(0), 64, 256)
    from qerl_kernels.nvfp4_matmul import reference

    assert float(reference.dequantize(weight).std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.nightly
def test_what_fits_prints_a_table(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["what_fits.py", "--batch", "8"])
    tool("what_fits").main()
    assert "7B" in capsys.readouterr().out


def test_a_profile_is_read(tool):
    """Gaps between kernels by hand: one kernel lies within another, a copy to the host runs alone."""
    timing = tool("timing")
    spans = {"a": (10, 5), "long": (12, 20), "inside": (14, 2), "MemcpyD2H": (33, 4), "b": (40, 10)}
    [gap] = timing.gaps([timing.Kernel(1e6 * start, 1e6 * length, name) for name, (start, length) in spans.items()])
    assert gap == (pytest.approx(8e-3), "long", "b")


def test_stored_results_have_meta_and_flat_rows():
    for path in (ROOT / "tools" / "results").glob("*/*.json"):
        content = json.loads(path.read_text())
        assert {"meta", "rows"} <= set(content), path
        assert all(isinstance(row, dict) for row in content["rows"]), path
