"""Every program of `tools` starts and explains itself; those that are cheap do a little of their work."""

from __future__ import annotations

import json
import shutil
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


def test_a_planted_bug_is_caught_or_survives(tool, tmp_path, monkeypatch, capsys):
    """In a small repository with one test, which sees one of two bugs."""
    mutate = tool("mutate")
    (tmp_path / "code.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_code.py").write_text("from code import double\n\n\ndef test():\n    assert double(2) == 4\n")
    bug = '[[bug]]\nfile = "code.py"\nold = "2 * x"\nnew = "{}"\nbreaks = "{}"\ntests = ["test_code.py"]\n'
    (tmp_path / "bugs.toml").write_text(bug.format("3 * x", "three") + bug.format("x * x", "square"))
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "load", lambda load=mutate.load: load(tmp_path / "bugs.toml", tmp_path))
    monkeypatch.setattr(mutate, "copy_to", lambda to: [shutil.copy(path, to) for path in tmp_path.glob("*.py")])
    assert mutate.main([]) == 1
    said = capsys.readouterr().out
    assert "caught   code.py: three" in said and "SURVIVED code.py: square" in said and "1 of 2 bugs" in said
    (tmp_path / "code.py").write_text("")
    assert mutate.main(["--list"]) == 2


def test_the_tuner_tries_configs_that_fit_and_halves_them(tool):
    """The present config comes first; the fastest wins though it is drawn last, and is timed most often."""
    tune = tool("tune_matmul")
    tried = tune.trials("o_7b", 8, "forward", 12)
    assert len(set(tried)) == 12 and tried[0].config == tune.present("o_7b", 8, "forward")
    n, k = tune.cases.SHAPES["o_7b"]
    for trial in tried:
        is_skinny = isinstance(trial.config, tune.SkinnyConfig)
        assert trial.config.fits(n, k, tune.RANK) if is_skinny else trial.config.fits()
    calls: dict[int, int] = {}

    def time(some, count):
        for one in some:
            calls[one] = calls.get(one, 0) + count
        return {one: 100.0 - one for one in some}

    assert next(iter(tune.halved(range(20), time, 24))) == 19
    assert calls[19] == max(calls.values()) == 3 + 6 + 12 + 24 and calls[0] == 3


def test_a_checkpoint_of_published_shapes_is_described(tool):
    """Parameters of 0.5B by hand, tied head counted once: 494,032,768."""
    from qerl_jax.io.hf_config import parse_config

    make = tool("make_checkpoint")
    config = parse_config(make.hf_config("0.5B"), {}, "0.5B")
    layer = sum(n * k for n, k in config.projection_shapes().values()) + 896 + 2 * 128 + 2 * 896
    assert 24 * layer + 151936 * 896 + 896 == 494_032_768


def test_random_policies_have_the_published_spread(tool, monkeypatch):
    """Standard deviation of dequantized weights is that of bf16 ones, 0.02."""
    random_policy = tool("random_policy")
    weight = random_policy._nvfp4(jax.random.key(0), 64, 256)
    from qerl_kernels.nvfp4_matmul import reference

    assert float(reference.dequantize(weight).std()) == pytest.approx(0.02, rel=0.1)


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
