"""The reward for programs: extraction, tests, time limits and the permission to run them."""

import json
import time
from types import SimpleNamespace

import pytest
from processes import missing_sandbox

from qerl_jax.config import Config
from qerl_jax.rewards import code as programs
from qerl_jax.rewards.code import code, extract_program
from qerl_jax.rewards.load import load_rewards
from qerl_jax.rewards.outcomes import RewardError, TimedOut, Unparsed
from qerl_jax.rewards.sandbox import Result
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.prepare import check

MISSING = missing_sandbox()
confined = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def test_extract_program():
    assert extract_program("```python\na\n``` or\n```py\nb\n```") == "b\n"
    assert extract_program("```\nstray\n```python\na\n```") == "a\n"
    assert extract_program("```cpp\na\n```") is None
    assert extract_program("```python\nnever closed") is None
    assert extract_program("print(1)") is None
    for language in ("Python", "PY ", "python3"):
        assert extract_program(f"```{language}\nprint(1)\n```") == "print(1)\n"
    item = "1. So:\n   ```python\n   if True:\n       print(1)\n   ```"
    assert extract_program(item) == "if True:\n    print(1)\n"


def block(program: str) -> str:
    return f"<think>x</think>\n```python\n{program}\n```"


def graded(program: str, tests: list, **changes) -> list:
    info = {"language": "python", "test_cases": tests} | changes
    return code(completions=[block(program)], verification_info=[info], reward_timeout=[20.0])


def stdio(given: str, output: str) -> dict:
    return {"fn_name": None, "type": "stdin_stdout", "input": given, "output": output}


def function(name: str, given: object, output: object) -> dict:
    return {"fn_name": name, "type": "function_call", "input": given, "output": output}


@confined
def test_code_is_the_share_of_tests_passed():
    tests = [stdio("2 3", "5\n"), stdio("1 1", "2"), stdio("0 0", "1")]
    assert graded("print(sum(map(int, input().split())))", tests) == [pytest.approx(2 / 3)]
    assert graded("print(5)\nraise SystemExit(1)", tests[:1]) == [0.0]  # right output, wrong exit code
    assert graded("print(1)", [stdio("", "1\n2")]) == [0.0]  # the release compares the first line only
    assert graded("print(1)\nprint(2)", [stdio("", "1")]) == [0.0]  # nor more lines than are expected
    assert graded("print(' 1 ')\nprint(2)\nprint()", [stdio("", "1\n2")]) == [1.0]
    assert graded("this is no Python", tests) == [0.0]


@confined
def test_annotations_are_evaluated_as_python_does():
    """A program that names a type without importing it fails; of a dataclass, `ClassVar` is no field."""
    unknown = "def f(x: List[int]): return x\nprint(1)"
    fields = "from dataclasses import *\nfrom typing import *\n@dataclass\nclass A:\n n: ClassVar[int] = 0\n x: int = 1"
    assert graded(unknown, [stdio("", "1")]) == [0.0]
    assert graded(f"{fields}\nprint(A(5).x)", [stdio("", "5")]) == [1.0]


@confined
def test_code_calls_functions():
    tests = [function("add", [1, 2], 3), function("add", "1\n2", "3"), function("add", [[1], [2]], [[1, 2]])]
    assert graded("def add(a, b):\n    print('noise')\n    return a + b", tests) == [1.0]
    assert graded("class Solution:\n    def add(self, a, b):\n        return a + b", tests) == [1.0]
    assert graded("def sub(a, b): return a - b", tests) == [0.0]


@confined
def test_code_takes_no_longer_than_its_limit():
    """Three endless tests in one second: one is killed, the others are not reached; the score carries the flag. Each
    completion has its own limit.
    """
    started = time.monotonic()
    tests = [stdio("1", "1"), *[stdio("0", "0")] * 3]
    info = {"language": "python", "test_cases": tests}
    program = block("x = int(input())\nwhile x == 0: pass\nprint(x)")
    values = code(completions=[program] * 2, verification_info=[info] * 2, reward_timeout=[0.0, 1.5])
    assert values == [0, 0.25] and all(isinstance(value, TimedOut) for value in values)
    assert time.monotonic() - started < 4.9  # a test alone may take 5


def test_a_test_has_what_the_tests_before_it_left_of_the_limit(monkeypatch):
    """Seven seconds, and tests of two that would pass: the fourth has one left, and the fifth none."""
    clock, given = [0.0], []

    def run(program: str, stdin: str, seconds: float) -> Result:
        given.append(seconds)
        clock[0] += 2
        return Result(True, "1", False)

    monkeypatch.setattr(programs, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(programs.sandbox, "run", run)
    info = {"test_cases": [stdio("", "1")] * 5}
    (value,) = code(completions=[block("print(1)")], verification_info=[info], reward_timeout=[7.0])
    assert given == [5, 5, 3, 1] and value == 4 / 5 and isinstance(value, TimedOut)


def test_a_test_that_met_the_limit_shows_behind_one_that_did_not(monkeypatch):
    results = iter([Result(False, "", True), Result(True, "1", False)])
    monkeypatch.setattr(programs.sandbox, "run", lambda *_: next(results))
    info = {"test_cases": [stdio("", "1")] * 2}
    (value,) = code(completions=[block("print(1)")], verification_info=[info], reward_timeout=[7.0])
    assert value == 1 / 2 and isinstance(value, TimedOut)


DEEP = "[" * 100_000 + "]" * 100_000


def test_a_broken_record_is_not_the_policys_fault():
    """Tests that cannot run are skipped; none of them ends a training run."""
    broken = [{"input": "1"}, None, function("f", "no JSON", "1"), function(None, [1], 1), function("f", 3, 1)]
    assert graded("print(1)", broken) == [None]
    program = ["```python\nprint(1)\n```"]
    of_functions = [{"test_cases": [function("f", given, "1")]} for given in (DEEP, [float])]
    infos = ["no JSON", None, [], {"test_cases": None}, "{}", DEEP, {"test_cases": 5}, {"test_cases": {"input": "1"}}]
    for info in [*infos, {"test_cases": ["x", None, 3]}, *of_functions]:
        assert code(completions=program, verification_info=[info], reward_timeout=[9.0]) == [None]


def test_code_without_tests_or_program():
    tests = [stdio("", "1")]
    assert graded("print(1)", []) == [None]
    assert graded("print(1)", tests, language="cpp") == [None]
    (value,) = code(
        completions=["no program"],
        verification_info=['{"language": "python", "test_cases": [{"input": "", "output": ""}]}'],
        reward_timeout=[9.0],
    )
    assert value == 0 and isinstance(value, Unparsed)


def test_code_needs_leave(tmp_path):
    """Named in the config or by the dataset: refused before anything is loaded, with the same message."""
    assert Config().allow_code_execution is False
    for asked in ({"reward_funcs": ("code",)}, {"dataset": ("codeforces",)}):
        with pytest.raises(RewardError, match=r"refused without allow_code_execution \(--allow-code-execution\)"):
            check(with_rewards(Config(model="tiny", output_dir=str(tmp_path / "run"), **asked)))
    with pytest.raises(RewardError, match="allow_code_execution"):
        load_rewards(("code",), 1, 20.0)


@confined
def test_the_presets_own_solutions_pass(data):
    """Records in the published schema: each gold solution passes its own tests and no other record's."""
    lines = (data / "presets" / "codeforces" / "data" / "train-00000-of-00001.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["verification_info"]]
    programs = [extract_program(r["gold_standard_solution"]) or r["gold_standard_solution"] for r in records]
    tests = [record["verification_info"] for record in records]
    limits = [20.0] * len(records)
    assert code(completions=list(map(block, programs)), verification_info=tests, reward_timeout=limits) == [1.0] * 4
    others = list(map(block, programs[1:] + programs[:1]))
    assert max(code(completions=others, verification_info=tests, reward_timeout=limits)) < 1


@confined
def test_code_in_workers():
    """As a run grades it, with the time limit and the tests as columns."""
    info = {"language": "python", "test_cases": [stdio("2", "4"), stdio("3", "9")]}
    rows = {"completions": [block("print(int(input()) ** 2)"), block("print(4)"), "none"], "prompts": ["p"] * 3}
    columns = {"answer": [""] * 3, "verification_info": [info] * 3, "reward_timeout": [20.0] * 3}
    with load_rewards(("code",), 2, 20.0, allow_code_execution=True) as rewards:
        assert rewards["code"](**rows, **columns) == [1.0, 0.5, 0.0]


def test_a_deeply_nested_result_is_wrong_and_ends_no_run():
    assert not programs._returned(DEEP, [1])
    assert not programs._returned("1", DEEP)


@pytest.mark.parametrize(
    ("output", "expected", "is_same"),
    [
        ("true", 1, False), ("1", True, False), ("true", True, True), ("1", 1, True), ("1.0", 1, True),
        ("[true, 0]", [1, False], False), ("[1, 0]", [1, 0], True), ("true", [1], False), ("true", [True], True),
        ('{"a": true}', {"a": 1}, False), ('{"a": [1]}', {"a": [1]}, True), ("true", "1", False), ("1", "1", True),
        # A string, and as JSON.
        ('"a"', "a", True), ('"a"', '"a"', True), ('"a"', '"b"', False), ('"1"', "1", True), ('"a"', '["a"]', True),
    ],
)  # fmt: skip
def test_true_is_not_one(output, expected, is_same):
    assert programs._returned(output, expected) is is_same
