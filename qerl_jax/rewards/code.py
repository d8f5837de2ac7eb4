"""Reward for programs: the fraction of a problem's tests that a completion's program passes."""

from __future__ import annotations

import contextlib
import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from qerl_jax.rewards import sandbox
from qerl_jax.rewards.outcomes import RewardError, TimedOut, Unparsed

TEST_SECONDS = 5.0
"""Time limit of one test, as in QeRL."""
_FENCE, _STDIO = "```", "stdin_stdout"
_LANGUAGES = ("python", "python3", "py")


def require_sandbox() -> None:
    """Raise RewardError where programs cannot be sandboxed; the reward is not available there."""
    try:
        sandbox.require()
    except sandbox.SandboxError as error:
        raise RewardError(f"reward 'code' cannot confine programs on this machine: {error}") from error


def code(
    *, completions: Sequence[str], verification_info: Sequence[Any], reward_timeout: Sequence[float], **_: object
) -> list[float | None]:
    """Fraction of tests passed by the last ```python block of a completion; each test runs in a sandbox of its own.

    Args:
      completions: completion texts.
      verification_info: one mapping (or its JSON) for each completion, with "language" and "test_cases", as in
        open-r1/verifiable-coding-problems-python: {"type": "stdin_stdout", "input", "output"}, or {"type":
        "function_call", "fn_name", "input": arguments, "output"}.
      reward_timeout: time limit in seconds for all tests of a completion; one test has at most `TEST_SECONDS`. Tests
        not reached count as failed.

    The value is None for another language or without a runnable test (tests that lack a field, or whose arguments are
    not JSON or nested too deep, are skipped). The expected outputs never enter the process that runs the program.
    Departure from QeRL: all lines of the output are compared; the release compares only as many as the shorter output
    has.
    """
    return [
        _fraction_passed(text, info, seconds)
        for text, info, seconds in zip(completions, verification_info, reward_timeout, strict=True)
    ]


def _fraction_passed(completion: str, info: Any, seconds: float) -> float | None:
    tests = _tests(info)
    if not tests:
        return None
    program = extract_program(completion)
    if program is None:
        return Unparsed(0.0)
    end = time.monotonic() + seconds
    passed, in_time = 0, True
    for test in tests:
        left = end - time.monotonic()
        if left <= 0:
            in_time = False
            break
        ok, timed_out = _passes(program, test, min(TEST_SECONDS, left))
        passed, in_time = passed + ok, in_time and not timed_out
    share = passed / len(tests)
    return share if in_time else TimedOut(share)


def _tests(info: Any) -> list[Mapping[str, Any]]:
    """The runnable tests of a problem."""
    try:
        info = json.loads(info) if isinstance(info, str) else info
    except (ValueError, RecursionError):
        return []
    if not isinstance(info, Mapping) or info.get("language", "python") not in _LANGUAGES:
        return []
    tests = info.get("test_cases")
    return [test for test in tests if _can_run(test)] if isinstance(tests, list | tuple) else []


def _can_run(test: Any) -> bool:
    if not isinstance(test, Mapping) or test.get("input") is None or test.get("output") is None:
        return False
    if test.get("type", _STDIO) == _STDIO:
        return True
    try:
        arguments = _arguments(test["input"])
        json.dumps(arguments)
    except (ValueError, TypeError, RecursionError):
        return False
    return isinstance(test.get("fn_name"), str)


def extract_program(completion: str) -> str | None:
    """Contents of the last closed ```python block; None without one."""
    for part in reversed(completion.split(_FENCE)[1:-1]):
        language, newline, program = part.partition("\n")
        if newline and language.strip().lower() in _LANGUAGES:
            return textwrap.dedent(program)  # of a block in a list
    return None


def _passes(program: str, test: Mapping[str, Any], seconds: float) -> tuple[bool, bool]:
    """(is_passed, is_timed_out) of one test."""
    if test.get("type", _STDIO) == _STDIO:
        result = sandbox.run(program, str(test["input"]), seconds)
        return result.ok and _lines(result.output) == _lines(str(test["output"])), result.timed_out
    result = sandbox.run(program, "", seconds, (test["fn_name"], _arguments(test["input"])))
    return result.ok and _returned(result.output, test["output"]), result.timed_out


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _arguments(given: Any) -> list[Any]:
    """The arguments as a list; a text holds one JSON value a line."""
    return [json.loads(line) for line in given.splitlines()] if isinstance(given, str) else list(given)


def _returned(output: str, expected: Any) -> bool:
    """Whether the returned value is the expected one. Some datasets wrap it in a list of one or write it as JSON, a
    string among them.
    """
    forms = [expected]
    try:
        value = json.loads(output)
        with contextlib.suppress(ValueError):
            forms += [json.loads(expected)] if isinstance(expected, str) else []
        return any(_equal(value, form) or (isinstance(form, list) and _equal([value], form)) for form in forms)
    except (ValueError, RecursionError):  # no JSON, or nested too deep to be compared
        return False


def _equal(value: Any, expected: Any) -> bool:
    """Equality of JSON values. Python's takes True for 1 and False for 0."""
    if isinstance(value, list) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_equal(value[key], expected[key]) for key in value)
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected
