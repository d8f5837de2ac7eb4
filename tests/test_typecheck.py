"""What the tests' type checker sees at calls of `qerl_jax`."""

from collections.abc import Callable

import numpy as np
import pytest
import typecheck
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation
from jaxtyping import Float32, TypeCheckError

from qerl_jax.data.problems import Problem, own_system_prompt
from qerl_jax.types import Prompts

checked = typecheck.jaxtyped(typechecker=typecheck.check)
Rows = Float32[np.ndarray, "B T"]


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@checked
def half(x: float) -> int:
    return x / 2


@checked
def added(x: Rows, y: Float32[np.ndarray, " B"] | None = None) -> Float32[np.ndarray, " B"]:
    return x[:, 0] if y is None else x[0]


def test_a_function_without_axes():
    with pytest.raises(BeartypeCallHintReturnViolation):
        half(3)
    with pytest.raises(BeartypeCallHintParamViolation):
        half("3")
    with pytest.raises(BeartypeCallHintParamViolation):
        own_system_prompt("tiny", "yes")
    with pytest.raises(BeartypeCallHintParamViolation):
        Problem("1", "?", "2")


@pytest.mark.parametrize("hint", [Rows, Rows | None, list[Rows], tuple[int, Rows], dict[str, list[Rows]]])
def test_axes_are_found_in_what_holds_them(hint):
    def function(x): ...

    function.__annotations__ = {"x": hint}
    assert typecheck._may_have_axes(function)
    function.__annotations__ = {"x": Callable[[hint], int]}
    assert typecheck._may_have_axes(function)
    function.__annotations__ = {"return": hint}
    assert typecheck._may_have_axes(function)
    function.__annotations__ = {"x": list[int], "return": Callable[[np.ndarray], str] | None}
    assert not typecheck._may_have_axes(function)


def test_an_axis_has_one_size_in_a_call():
    assert added(zeros(2, 3)).shape == (2,) and added(zeros(3, 3), zeros(3)).shape == (3,)
    with pytest.raises(TypeCheckError):
        added(zeros(2, 3), zeros(3))
    with pytest.raises(TypeCheckError):
        added(zeros(2, 3), zeros(2))  # a row, which is of T
    with pytest.raises(TypeCheckError):
        added(np.zeros((2, 3)))
    with pytest.raises(TypeCheckError):
        Prompts(np.zeros((2, 3), np.int32), np.ones(3, np.int32), np.arange(2, dtype=np.int32))
