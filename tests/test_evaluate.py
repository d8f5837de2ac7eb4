"""The command line of the evaluation: datasets by name and path, what it tells, bad input."""

from __future__ import annotations

import pytest
import runs

from qerl_jax.evaluate import main

SHORT = ["--max-completion-length", "4", "--batch-size", "4", "--dtype", "float32"]
TOO_LONG = ["--dataset", "arithmetic", "--samples", "3", "--max-prompt-length", "4"]


def test_a_local_copy_of_a_preset(data, tmp_path, capsys):
    """Five records, one without a number for an answer, and four tokens, in which no answer can be given."""
    output = tmp_path / "result.json"
    flags = ["--dataset", f"gsm8k:{data / 'presets' / 'gsm8k'}", "--split", "train", "--system-prompt", ""]
    assert main(["tiny", *flags, *SHORT, "--temperature", "0", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("left out 1 of 5 records: 1 × no single number after '####' in 'answer'") == 1
    assert "4 problems" in printed
    result = runs.read_json(output)
    assert (result["problems"], result["truncated"], result["accuracy"]) == (4, 1.0, 0.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dataset", "gsm9k"], "did you mean 'gsm8k'?"),
        (["--dataset", "codeforces"], "'codeforces' has no split 'test' on the hub, only ['train']"),
        (TOO_LONG, "max_prompt_length 4; the shortest has"),
        ([*TOO_LONG, "--overlong-prompts", "error"], "the prompt of problem 0 has"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, words, capsys):
    assert main(["tiny", *flags, *SHORT]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
