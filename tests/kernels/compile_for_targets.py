"""Compiles the kernels that run on a GPU without Hopper's instructions, for one such GPU on a machine without any, and
prints their PTX and ptxas' report. `test_targets.py` runs it.

    PYTHONPATH=tools python compile_for_targets.py ARCH SMS [all]

`all`: every row of the tuning table, each with adapters, and every model's attention, besides a case of each code path.
"""

import functools
import os
import sys

import h200

os.environ |= h200.PRINTED
h200.use_compilers(None, *h200.BY_PTXAS)

import jax  # noqa: E402
from compare_ptx import MODELS, Case, array, attention_program, packed_weight, rope_program  # noqa: E402
from qerl_kernels.decode_prologue import config, kernel  # noqa: E402
from qerl_kernels.gpu import Gpu, gpu_of  # noqa: E402
from qerl_kernels.nvfp4_matmul import tuning  # noqa: E402
from qerl_kernels.nvfp4_matmul.dequantize.kernel import dequantize  # noqa: E402
from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul  # noqa: E402
from qerl_kernels.nvfp4_matmul.tcgen05 import kernel as tcgen05  # noqa: E402

SHAPES = [(8, 3584, 3584, 1, 14), (32, 37888, 3584, 2, 7), (16, 3584, 18944, 1, 0)]  # m, n, k, adapters, partials
PROLOGUES = [("plain", 3584, (32,) * 3, True), ("silu", 18944, (32,), True), ("silu", 18944, (), False),
             ("plain", 3584, (8,), False)]  # fmt: skip


def skinny(gpu: Gpu, m: int, n: int, k: int, adapters: int, partials: int) -> tuple:
    shapes = [(32, n // adapters)] * adapters
    chosen = tuning.config_for(m, n, k, adapters=shapes, gpu=gpu)
    lora_x = array(partials, m, 32 * adapters, dtype="float32") if partials else array(m, 64 * adapters)
    args = [array(m, k), packed_weight(n, k), array(n), lora_x, [array(*shape) for shape in shapes]]
    return lambda x, weight, bias, lora_x, b: skinny_matmul(
        x, weight, chosen, bias=bias, lora_x=lora_x, lora_b=tuple(b), scale=2.0, gpu=gpu
    ), args


def many_rows(gpu: Gpu) -> tuple:
    def call(x, weight, bias):
        return tcgen05.gemm(x, weight, bias=bias, gpu=gpu)

    return call, [array(300, 3584), packed_weight(4608, 3584), array(4608)]


def prologue(gpu: Gpu, kind: str, features: int, ranks: tuple, partials: bool, tokens: int = 8) -> tuple:
    spec = config.PrologueSpec(kind, tokens, features, ranks, partials=partials)
    chosen = config.best_config(spec, gpu)
    args = [array(tokens, features * (2 if kind == "silu" else 1)), array(features, sum(ranks)) if ranks else None]
    return lambda x, a: kernel.fused_prologue(spec, chosen, [x], a, gpu), args


def programs(gpu: Gpu, is_all: bool) -> list[tuple]:
    """(function, arguments) of each kernel."""
    rows = [(row.m, row.n, row.k, 1, 7) for row in tuning.table(gpu.table)] if is_all else []
    found = [(functools.partial(dequantize, gpu=gpu), [packed_weight(3584, 3584)])]
    found += [skinny(gpu, *shape) for shape in SHAPES + rows]
    found += [many_rows(gpu)] if gpu.has_tcgen05 else []
    found += [prologue(gpu, *case) for case in PROLOGUES]
    for heads in MODELS if is_all else [(28, 4, 128), (14, 2, 64)]:
        call, args = attention_program(Case("attention", (8, *heads, 256, 1024), bias="bfloat16"))
        found.append((functools.partial(call, gpu=gpu), args))
    return [*found, rope_program(Case("rope", (8, 28, 4, 128), bias="bfloat16"))]


if __name__ == "__main__":
    arch, sms = map(int, sys.argv[1:3])
    target = gpu_of(f"sm_{arch}", arch, sms)
    for function, args in programs(target, "all" in sys.argv):
        h200.lower(jax.jit(function), args, gpu=target).compile()
