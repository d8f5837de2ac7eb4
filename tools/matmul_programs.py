"""The programs of `bench_matmul.py`: NVFP4 GEMMs of Qwen2.5's projections, and decode steps of 7B without attention.

Each is a jitted loop whose body runs the GEMM over many weights. A loop stands for a decode loop: its buffers do not
move, so its CUDA graphs are captured once; a list of calls without a loop is captured anew whenever an output lies
elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import types

import bursts
import jax
import jax.numpy as jnp
from qerl_kernels.decode_prologue.api import lora_prologue, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.nvfp4_matmul import cases
from qerl_kernels.nvfp4_matmul.api import nvfp4_matmul
from qerl_kernels.nvfp4_matmul.lora_input import LoraForm
from qerl_kernels.nvfp4_matmul.route import route

SHORT = 2  # rounds of the shorter loop, because XLA takes a loop of one round apart


def looped(call, rounds: int):
    """(xs, weights) -> a number that depends on every call.

    In each of the `rounds`, for each of `xs`, it calls `call(x, weight)` for each weight. An x may be a list, one for
    each weight; all must differ, or XLA would make one call of several. The xs of a round wait for the sum of the round
    before, so that nothing can leave the loop, and nothing but the sum is computed beside the calls.
    """

    def every(xs, weights):

        def one_round(_, total):
            now, _ = jax.lax.optimization_barrier((xs, total))
            inputs = [one for x in now for one in (x if isinstance(x, list) else [x] * len(weights))]
            outs = [call(x, weight) for x, weight in zip(inputs, weights * len(xs), strict=True)]
            return total + sum(out[0, 0].astype(jnp.float32) for out in outs)

        return jax.lax.fori_loop(0, rounds, one_round, jnp.float32(0))

    return every


def weights_of(case: str, m: int) -> list[PackedNvfp4]:
    """Packed random weights of one case, as many as its burst rotates."""
    shape = cases.SHAPES[case]
    return [cases.random_packed(jax.random.key(i), *shape) for i in range(Gemm(case, m).burst().weights)]


@jax.jit
def _turned(x, by):
    """Columns of x rotated; one program for all shifts."""
    return jnp.roll(x, by, axis=1)


def forward(x, weight):
    """The GEMM without adapters."""
    return nvfp4_matmul(x, weight, implementation="mosaic_gpu")


def backward(dy, weight):
    """dx alone: the forward GEMM of the same call is unused, so XLA drops it."""
    x = jnp.zeros((dy.shape[0], weight.shape[1]), dy.dtype)
    return jax.vjp(lambda x: forward(x, weight), x)[1](dy)[0]


def adapters(case: str, rank: int, seed: int) -> tuple[jax.Array | None, list]:
    """LoRA A of all parts of a projection side by side, as a decode loop keeps them, and B of each."""
    if not rank:
        return None, []
    _, k = cases.SHAPES[case]
    first, *keys = jax.random.split(jax.random.key(seed), 1 + len(cases.parts(case)))
    a = jax.random.normal(first, (k, rank * len(keys)), jnp.bfloat16) / k**0.5
    widths = zip(keys, cases.parts(case), strict=True)
    return a, [jax.random.normal(key, (rank, width), jnp.bfloat16) / 8 for key, width in widths]


def loras_of(a, lora_b) -> list:
    """Adapters with their A side by side."""
    loras, offset = [], 0
    for i, b in enumerate(lora_b):
        loras.append(types.SimpleNamespace(a=a, b=b, scale=1.0, offset=offset, column=i * b.shape[0]))
        offset += b.shape[1]
    return loras


def with_adapters(x, layer, lora_x=None):
    """The GEMM with the adapters of one layer: (x, (weight, A, [B, ...])) -> y."""
    weight, a, lora_b = layer
    return nvfp4_matmul(x, weight, None, loras_of(a, lora_b), implementation="mosaic_gpu", lora_x=lora_x)


def prologue_arguments(rows: int, layer, norm: bool = False) -> dict:
    """Arguments of the decode prologue of a GEMM: A, the ranks of the adapters and, except for a norm, the LoRA form.
    There is no A where the GEMM computes `x A`. Without a weight the form is `LoraForm.WHOLE`."""
    weight, a, lora_b = layer
    form = LoraForm.WHOLE
    if weight is not None:
        form = route(rows, weight, loras_of(a, lora_b), jnp.bfloat16, implementation="mosaic_gpu").lora_form
    if form is LoraForm.A:
        a, lora_b = None, []
    arguments = {"a": a, "ranks": tuple(b.shape[0] for b in lora_b)}
    return arguments if norm else {**arguments, "lora_form": form}


@dataclasses.dataclass(frozen=True)
class Gemm:
    """A GEMM to be timed.

    `x A` of its adapters is counted, whatever computes it: the GEMM itself where the tuning table says so, else the
    kernel of `decode_prologue` up to 128 rows, else XLA.

    Attributes:
      case: the projection, a key of `cases.SHAPES`.
      m: rows of x.
      direction: "forward" or "dx".
      lora_rank: LoRA rank of its adapters; 0 for none.
      batch_invariant: whether a row's bits must not depend on the number of rows.
    """

    case: str
    m: int
    direction: str = "forward"
    lora_rank: int = 0
    batch_invariant: bool = False

    def row(self) -> dict:
        """The row of the result file, without its time."""
        n, k = cases.SHAPES[self.case]
        row = {"case": self.case, "m": self.m, "n": n, "k": k, "direction": self.direction, "impl": "qerl"}
        more = {"batch_invariant": True} if self.batch_invariant else {}
        return {**row, "lora_rank": self.lora_rank, **more}

    def burst(self) -> bursts.Burst:
        """Its weights, turns and rounds."""
        n, k = cases.SHAPES[self.case]
        return bursts.burst_of(self.m, n, k, n * k * 0.5625)

    def call(self, x: jax.Array, weight) -> jax.Array:
        """The GEMM."""
        if self.direction == "dx":
            return backward(x, weight)
        if self.lora_rank:
            return with_adapters(x, weight)
        return nvfp4_matmul(x, weight, implementation="mosaic_gpu", batch_invariant=self.batch_invariant)

    def width(self) -> int:
        """Columns of x, or of dy for dx."""
        n, k = cases.SHAPES[self.case]
        return n if self.direction == "dx" else k

    def arguments(self, x: jax.Array) -> tuple:
        """(xs, weights) of the loop: an x for each turn and, with adapters, for each weight, because XLA would compute
        `x A` once where x is shared."""
        weights, turns = weights_of(self.case, self.m), range(self.burst().turns)
        if not self.lora_rank:
            return [_turned(x, i) for i in turns], weights
        layers = [(weight, *adapters(self.case, self.lora_rank, i)) for i, weight in enumerate(weights)]
        return [[_turned(x, i * len(layers) + j) for j in range(len(layers))] for i in turns], layers


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """A decode step of 7B without attention, in one jit: the prologue of each projection as the rollout fuses it, with
    `x A`, and the projections. Without GEMMs and adapters it is the cost to subtract from the others.

    Attributes:
      m: sequences.
      lora_rank: LoRA rank of all adapters; 0 for none.
      layers: decoder layers.
      has_gemms: whether the projections run.
    """

    m: int
    lora_rank: int
    layers: int
    has_gemms: bool

    def row(self) -> dict:
        """The row of the result file, without its time."""
        row = {"case": "layers_7b", "m": self.m, "n": 0, "k": 0, "direction": "forward", "impl": "qerl"}
        return {**row, "lora_rank": self.lora_rank, "layers": self.layers, "products": self.has_gemms}

    def burst(self) -> bursts.Burst:
        """Its weights, turns and rounds."""
        return bursts.burst_of_step(self.layers)

    def call(self, start: tuple, stack: list) -> jax.Array:
        """One step."""
        return _layers(start, stack, self.has_gemms)

    def width(self) -> int:
        """Columns of the residual stream."""
        return cases.SHAPES["down_7b"][0]

    def weights(self) -> list[list[PackedNvfp4 | None]]:
        """Weights of each layer's projections; None without GEMMs."""
        if not self.has_gemms:
            return [[None] * len(cases.LAYER_7B)] * self.layers
        keys = [jax.random.split(jax.random.key(i), len(cases.LAYER_7B)) for i in range(self.layers)]
        shapes = [cases.SHAPES[case] for case in cases.LAYER_7B]
        return [[cases.random_packed(key, *shape) for key, shape in zip(of, shapes, strict=True)] for of in keys]

    def arguments(self, x: jax.Array, weights: list | None = None) -> tuple:
        """([inputs of the first layer], [the layers]), with `weights` in place of its own."""
        stack = []
        for i, of_layer in enumerate(weights or self.weights()):
            parts = [adapters(case, self.lora_rank, 4 * i + j) for j, case in enumerate(cases.LAYER_7B)]
            stack.append([(weight, *part) for weight, part in zip(of_layer, parts, strict=True)])
        gates = jax.random.normal(jax.random.key(1), (self.layers, self.m, 2 * cases.SHAPES["down_7b"][1]), x.dtype)
        return [(x.astype(jnp.float32), x, list(gates))], [stack]


def program(what: Gemm | DecodeStep, rounds: int):
    """(xs, weights) -> (a number that depends on the whole loop, the output of the first call)."""
    loop = looped(what.call, rounds)
    return lambda xs, weights: (loop(xs, weights), what.call(first_x(xs), weights[0]))


def first_x(xs: list) -> jax.Array:
    """Input of the first call."""
    return xs[0][0] if isinstance(xs[0], list) else xs[0]


def rounds_of(what: Gemm | DecodeStep) -> tuple[int, int]:
    """Rounds of the shorter and the longer loop."""
    return SHORT, SHORT + what.burst().rounds


def build(what: Gemm | DecodeStep, rounds: int) -> tuple:
    """For `ahead.compile_all`: the program and the shapes of its arguments."""
    x = jax.ShapeDtypeStruct((what.m, what.width()), jnp.bfloat16)
    return program(what, rounds), jax.eval_shape(what.arguments, x)


def _layers(start, stack, has_gemms: bool):
    """(residual stream, delta to add to it, gate and up of each layer) -> a sum that depends on every operation,
    [1, 1]."""
    (x, delta, gates), every = start, jnp.float32(0)
    scale = jnp.ones(x.shape[1])
    norm = functools.partial(rms_norm_prologue, eps=1e-6, dtype=jnp.bfloat16)
    lora_of = functools.partial(prologue_arguments, x.shape[0])
    for (qkv, o, up, down), gate_up in zip(stack, gates, strict=True):
        x, y, t = norm(x, delta, scale, **lora_of(qkv, norm=True))
        delta = y
        if has_gemms:
            out = with_adapters(y, qkv, t)
            every += out[0, 0]
            y, _ = jax.lax.optimization_barrier((y, out))  # else XLA moves qkv of all layers to the end
            before = lora_of(o)
            t = None if before["a"] is None else lora_prologue(y, **before)
            delta = with_adapters(y, o, t)
        x, y, t = norm(x, delta, scale, **lora_of(up, norm=True))
        h, t = silu_mul_prologue(with_adapters(y, up, t) if has_gemms else gate_up, **lora_of(down))
        delta = with_adapters(h, down, t) if has_gemms else y
        every += h[0, 0] + delta[0, 0]
    return (every + x[0, 0])[None, None]
