"""Compiles the kernels of programs for an H200 separately, on a machine without a GPU, and prints as JSON how many
kernels Mosaic GPU compiled at each step, by the events that it leaves in a profile. `test_compile.py` runs it.
"""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Iterator

import h200

h200.use_compilers(None, *h200.BY_PTXAS)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.profiler import ProfileData  # noqa: E402
from qerl_kernels.decode_prologue.api import silu_mul_prologue  # noqa: E402
from qerl_kernels.kernel_programs import kernel_programs  # noqa: E402

COMPILED = "Compile"  # the event of one kernel


@contextlib.contextmanager
def counted(into: list[int]) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield
        [profile] = pathlib.Path(folder).rglob("*.xplane.pb")
        lines = (line for plane in ProfileData.from_file(str(profile)).planes for line in plane.lines)
        into.append(sum(event.name == COMPILED for line in lines for event in line.events))


def program(*widths: int) -> jax.stages.Lowered:
    """A kernel for each width, launched twice."""

    def function(xs: list[jax.Array]) -> list[jax.Array]:
        return [silu_mul_prologue(scale * x, None, ())[0] for x in xs for scale in (1, 2)]

    return h200.lower(jax.jit(function), ([jax.ShapeDtypeStruct((8, width), jnp.bfloat16) for width in widths],))


def main() -> None:
    h200.assume()
    compiled: list[int] = []
    first, second, third = program(1024, 2048), program(2048, 4096), program(8192)
    separate = kernel_programs(first) | kernel_programs(second)
    with counted(compiled):
        for kernel in separate.values():
            h200.lower(kernel, ()).compile()
    for whole in (first, second, third):
        with counted(compiled):
            whole.compile()
    print(json.dumps({"separate": len(separate), "compiled": compiled}))


if __name__ == "__main__":
    main()
