"""Inputs from public bug reports, and hostile ones: each is read as the value it states, or refused in one line.

    python tools/hostile_inputs.py [--only WORD]

Configs (flags, YAML), published spellings of config.json, datasets, files of checkpoints and adapters cut short or
damaged (with the tables of `tests`), and what rewards return. Nothing is trained. A case fails where the value is
another one, where the error says nothing of what is wrong, and where it is no error of the input (a trace). Prints a
line for each failure, and the number of passes. Exit code 1: there are failures.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qerl_jax.checkpoint.hf_config import parse_config
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.config import load
from qerl_jax.config.foreign import UNSUPPORTED
from qerl_jax.data.problems import load_dataset
from qerl_jax.messages import shown
from qerl_jax.models.lora import LoraConfig
from qerl_jax.rewards import functions
from qerl_jax.train import parse

TESTS = Path(__file__).resolve().parent.parent / "tests"

Call = Callable[[Path], str | None]
"""Tries an input in an empty directory; returns why it fails, None for a pass."""

NUMBERS = (
    *("7", "+7", "-7", "007", "010", "0o10", "0x10", "1_0", "1:30", "1,000", "1e3", "1e-3", "1E5", ".5", "5.", "1e400"),
    *("1e-400", "1e-320", "nan", ".nan", "inf", "-.inf", "Infinity", "true", "null", "~", "''", "[1]", "{a: 1}", "1 2"),
    *("９", "١", "1.5.2", "--7", "1e", "0b1", "2" * 30, "9" * 5000, "1\u00a0", "½"),
)
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")

YAML = {  # text of a file: the values of some fields, or words of the error
    "model: m\nseed: 3\n": {"model": "m", "seed": 3},
    "{model: m, seed: 3, dataset: a.jsonl}": {"seed": 3, "dataset": ("a.jsonl",)},
    "model: no\nsystem_prompt: yes\n": {"model": "no", "system_prompt": "yes"},
    "model: 1e3\n": {"model": "1e3"},
    "model: 2024-01-01\n": {"model": "2024-01-01"},
    "\ufeffmodel: m\n": {"model": "m"},
    "model: m\r\nseed: 3\r\n": {"model": "m", "seed": 3},
    "model: m\nreport_to: none\nlora_dropout: 0.0\nuse_vllm: false\n": {"report_to": ()},
    "": {"model": ""},
    "- model\n- m\n": "",
    "model\n": "",
    "model: m\nmodel: n\n": "given twice",
    "model: m\n\tseed: 3\n": "",
    "model: [m\n": "",
    "model: !!python/object/apply:os.system [id]\n": "",
    "model: {a: b}\n": "model",
    "seed: [1, 2]\n": "seed",
    "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n": "",
    "train_norms: maybe\n": "train_norms",
    "loss_type: GRPO\n": "loss_type",
    "lerning_rate: 1\n": "learning_rate",
    "3: 4\n": "3",
    "? [a, b]\n: 1\n": "",
    "model: 'm\\0'\n": {"model": "m\\0"},
    'model: "m\\0"\n': "model",
    "--- \nmodel: m\n--- \nmodel: n\n": "",
    "model: m\nsigma_start: 0.01\n": "sigma",
}

PUBLISHED = {  # spellings of config.json in published checkpoints: (changes, attribute, value, or words of the error)
    "rope in rope_scaling alone": ({"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta", 1e6),
    "rope of transformers 5": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta", 1e6),
    "both": ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta", 1e6),
    "none": ({}, "rope_theta", 1e4),
    "several ends": ({"eos_token_id": [2, 0]}, "eos_token_ids", (2, 0)),
    "null head_dim": ({"head_dim": None}, "head_dim", 8),
    "null sliding window": ({"sliding_window": None, "use_sliding_window": False}, "hidden_size", 16),
    "numbers as text": ({"hidden_size": "16"}, None, "hidden_size"),
    "a fraction": ({"num_hidden_layers": 2.5}, None, "num_hidden_layers"),
    "a truth value": ({"num_hidden_layers": True}, None, "num_hidden_layers"),
    "negative": ({"vocab_size": -5}, None, "vocab_size"),
    "heads that do not divide": ({"num_key_value_heads": 3, "num_attention_heads": 4}, None, "num_key_value_heads"),
    "no architecture": ({"model_type": "gpt2"}, None, "gpt2"),
    "vision": ({"model_type": "qwen2_vl"}, None, "qwen2_vl"),
    "experts": ({"model_type": "qwen3_moe"}, None, "qwen3_moe"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, None, "rope"),
    "another activation": ({"hidden_act": "gelu"}, None, "gelu"),
    "an end beyond the vocabulary": ({"eos_token_id": 10**9}, None, "eos_token_id"),
    "sliding windows": ({"use_sliding_window": True, "max_window_layers": 1}, None, "use_sliding_window"),
}

ROW = '{"question": "What?", "answer": "4"}\n'
DATASETS = {  # content of rows.jsonl: pairs of question and answer, or words of the error
    ROW: [("What?", "4")],
    ROW.rstrip(): [("What?", "4")],
    "\n\n" + ROW + "\n": [("What?", "4")],
    ROW.replace("\n", "\r\n"): [("What?", "4")],
    "\ufeff" + ROW: [("What?", "4")],
    '{"question": "What?"}\n' + ROW: [("What?", "4")],
    ROW + '{"answer": "4"}\n': [("What?", "4")],
    '{"question": "What?", "answer": 4}\n': [("What?", "4")],
    '{"question": "What?", "answer": 4.0}\n': [("What?", "4")],
    '{"question": "What?", "answer": 2.55}\n': [("What?", "2.55")],
    '{"question": "What?", "answer": "so\\n#### 1,200"}\n': [("What?", "1,200")],
    '{"question": "W\\u0068at?", "answer": "4"}\n': [("What?", "4")],
    '{"question": "What?", "answer": "4", "question": "Who?"}\n': "rows.jsonl",
    '{"question": "What?", "answer": null}\n': "rows.jsonl",
    '{"question": "", "answer": "4"}\n': "rows.jsonl",
    '{"question": "a\\ud800", "answer": "4"}\n': "rows.jsonl",
    '{"question": ["What?"], "answer": "4"}\n': "rows.jsonl",
    '{"question": "What?", "answer": true}\n': "rows.jsonl",
    '{"question": "What?", "answer": NaN}\n': "rows.jsonl",
    "[1]\n": "rows.jsonl",
    "{}\n": "rows.jsonl",
    "": "rows.jsonl",
    "{": "rows.jsonl",
    "[" * 50_000: "rows.jsonl",
    ROW + "\x00\n": "rows.jsonl",
    '{"prompt": "What?", "solution": "4"}\n': "question",
}

REWARDS = {  # body of a reward over two completions: its values, or words of the error
    "return [1, 0]": [1.0, 0.0],
    "return (1.0, None)": [1.0, None],
    "return [True, False]": [1.0, 0.0],
    "import numpy; return numpy.array([0.5, 2])": [0.5, 2.0],
    "return (float(text == 'a') for text in completions)": [1.0, 0.0],
    "return [float('nan'), 1]": "completion 0",
    "return [1e400, 1]": "completion 0",
    "return [10**400, 1]": "completion 0",
    "return ['1', 1]": "completion 0",
    "return [[1], 1]": "completion 0",
    "return [1]": "1 values for 2",
    "return []": "0 values for 2",
    "return None": "raised",
    "return 1": "raised",
    "return '10'": "returned a str",
    "return {0: 1, 1: 2}": "returned a dict",
    "raise KeyError('x')": "line 2",
    "raise SystemExit(3)": "line 2",
    "return undefined": "line 2",
    "return [1 / 0, 1]": "line 2",
}


def refused_or(expected: Any, call: Callable[[], Any]) -> str | None:
    """None where a call returns the expected value, or, where a text is expected, ends in one error of the input with
    that text in it; else the reason why not.
    """
    try:
        value = call()
    except (ValueError, OSError) as error:
        said = " ".join(str(error).split())
        if not isinstance(expected, str):
            return f"refused, {expected!r} expected: {said}"
        return None if expected in said and len(said) > 20 else f"says {said!r}, expected is {expected!r}"
    except BaseException as error:
        return f"a trace: {type(error).__name__}: {error}"
    if isinstance(expected, str):
        return f"accepted as {shown(value)}, an error is expected"
    return None if value == expected else f"read as {shown(value)}, expected is {expected!r}"


def numbers() -> Iterator[tuple[str, Call]]:
    """Every text as a whole number and as a fraction, by flag and by file: a decimal number is read as that number or
    refused, anything else refused.
    """

    def check(place: Path, field: str, text: str, by_flag: bool) -> str | None:
        (place / "c.yaml").write_text(f"model: m\n{field}: {text}\n")

        def read() -> float:
            config = parse(["--model", "m", f"--{field}={text}"]) if by_flag else load(place / "c.yaml")
            return getattr(config, field)

        return accepted_number(text, field, read)

    for field in ("seed", "learning_rate"):
        for text in NUMBERS:
            for by_flag in (True, False):
                name = f"{field}{'=' if by_flag else ': '}{text[:20]}"
                yield name, functools.partial(check, field=field, text=text, by_flag=by_flag)


def accepted_number(text: str, field: str, read: Callable[[], float]) -> str | None:
    """None where a text is read as the number that it is, or refused by the name of its field."""
    is_number = _NUMBER.fullmatch(text) is not None
    try:
        value = read()
    except ValueError as error:
        whole = is_number and re.fullmatch(r"\+?(0|[1-9][0-9]{0,8})", text) is not None
        return f"refused: {error}" if whole else None if field in str(error) else f"says {error}"
    except BaseException as error:
        return f"a trace: {type(error).__name__}: {error}"
    if not is_number:
        return f"{text!r} is read as {value!r}"
    return None if math.isfinite(value) and value == float(text) else f"{text!r} is read as {value!r}"


def files() -> Iterator[tuple[str, Call]]:
    """YAML files, datasets, rewards."""

    def read_yaml(place: Path, text: str, expected: Any) -> str | None:
        (place / "c.yaml").write_text(text, encoding="utf-8")

        def values() -> dict[str, Any]:
            config = vars(load(place / "c.yaml"))
            return {name: config[name] for name in expected} if isinstance(expected, dict) else config

        return refused_or(expected, values)

    def read_rows(place: Path, text: str, expected: Any) -> str | None:
        (place / "rows.jsonl").write_text(text, encoding="utf-8")

        def pairs() -> list[tuple[str, str]]:
            return [(one.prompt, one.answer) for one in load_dataset(str(place / "rows.jsonl"), "train").problems]

        return refused_or(expected, pairs)

    def grade(place: Path, text: str, expected: Any) -> str | None:
        (place / "mine.py").write_text(f"def reward(completions, **columns):\n    {text}\n")
        name = f"{place / 'mine.py'}:reward"
        rows = {"prompts": ["p", "p"], "completions": ["a", "b"], "answer": ["", ""]}
        return refused_or(expected, lambda: functions.call(name, functions.load_reward(name), rows))

    for kind, table, check in (
        ("yaml", YAML, read_yaml),
        ("dataset", DATASETS, read_rows),
        ("reward", REWARDS, grade),
    ):
        for text, expected in table.items():
            yield f"{kind} {text[:60]!r}", functools.partial(check, text=text, expected=expected)
    for what, names in UNSUPPORTED.items():
        for name in names.split():
            flags = ["--model", "m", f"--{name}", "8"]
            yield f"flag {name}", lambda place, f=flags, w=what: refused_or(f"no {w}", lambda: parse(f))


def models() -> Iterator[tuple[str, Call]]:
    """Spellings of config.json; every file of four layouts cut at several places; the damages of the tests."""
    sys.path.append(str(TESTS))
    import small
    import test_bad_input
    import test_export_command

    for name, (changes, attribute, expected) in PUBLISHED.items():
        raw = {key: value for key, value in small.CONFIG.items() if key != "rope_theta"} | changes
        yield (
            f"config.json, {name}",
            lambda place, r=raw, a=attribute, e=expected: refused_or(
                e, lambda: getattr(parse_config(r, {}, "config.json"), a or "hidden_size")
            ),
        )

    def cut(place: Path, layout: Callable[[Path], Path], file: str, share: float) -> str | None:
        path = layout(place / "model") / file
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        return refused_or(str(place), lambda: load_policy(place / "model", lora=LoraConfig(2)))

    for layout in (small.bf16, small.nvfp4, small.modelopt, small.nf4):
        with tempfile.TemporaryDirectory() as place:
            names = sorted(path.name for path in layout(Path(place) / "model").iterdir())
        for file in (name for name in names if name.endswith((".safetensors", "config.json", "tokenizer.json"))):
            for share in (0, 0.001, 0.4, 0.98):
                arguments = {"layout": layout, "file": file, "share": share}
                yield f"{layout.__name__}, {file} cut to {share}", functools.partial(cut, **arguments)

    def damaged(place: Path, case: str) -> str | None:
        layout, damage, message = test_bad_input.MODELS[case]
        damage(layout(place / "model"))
        first = message.replace("MODEL", str(place / "model")).partition("…")[0]
        return refused_or(first, lambda: load_policy(place / "model", lora=LoraConfig(2)))

    def adapter(place: Path, case: str) -> str | None:
        damage, message = test_export_command.BAD[case]
        test_export_command.put_model_and_adapter(place)
        damage(place)
        first = message.replace("MODEL", str(place / "model")).replace("ADAPTER", str(place / "adapter"))
        load = lambda: load_policy(place / "model", adapter=place / "adapter")  # noqa: E731
        return refused_or(first.partition("…")[0], load)

    for case in test_bad_input.MODELS.keys() - {"no tokenizer"}:  # without a prompt nothing asks for one
        yield f"model, {case}", functools.partial(damaged, case=case)
    for case in test_export_command.BAD:
        yield f"adapter, {case}", functools.partial(adapter, case=case)


def failures(only: str = "") -> tuple[list[str], int]:
    """A line for each case that fails, of those with a word in their name, and the number of the others."""
    failed, passed = [], 0
    for group in (numbers, files, models):
        for name, call in group():
            if only in name:
                with tempfile.TemporaryDirectory() as place:
                    reason = call(Path(place))
                failed += [f"{name}: {reason}"] if reason else []
                passed += reason is None
    return failed, passed


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="cases with a word in their name")
    failed, passed = failures(parser.parse_args().only)
    print("\n".join([*failed, f"{passed} passed, {len(failed)} failed"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
