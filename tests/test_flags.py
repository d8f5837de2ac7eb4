"""The parser's refusals of a command line: one line each, with the nearest known flag."""

from __future__ import annotations

import io
import sys

import pytest

from qerl_jax import export, quantize, train
from qerl_jax.evaluate import main as evaluate

MODEL = 'Hugging Face directory, ORGANIZATION/NAME on the hub, or "tiny" for the bundled policy.'
LOSSES = "['grpo', 'bnpo', 'dapo', 'dr_grpo', 'cispo']"


@pytest.mark.parametrize(
    ("main", "argv", "said"),
    [
        (train.main, ["--learnin-rate", "3"], "unknown flag --learnin-rate (did you mean --learning-rate?)"),
        (train.main, ["--no-trainnorms"], "unknown flag --no-trainnorms (did you mean --no-train-norms?)"),
        (
            train.main,
            ["--qqqq", "1", "--sed", "2", "--seed", "1"],
            "unknown flag --qqqq; unknown flag --sed (did you mean --seed?)",
        ),
        (train.main, ["stray", "--seed", "1"], "unexpected argument 'stray': its arguments are flags, such as --model"),
        (train.main, ["--lx", "1"], "unknown flag --lx"),
        (
            train.main,
            ["--lr", "1"],
            "--lr is a name of other programs: use --learning-rate; docs/migration.md has the whole list",
        ),
        (train.main, ["--learning-rate", "a b"], "learning_rate must be a number, got 'a b'"),
        (train.main, ["--batch-size", "12"], "num_generations 8 does not divide batch_size 12"),
        (train.main, ["--seed", "1", "--seed=2"], "--seed is given twice"),
        (train.main, ["--train-norms", "--no-train-norms"], "--no-train-norms contradicts --train-norms"),
        (evaluate, ["tiny", "--samples", "1_0"], "samples must be a number, got '1_0'"),
        (train.main, ["--learning-rate"], "Missing value for argument '--learning-rate'. Expected 1 values."),
        (train.main, ["--loss-type", "x"], f"loss_type 'x' is not one of {LOSSES}"),
        (evaluate, ["tiny", "--bach-size", "1"], "unknown flag --bach-size (did you mean --batch-size?)"),
        (evaluate, [], f"Missing from python -m qerl_jax.evaluate: MODEL {MODEL} (required)"),
        (
            quantize.main,
            ["tiny"],
            "Missing from python -m qerl_jax.quantize: DST Directory to write, in one atomic step. (required)",
        ),
        (export.main, ["a", "b", "c"], "unexpected argument 'c'"),
        (
            export.main,
            ["a", "b", "--as", "gguf"],
            "--as 'gguf' is not one of ['peft', 'vllm', 'merged']",
        ),
    ],
)
def test_a_refusal_is_one_line(main, argv, said, monkeypatch, capsys):
    """On a narrow terminal, too, for which the parser draws a box of its width in its encoding."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main(argv) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


def test_a_refusal_on_a_terminal_of_colours(monkeypatch, capsys):
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO(), "utf-8"))
    assert train.main(["--seed"]) == 2
    assert capsys.readouterr().err == "error: Missing value for argument '--seed'. Expected 1 values.\n"


def test_help_names_positional_arguments(capsys):
    with pytest.raises(SystemExit) as stop:
        quantize.main(["--help"])
    captured = capsys.readouterr()
    assert stop.value.code == 0 and not captured.err
    assert "SRC DST" in captured.out and "Directory to write" in captured.out
