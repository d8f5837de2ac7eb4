"""NVFP4 GEMMs with one config each and the decode prologues that they need, checked and timed.

A time is the median duration of the kernel itself by the profiler, over weights that outgrow the L2: some 0.8 µs less
than in a loop.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qerl_kernels.decode_prologue import config as prologue_config
from qerl_kernels.decode_prologue import reference
from qerl_kernels.decode_prologue.api import lora_prologue, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.gpu import H200, Gpu
from qerl_kernels.kernel_times import kernel_medians, profiled
from qerl_kernels.nvfp4_matmul import cases, packing, tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK, LoraForm, split_lora_x
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.ops import fp32_matmul

RANK = 32  # LoRA rank
ROTATE_BYTES = 512 << 20  # weights in rotation, so that the L2 does not help
MANY = 1024  # rows from which a call heats the GPU: it has warm-up calls, and is timed at the clock its power allows
CALLS = 24  # timed calls below that
MAX_ERROR = 2.5e-3
OURS = re.compile("nvfp4|decode_prologue")  # names of the kernels that are timed


class Gemm(NamedTuple):
    """A fused projection.

    Attributes:
      name: for people.
      n: output features.
      k: input features.
      parts: output features of each part, which has an adapter of its own.
      prologue: kind of its decode prologue: "norm", "silu" or "plain" (`x A` alone).
    """

    name: str
    n: int
    k: int
    parts: tuple[int, ...]
    prologue: str

    @property
    def adapters(self) -> list[tuple[int, int]]:
        """Shape of B, [rank, features], of each adapter."""
        return [(RANK, width) for width in self.parts]


def gemm_of(case: str) -> Gemm:
    """A GEMM of `cases.SHAPES`."""
    kind = {"qkv": "norm", "gate": "norm", "down": "silu", "o": "plain"}[case.split("_")[0]]
    return Gemm(case, *cases.SHAPES[case], cases.parts(case), kind)


def adapters(gemm: Gemm, seed: int) -> tuple[jax.Array, list]:
    """LoRA A of all parts of a projection side by side, as a decode loop keeps them, and B of each."""
    first, *keys = jax.random.split(jax.random.key(seed), 1 + len(gemm.parts))
    a = jax.random.normal(first, (gemm.k, RANK * len(keys)), jnp.bfloat16) / gemm.k**0.5
    widths = zip(keys, gemm.parts, strict=True)
    return a, [jax.random.normal(key, (RANK, width), jnp.bfloat16) / 8 for key, width in widths]


# Autotuning would take longer than all else here.
@functools.partial(jax.jit, static_argnums=2, compiler_options={"xla_gpu_autotune_level": 0})
def _exact(x, weight, transposed: bool):
    matrix, row = packing.packed_parts(weight)
    matrix, x = matrix.astype(jnp.float32), x[:256].astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    if transposed:
        return jnp.matmul(x * row, matrix, precision=highest)
    return jnp.matmul(x, matrix.T, precision=highest) * row


@jax.jit
def _distance(y, expected):
    return jnp.linalg.norm(y[: len(expected)].astype(jnp.float32) - expected) / jnp.linalg.norm(expected)


def exact(x: jax.Array, weight: PackedNvfp4, transposed: bool) -> jax.Array:
    """x · W for at most 256 rows, with the exact weights in fp32."""
    return jax.block_until_ready(_exact(x, weight, transposed))


def refuse_if_wrong(y: jax.Array, expected: jax.Array, what: str) -> None:
    """Raises ValueError where ‖y − expected‖ / ‖expected‖ is above the bound or NaN."""
    error = float(_distance(y, expected))
    if not error <= MAX_ERROR:
        raise ValueError(f"relative error {error:.2e} is above {MAX_ERROR:.1e}: {what}")


LAUNCH_US = 0.8  # what a kernel takes in a loop over its duration by the profiler (tools/results/notes/measuring.md)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A config tried for a GEMM with m rows; direction: "forward" or "dx"."""

    gemm: Gemm
    m: int
    direction: str
    config: GemmConfig | SkinnyConfig
    gpu: Gpu = H200

    @property
    def lora_form(self) -> str:
        """LoRA input of this GEMM in decode: "whole", "partials" or "a" (the GEMM computes `x A`)."""
        if isinstance(self.config, GemmConfig):
            fitted = tuning.fit_lora(self.config, self.gemm.n, self.gemm.adapters)
            takes_partials = fitted.takes_partials(self.m, self.gemm.adapters)
        elif self.config.computes_lora_x:
            return "a"
        else:
            takes_partials = True
        return "partials" if takes_partials and self.gemm.prologue != "norm" else "whole"

    def call(self, x: jax.Array, lora_x: jax.Array, layer: tuple) -> jax.Array:
        """The GEMM. `layer`: the weight, A of its adapters side by side and B of each."""
        from qerl_kernels.nvfp4_matmul.gemm import kernel, transposed  # jax ≥ 0.11: imported where it runs
        from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul

        weight, a, lora_b = layer
        if self.direction == "dx":
            return transposed.gemm_dx(x, weight, self.config, gpu=self.gpu)
        if self.lora_form == "a":
            return skinny_matmul(x, weight, self.config, lora_a=a, lora_b=lora_b, gpu=self.gpu)
        if self.lora_form == "partials":  # as many as there are in decode, all but one of them zeros
            whole = jnp.concatenate(split_lora_x(lora_x, [RANK] * len(lora_b)), axis=1)
            more = Prologue(self.gemm, self.m, "partials", self.gpu).k_splits - 1
            lora_x = jnp.pad(whole[None].astype(jnp.float32), ((0, more), (0, 0), (0, 0)))
        if isinstance(self.config, SkinnyConfig):
            return skinny_matmul(x, weight, self.config, lora_x=lora_x, lora_b=lora_b, gpu=self.gpu)
        config = tuning.fit_lora(self.config, self.gemm.n, self.gemm.adapters)
        return kernel.gemm(x, weight, config, lora_x=lora_x, lora_b=lora_b, gpu=self.gpu)


@dataclasses.dataclass(frozen=True)
class Prologue:
    """The decode prologue of a GEMM: a norm, SiLU, or `x A` alone, with the LoRA input that it gives
    (`Trial.lora_form`)."""

    gemm: Gemm
    m: int
    form: str
    gpu: Gpu = H200

    @property
    def k_splits(self) -> int:
        """Number of split-K partials that it leaves."""
        kind, ranks = self.gemm.prologue, (RANK,) * len(self.gemm.parts)
        spec = prologue_config.PrologueSpec(kind, self.m, self.gemm.k, ranks, partials=True)
        return prologue_config.best_config(spec, self.gpu).k_splits

    def inputs(self, seed: int) -> tuple:
        """(inputs of the operation, A); another set for each of the calls, so that none of it is in the L2."""
        kind, k = self.gemm.prologue, self.gemm.k
        key = jax.random.key(seed)
        width = 2 * k if kind == "silu" else k
        x = jax.random.normal(key, (self.m, width), jnp.float32 if kind == "norm" else jnp.bfloat16)
        rest = (x.astype(jnp.bfloat16), jnp.ones(k)) if kind == "norm" else ()
        return (x, *rest), None if self.form == "a" else adapters(self.gemm, seed)[0]

    def call(self, layer: tuple) -> tuple:
        """The operation. `layer`: from `inputs`."""
        inputs, a = layer
        ranks = () if a is None else (RANK,) * len(self.gemm.parts)
        if self.gemm.prologue == "norm":
            return rms_norm_prologue(*inputs, 1e-6, a, ranks, dtype=jnp.bfloat16, implementation="mosaic_gpu")
        form = LoraForm.PARTIALS if self.form == "partials" else LoraForm.WHOLE
        more = {"lora_form": form, "implementation": "mosaic_gpu"}
        if self.gemm.prologue == "silu":
            return silu_mul_prologue(*inputs, a, ranks, **more)
        return lora_prologue(*inputs, a, ranks, **more)


def prologues(group: Sequence[Trial]) -> list[Prologue]:
    """The prologues of some trials, where they are not the same for all of them. dx has none."""
    if group[0].direction == "dx":
        return []
    found = []
    for m in dict.fromkeys(trial.m for trial in group):
        forms = dict.fromkeys(trial.lora_form for trial in group if trial.m == m)
        found += [Prologue(group[0].gemm, m, form, group[0].gpu) for form in forms] if len(forms) > 1 else []
    return [prologue for prologue in found if (prologue.gemm.prologue, prologue.form) != ("plain", "a")]


def random_layer(gemm: Gemm, seed: int) -> tuple:
    """A random weight, A of its adapters side by side and B of each."""
    return cases.random_packed(jax.random.key(seed), gemm.n, gemm.k), *adapters(gemm, seed)


def layers_of(gemm: Gemm, m: int) -> list[tuple]:
    """So many layers that they outgrow the L2 (one from 1024 rows, where x and y do)."""
    count = 1 if m >= MANY else math.ceil(ROTATE_BYTES / (gemm.n * gemm.k * 0.5625))
    return [random_layer(gemm, i) for i in range(count)]


def activations(gemm: Gemm, direction: str, m: int) -> jax.Array:
    """x, or dy for dx."""
    return jax.random.normal(jax.random.key(0), (m, gemm.n if direction == "dx" else gemm.k), jnp.bfloat16)


# Autotuning would take longer than all else here.
@functools.partial(jax.jit, static_argnums=2, compiler_options={"xla_gpu_autotune_level": 0})
def _lora_x(x: jax.Array, a: jax.Array, count: int) -> jax.Array:
    """`x A` of `count` adapters as the kernels take it: zeros past the rank."""
    return reference.lora_x(x, a, (RANK,) * count)


def lora_x_of(x: jax.Array, layer: tuple, direction: str) -> jax.Array | None:
    """`x A` of a layer's adapters; None for dx, which has none."""
    return None if direction == "dx" else _lora_x(x, layer[1], len(layer[2]))


def build(trial: Trial | Prologue) -> tuple:
    """The program and its arguments as shapes."""
    if isinstance(trial, Prologue):
        return trial.call, (jax.eval_shape(lambda: trial.inputs(0)),)
    x = jax.eval_shape(lambda: activations(trial.gemm, trial.direction, trial.m))
    layer = jax.eval_shape(lambda: random_layer(trial.gemm, 0))
    lora_x = jax.ShapeDtypeStruct((trial.m, MAX_RANK * len(layer[2])), x.dtype)
    return trial.call, (x, None if trial.direction == "dx" else lora_x, layer)


class Timer:
    """Checks and times the programs of one GEMM on the default device.

    Args:
      group: its trials.
      load: gives the executable of each trial and prologue, or the compiler's message where it refused.

    Attributes:
      refused: why a trial does not run.
    """

    def __init__(self, group: Sequence[Trial], load: Callable[[Trial | Prologue], Callable | str]) -> None:
        gemm, direction = group[0].gemm, group[0].direction
        self.refused: dict[Trial, str] = {}
        self._calls: dict[Trial | Prologue, tuple[Callable, list]] = {}
        x = activations(gemm, direction, max(trial.m for trial in group))
        layers = {many: layers_of(gemm, MANY if many else 1) for many in {trial.m >= MANY for trial in group}}
        first = next(iter(layers.values()))[0]
        lora_x = lora_x_of(x, first, direction)
        expected = exact(x[:256], first[0], direction == "dx")
        if direction == "forward":
            of_each = split_lora_x(lora_x[:256], [b.shape[0] for b in first[2]])
            expected += jnp.concatenate([fp32_matmul(t, b) for t, b in zip(of_each, first[2], strict=True)], axis=1)
        for trial in group:
            found, some = load(trial), layers[trial.m >= MANY]
            if isinstance(found, str):
                self.refused[trial] = found
                continue
            call = functools.partial(found, x[: trial.m], None if lora_x is None else lora_x[: trial.m])
            try:
                refuse_if_wrong(call(some[0]), expected[: trial.m], str(trial.config))
            except (ValueError, jax.errors.JaxRuntimeError) as error:  # keep the rest of the sweep
                self.refused[trial] = f"WRONG: {str(error)[:200]}"
                continue
            self._calls[trial] = call, some
        for prologue in prologues(group):
            found = load(prologue)
            if isinstance(found, str):
                raise ValueError(f"{prologue} does not compile: {found}")
            self._calls[prologue] = found, [prologue.inputs(seed) for seed in range(CALLS)]
        self._prologue_us = self.times(prologues(group), CALLS)

    def times(self, several: Sequence[Trial | Prologue], calls: int = CALLS) -> dict[Trial | Prologue, float]:
        """Median microseconds of each kernel over `calls` calls, with all weights in turn; without those refused."""
        several = [one for one in several if one in self._calls]
        if not several:
            return {}
        counts = [(0, calls) if one.m < MANY else (8, max(2, calls // 4)) for one in several]

        def run() -> None:
            for one, count in zip(several, counts, strict=True):
                call, layers = self._calls[one]
                for i in range(sum(count)):
                    y = call(layers[i % len(layers)])
                jax.block_until_ready(y)

        times = kernel_medians(profiled(run), lambda name: OURS.search(name) is not None, counts)
        return dict(zip(several, times, strict=True))

    def prologue_us(self, trial: Trial) -> float | None:
        """Microseconds of this GEMM's prologue; None where it is the same for all. A launch that one of them does
        without is counted for the others."""
        if not any(prologue.m == trial.m for prologue in self._prologue_us):
            return None
        prologue = Prologue(trial.gemm, trial.m, trial.lora_form, trial.gpu)
        if trial.gemm.prologue != "plain":
            return self._prologue_us[prologue]
        return 0.0 if prologue.form == "a" else self._prologue_us[prologue] + LAUNCH_US


def present(gemm: Gemm, m: int, direction: str, gpu: Gpu = H200) -> GemmConfig | SkinnyConfig:
    """The table's choice, with as many stages as it has without adapters."""
    transposed = direction == "dx"
    fused = [] if transposed else gemm.adapters
    adapted = tuning.config_for(m, gemm.n, gemm.k, transposed=transposed, adapters=fused, gpu=gpu)
    if isinstance(adapted, SkinnyConfig):
        return adapted
    return tuning.config_for(m, gemm.n, gemm.k, transposed=transposed, gpu=gpu)
