"""Compiles kernels for an H200 on a machine without a GPU and prints their PTX and ptxas'
report. `test_compile.py` runs it.

    PYTHONPATH=tools python compile_for_h200.py CASE [CASE ...]

A case is Python, one of

    (m, n, k, GemmConfig(...) or SkinnyConfig(...), transposed, number of adapters[, their rank[, parts of x A]])
    ("attention", rows, query heads, key/value heads, head dim, slots of a prompt, own slots)
    ("prologue", kind or "kind partials", tokens, input features, *ranks)
    ("rope", rows, query heads, key/value heads, head dim)
    ("swiglu gradient", tokens, hidden size, ffn features)
    ("step", layers, folder)

the first for the product, the last for the products of a 7B decode step with adapters, whose thunk list XLA writes to
the folder.
"""

import dataclasses
import os
import re
import sys
import types

import h200

os.environ |= h200.PRINTED
if whole := [case for case in sys.argv[1:] if "step" in case or "swiglu" in case]:
    h200.use_compilers_to_ptx(*[f"--xla_dump_to={eval(case)[2]}" for case in whole if "step" in case])
else:
    h200.use_compilers(None, *h200.BY_PTXAS)

import jax
import jax.numpy as jnp
from compare_ptx import PROGRAMS, Case
from compare_ptx import packed_weight as weight
from qerl_kernels.nvfp4_matmul import cases
from qerl_kernels.nvfp4_matmul.api import nvfp4_matmul
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.ops import silu_mul


def matmul_case(
    m: int,
    n: int,
    k: int,
    config: GemmConfig | SkinnyConfig,
    transposed: bool,
    adapters: int,
    rank: int = 32,
    parts: int = 0,
) -> Case:
    is_skinny = isinstance(config, SkinnyConfig)
    form = "own" if is_skinny and config.computes_lora_x else "partials" if parts else "whole"
    shape = ("dx" if transposed else "forward", m, n, k)
    lora = (form, rank, (n // adapters,) * adapters, parts) if adapters else ()
    name, values = "skinny" if is_skinny else "gemm", dataclasses.astuple(config)
    return Case(name, shape, values, lora, "bfloat16" if adapters else "")


def prologue_case(kind: str, tokens: int, features: int, *ranks: int) -> Case:
    kind, _, partials = kind.partition(" ")
    return Case("prologue", (kind, tokens, features), lora=(partials or "whole", *ranks) if ranks else ())


def kernel_program(case: Case) -> None:
    """A kernel alone in a program, which copies neither a weight nor a cache."""
    call, args = PROGRAMS[case.kernel](case)
    program = compiled(call, args, donated=(4, 5) if case.kernel == "rope" else ())
    if case.kernel in ("attention", "rope"):
        copied = [line for line in program.splitlines() if " copy(" in line]
        assert not copied, f"a cache is copied: {copied}"
    refuse_copies(program)


def refuse_copies(program: str) -> None:
    made = [line for line in program.splitlines() if " = u32[" in line]
    copied = [line for line in made if " parameter(" not in line and " bitcast(" not in line]  # a bitcast moves nothing
    assert not copied, f"the weight is copied: {copied}"


def step_program(layers: int) -> None:
    h200.assume()
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    chain = [case for _ in range(layers) for case in cases.LAYER_7B]
    weights = [weight(*cases.SHAPES[case]) for case in chain]
    inputs = [bf16(8, cases.SHAPES[case][1]) for case in chain]
    widths = [cases.parts(case) for case in chain]
    b = [[bf16(32, width) for width in parts] for parts in widths]
    a = [bf16(cases.SHAPES[case][1], 32 * len(parts)) for case, parts in zip(chain, widths, strict=True)]

    def product(x, weight, b, a):
        loras, offset = [], 0
        for i, part in enumerate(b):  # the A side by side, as a rollout keeps them
            loras.append(types.SimpleNamespace(a=a, b=part, scale=2.0, offset=offset, column=32 * i))
            offset += part.shape[1]
        return nvfp4_matmul(x, weight, None, loras)

    all_lists = [inputs, weights, b, a]
    program = compiled(lambda *lists: [product(*one) for one in zip(*lists, strict=True)], all_lists)
    refuse_copies(program)


def swiglu_gradient_program(tokens: int, hidden: int, inner: int) -> None:
    """The backward pass of an MLP with adapters: of all arrays of gate's and up's size one is made, their gradients."""
    h200.assume()
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    pair = lambda n, k: (bf16(k, 32), bf16(32, n))  # noqa: E731

    def lora(pair, offset=0):
        return types.SimpleNamespace(a=pair[0], b=pair[1], scale=2.0, offset=offset)

    def gradients(x, gate_up, d_y, weights, pairs):
        of_two = lambda x, pairs: nvfp4_matmul(x, weights[0], None, [lora(p, i * inner) for i, p in enumerate(pairs)])  # noqa: E731
        of_down = lambda gate_up, pair: nvfp4_matmul(silu_mul(gate_up), weights[1], None, [lora(pair)])  # noqa: E731
        d_gate_up, d_down = jax.vjp(of_down, gate_up, pairs[2])[1](d_y)
        return jax.vjp(of_two, x, pairs[:2])[1](d_gate_up), d_down

    weights = weight(2 * inner, hidden), weight(hidden, inner)
    pairs = [pair(inner, hidden), pair(inner, hidden), pair(hidden, inner)]
    args = [bf16(tokens, hidden), bf16(tokens, 2 * inner), bf16(tokens, hidden), weights, pairs]
    program = compiled(gradients, args)
    lines = program[program.index("\nENTRY") :].splitlines()
    free = (" parameter(", " bitcast(", " get-tuple-element(", " tuple(")
    made = [line.split(", metadata")[0] for line in lines if not any(word in line for word in free)]
    whole = [line for line in made if re.search(rf"= \(?bf16\[{tokens},(2,{inner}|{2 * inner})\]", line)]
    assert len(whole) == 1 and "_concatenate_fusion" in whole[0], whole
    halves = [line for line in made for _ in re.findall(rf"\w+\[{tokens},{inner}\]", line.split(" fusion(")[0])]
    # h for down's adapter, the two parts of its gradient
    assert len([line for line in halves if "fusion" in line]) == 2 and len(halves) == 3, halves


def compiled(call, args, donated: tuple[int, ...] = ()) -> str:
    return h200.lower(jax.jit(call, donate_argnums=donated), args).compile().as_text()


if __name__ == "__main__":
    kernels = {
        "attention": lambda *shape: Case("attention", shape, bias="bfloat16"),
        "prologue": prologue_case,
        "rope": lambda *shape: Case("rope", shape, bias="bfloat16"),
    }
    for case in map(eval, sys.argv[1:]):
        if case[0] == "step":
            step_program(case[1])
        elif case[0] == "swiglu gradient":
            swiglu_gradient_program(*case[1:])
        else:
            kernel_program(kernels[case[0]](*case[1:]) if case[0] in kernels else matmul_case(*case))
