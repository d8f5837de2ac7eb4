"""The parser's refusals of a command line: one line each, with the nearest known flag."""

import contextlib
import os

import pytest

from qerl_jax import export, quantize, train
from qerl_jax.config import flags
from qerl_jax.evaluate import main as evaluate

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
        (train.main, ["--lr", "1"], "--lr is a name of other programs: use --learning-rate"),
        (train.main, ["--learning-rate", "a b"], "learning_rate must be a number, got 'a b'"),
        (train.main, ["--batch-size", "12"], "num_generations 8 does not divide batch_size 12"),
        (train.main, ["--seed", "1", "--seed=2"], "--seed is given twice"),
        (train.main, ["--train-norms", "--no-train-norms"], "--no-train-norms contradicts --train-norms"),
        (evaluate, ["tiny", "--samples", "1_0"], "samples must be a number, got '1_0'"),
        (train.main, ["--learning-rate"], "--learning-rate needs a value"),
        (train.main, ["--loss-type", "x"], f"loss_type 'x' is not one of {LOSSES}"),
        (evaluate, ["tiny", "--bach-size", "1"], "unknown flag --bach-size (did you mean --batch-size?)"),
        (evaluate, [], "MODEL is missing: python -m qerl_jax.evaluate MODEL"),
        (quantize.main, ["tiny"], "DST is missing: python -m qerl_jax.quantize SRC DST"),
        (export.main, ["a", "b", "c"], "unexpected argument 'c'"),
        (export.main, ["a", "b", "--as", "gguf"], "--as 'gguf' is not one of ['peft', 'vllm', 'merged']"),
    ],
)
def test_a_refusal_is_one_line(main, argv, said, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        ("--reward-funcs answer overlong --reward-weights 1 0.5", {"reward_weights": (1.0, 0.5)}),
        ("--no-overwrite --train-norms False --use_rslora", {"train_norms": False, "use_rslora": True}),
        ("--dynamic_sampling=true --answer-column True", {"dynamic_sampling": True, "answer_column": "True"}),
        ("--max-steps -1 --dataset_weights None --report-to none", {"max_steps": -1, "dataset_weights": None}),
        ("--system-prompt= --answer-column=--x --lora-alpha 1e1", {"system_prompt": "", "answer_column": "--x"}),
    ],
)
def test_values_of_every_kind(argv, fields):
    config = train.parse(["--model", "m", *argv.split()])
    assert {name: getattr(config, name) for name in fields} == fields


def test_positional_arguments_stand_anywhere(tmp_path):
    for words in ("SRC --overwrite DST", "--overwrite SRC DST", "SRC DST --overwrite True", "--overwrite True SRC DST"):
        found = flags.parse(quantize._Arguments, words.split(), "quantize", "")
        assert found == quantize._Arguments("SRC", "DST", overwrite=True), words


def test_help_names_positional_arguments(capsys):
    with pytest.raises(SystemExit) as stop:
        quantize.main(["--help"])
    captured = capsys.readouterr()
    assert stop.value.code == 0 and not captured.err
    assert "SRC DST" in captured.out and "Directory to write" in captured.out


def test_a_reader_of_the_help_may_stop(capsys):
    """As `| head`: nothing is said, and nothing fails at the end."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed, contextlib.redirect_stdout(closed), pytest.raises(SystemExit) as stop:
        quantize.main(["--help"])
    assert not stop.value.code and not capsys.readouterr().err
