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
from qerl_kernels.decode_attention import kernel as attention
from qerl_kernels.decode_prologue import config as prologue_config
from qerl_kernels.decode_prologue import kernel as prologue
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.nvfp4_matmul import cases
from qerl_kernels.nvfp4_matmul.api import nvfp4_matmul
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm
from qerl_kernels.nvfp4_matmul.gemm.transposed import gemm_dx
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul
from qerl_kernels.ops import silu_mul
from qerl_kernels.rope_cache import kernel as rope


def weight(n: int, k: int) -> PackedNvfp4:
    tiles, units = -(-n // 64), -(-k // 64)
    words = jax.ShapeDtypeStruct((tiles, units, 4, 128), jnp.uint32)
    scales = jax.ShapeDtypeStruct((tiles, units, 64), jnp.uint32)
    rows = jax.ShapeDtypeStruct((tiles * 64,), jnp.float32)
    return PackedNvfp4(words, scales, rows, jax.ShapeDtypeStruct((n,), jnp.float32), (n, k), True, 16, True)


def matmul_program(
    m: int,
    n: int,
    k: int,
    config: GemmConfig | SkinnyConfig,
    transposed: bool,
    adapters: int,
    rank: int = 32,
    parts: int = 0,
) -> None:
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    args = [bf16(m, n if transposed else k), weight(n, k)]
    is_own = isinstance(config, SkinnyConfig) and config.computes_lora_x
    if adapters:
        a_or_t = bf16(k, rank * adapters) if is_own else bf16(m, 64 * adapters)
        if parts:
            a_or_t = jax.ShapeDtypeStruct((parts, m, rank * adapters), jnp.float32)
        args += [bf16(n), a_or_t, *[bf16(rank, n // adapters)] * adapters]

    def call(x, weight, bias=None, a_or_t=None, *expand):
        if isinstance(config, SkinnyConfig):
            given = {"lora_a" if is_own else "lora_x": a_or_t}
            return skinny_matmul(x, weight, config, bias=bias, lora_b=expand, scale=2.0, **given)
        if transposed:
            return gemm_dx(x, weight, config)
        return gemm(x, weight, config, bias=bias, lora_x=a_or_t, lora_b=expand, scale=2.0)

    refuse_copies(compiled(call, args))


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


def attention_program(rows: int, heads: int, kv_heads: int, width: int, slots: int, own_slots: int) -> None:
    cache = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    numbers = jax.ShapeDtypeStruct((rows,), jnp.int32)
    prompt, own = cache(3, kv_heads, slots, width), cache(rows, kv_heads, own_slots, width)
    q = jax.ShapeDtypeStruct((rows, heads, width), jnp.bfloat16)
    program = compiled(
        lambda *args: attention.decode_attention(*args, scale=0.1),
        [q, prompt, prompt, numbers, numbers, own, own, numbers],
    )
    copied = [line for line in program.splitlines() if " copy(" in line]
    assert not copied, f"a cache is copied: {copied}"


def prologue_program(kind: str, tokens: int, features: int, *ranks: int) -> None:
    norm = kind == "norm"
    kind, _, partials = kind.partition(" ")
    more = {"eps": 1e-6, "residual": True} if norm else {"partials": bool(partials)}
    spec = prologue_config.PrologueSpec(kind, tokens, features, ranks, **more)
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    inputs = [bf16(tokens, features * (2 if kind == "silu" else 1))]
    if norm:
        wide = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, features), (features,))]
        inputs = [wide[0], *inputs, wide[1]]
    a = [bf16(features, sum(ranks))] if ranks else []
    config = prologue_config.best_config(spec)
    call = lambda *args: prologue.fused_prologue(spec, config, args[: len(inputs)], args[-1] if a else None)  # noqa: E731
    compiled(call, inputs + a)


def rope_program(rows: int, heads: int, kv_heads: int, width: int) -> None:
    array = jax.ShapeDtypeStruct
    cache = array((rows, kv_heads, 256, width), jnp.bfloat16)
    qkv = array((rows, (heads + 2 * kv_heads) * width), jnp.bfloat16)
    angles, slots = array((rows, width // 2), jnp.float32), array((rows,), jnp.int32)
    program = compiled(rope.rope_and_cache, [qkv, angles, angles, slots, cache, cache], donated=(4, 5))
    copied = [line for line in program.splitlines() if " copy(" in line]
    assert not copied, f"a cache is copied: {copied}"


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
    programs = {
        "attention": attention_program,
        "prologue": prologue_program,
        "rope": rope_program,
        "swiglu gradient": swiglu_gradient_program,
        "step": lambda layers, _: step_program(layers),
    }
    for case in map(eval, sys.argv[1:]):
        programs[case[0]](*case[1:]) if case[0] in programs else matmul_program(*case)
