"""NVFP4 GEMMs with one config each and the decode prologues that they need, checked and timed: the shared part of
`tune_matmul.py` and `bench_matmul.py`.

A time is the median duration of the kernel itself by the profiler, over weights that outgrow the L2: some 0.8 µs less
than in a loop. Programs are compiled beforehand by processes that do not touch the GPU (`ahead`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import ahead
import jax
import jax.numpy as jnp
from qerl_kernels.decode_prologue import config as prologue_config
from qerl_kernels.decode_prologue import reference
from qerl_kernels.decode_prologue.api import lora_prologue, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.nvfp4_matmul import cases, packing, tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm
from qerl_kernels.nvfp4_matmul.gemm.transposed import gemm_dx
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK, LoraForm, split_lora_x
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul
from qerl_kernels.ops import fp32_matmul
from timing import kernel_medians

RANK = 32  # LoRA rank
ROTATE_BYTES = 512 << 20  # weights in rotation, so that the L2 does not help
MANY = 1024  # rows from which a call heats the GPU: it has warm-up calls, and is timed at the clock its power allows
CALLS = 24  # timed calls below that
MAX_ERROR = 2.5e-3
OURS = re.compile("nvfp4|decode_prologue")  # names of the kernels that are timed


def adapters(case: str, rank: int, seed: int) -> tuple[jax.Array | None, list]:
    """LoRA A of all parts of a projection side by side, as a decode loop keeps them, and B of each."""
    if not rank:
        return None, []
    _, k = cases.SHAPES[case]
    first, *keys = jax.random.split(jax.random.key(seed), 1 + len(cases.parts(case)))
    a = jax.random.normal(first, (k, rank * len(keys)), jnp.bfloat16) / k**0.5
    widths = zip(keys, cases.parts(case), strict=True)
    return a, [jax.random.normal(key, (rank, width), jnp.bfloat16) / 8 for key, width in widths]


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


def exact(x, weight, transposed: bool) -> jax.Array:
    """x · W for at most 256 rows, with the exact weights in fp32."""
    return jax.block_until_ready(_exact(x, weight, transposed))


def refuse_if_wrong(y, expected, what: str) -> None:
    """Raises SystemExit where ‖y − expected‖ / ‖expected‖ is above the bound or NaN."""
    error = float(_distance(y, expected))
    if not error <= MAX_ERROR:
        raise SystemExit(f"{what}: relative error {error:.2e} is above {MAX_ERROR:.1e}")


LAUNCH_US = 0.8  # what a kernel takes in a loop over its duration by the profiler (tools/results/notes/measuring.md)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A config tried for a GEMM."""

    case: str
    m: int
    direction: str
    config: GemmConfig | SkinnyConfig

    def call(self, x: jax.Array, lora_x: jax.Array, layer: tuple) -> jax.Array:
        """The GEMM. `layer`: the weight, A of its adapters side by side and B of each."""
        weight, a, lora_b = layer
        if self.direction == "dx":
            return gemm_dx(x, weight, self.config)
        form = lora_form(self.case, self.m, self.config)
        if form == "a":
            return skinny_matmul(x, weight, self.config, lora_a=a, lora_b=lora_b)
        if form == "partials":  # as many as there are in decode, all but one of them zeros
            whole = jnp.concatenate(split_lora_x(lora_x, [RANK] * len(lora_b)), axis=1)
            more = partials_of(self.case, self.m) - 1
            lora_x = jnp.pad(whole[None].astype(jnp.float32), ((0, more), (0, 0), (0, 0)))
        if isinstance(self.config, SkinnyConfig):
            return skinny_matmul(x, weight, self.config, lora_x=lora_x, lora_b=lora_b)
        config = tuning.fit_lora(self.config, weight.shape[0], [b.shape for b in lora_b])
        return gemm(x, weight, config, lora_x=lora_x, lora_b=lora_b)


def prologue_kind(case: str) -> str:
    """Kind of a projection's decode prologue."""
    return {"qkv": "norm", "gate": "norm", "down": "silu", "o": "plain"}[case.split("_")[0]]


def lora_form(case: str, m: int, config: GemmConfig | SkinnyConfig) -> str:
    """LoRA input of this GEMM in decode: "whole", "partials" or "a" (the GEMM computes `x A`)."""
    n, _ = cases.SHAPES[case]
    adapters = [(RANK, width) for width in cases.parts(case)]
    if isinstance(config, GemmConfig):
        takes_partials = tuning.fit_lora(config, n, adapters).takes_partials(m, adapters)
    elif config.computes_lora_x:
        return "a"
    else:
        takes_partials = True
    return "partials" if takes_partials and prologue_kind(case) != "norm" else "whole"


def partials_of(case: str, m: int) -> int:
    """Number of split-K partials that the decode prologue leaves."""
    ranks = (RANK,) * len(cases.parts(case))
    spec = prologue_config.PrologueSpec(prologue_kind(case), m, cases.SHAPES[case][1], ranks, partials=True)
    return prologue_config.best_config(spec).k_splits


@dataclasses.dataclass(frozen=True)
class Prologue:
    """The decode prologue of a GEMM: a norm, SiLU, or `x A` alone, with the LoRA input that it gives (`lora_form`)."""

    case: str
    m: int
    form: str

    @property
    def kind(self) -> str:
        """norm, silu or plain."""
        return prologue_kind(self.case)

    def inputs(self, seed: int) -> tuple:
        """(inputs of the operation, A); another set for each of the calls, so that none of it is in the L2."""
        _, k = cases.SHAPES[self.case]
        key = jax.random.key(seed)
        width = 2 * k if self.kind == "silu" else k
        x = jax.random.normal(key, (self.m, width), jnp.float32 if self.kind == "norm" else jnp.bfloat16)
        rest = (x.astype(jnp.bfloat16), jnp.ones(k)) if self.kind == "norm" else ()
        return (x, *rest), None if self.form == "a" else adapters(self.case, RANK, seed)[0]

    def call(self, layer: tuple) -> tuple:
        """The operation. `layer`: from `inputs`."""
        inputs, a = layer
        ranks = () if a is None else (RANK,) * len(cases.parts(self.case))
        if self.kind == "norm":
            return rms_norm_prologue(*inputs, 1e-6, a, ranks, dtype=jnp.bfloat16, implementation="mosaic_gpu")
        form = LoraForm.PARTIALS if self.form == "partials" else LoraForm.WHOLE
        more = {"lora_form": form, "implementation": "mosaic_gpu"}
        if self.kind == "silu":
            return silu_mul_prologue(*inputs, a, ranks, **more)
        return lora_prologue(*inputs, a, ranks, **more)


def prologues(group: Sequence[Trial]) -> list[Prologue]:
    """The prologues of some trials, where they are not the same for all of them. dx has none."""
    if group[0].direction == "dx":
        return []
    found = []
    for m in dict.fromkeys(trial.m for trial in group):
        forms = dict.fromkeys(lora_form(trial.case, m, trial.config) for trial in group if trial.m == m)
        found += [Prologue(group[0].case, m, form) for form in forms] if len(forms) > 1 else []
    return [prologue for prologue in found if (prologue.kind, prologue.form) != ("plain", "a")]


def counted_prologue(trial: Trial, times: dict) -> float | None:
    """Microseconds of this GEMM's prologue, from those of each `Prologue`; None where it is the same for all. A launch
    that one of them does without is counted for the others."""
    if not any(isinstance(key, Prologue) and key.m == trial.m for key in times):
        return None
    prologue = Prologue(trial.case, trial.m, lora_form(trial.case, trial.m, trial.config))
    if prologue.kind != "plain":
        return times[prologue]
    return 0.0 if prologue.form == "a" else times[prologue] + LAUNCH_US


def layers_of(case: str, m: int) -> list[tuple]:
    """Random weights, so many that they outgrow the L2 (one from 1024 rows, where x and y do), each with A of its
    adapters side by side and B of each.
    """
    n, k = cases.SHAPES[case]
    count = 1 if m >= MANY else math.ceil(ROTATE_BYTES / (n * k * 0.5625))
    return [(cases.random_packed(jax.random.key(i), n, k), *adapters(case, RANK, i)) for i in range(count)]


def activations(case: str, direction: str, m: int) -> jax.Array:
    """x, or dy for dx."""
    n, k = cases.SHAPES[case]
    return jax.random.normal(jax.random.key(0), (m, n if direction == "dx" else k), jnp.bfloat16)


# Autotuning would take longer than all else here.
@functools.partial(jax.jit, static_argnums=2, compiler_options={"xla_gpu_autotune_level": 0})
def _lora_x(x: jax.Array, a: jax.Array, count: int) -> jax.Array:
    """`x A` of `count` adapters as the kernels take it: zeros past the rank."""
    return reference.lora_x(x, a, (RANK,) * count)


def lora_x_of(x: jax.Array, layer: tuple, direction: str) -> jax.Array | None:
    """`x A` of a layer's adapters; None for dx, which has none."""
    return None if direction == "dx" else _lora_x(x, layer[1], len(layer[2]))


def build(trial: Trial | Prologue) -> tuple:
    """For `ahead.compile_all`: the program and its arguments as shapes."""
    if isinstance(trial, Prologue):
        return trial.call, (jax.eval_shape(lambda: trial.inputs(0)),)
    x = jax.eval_shape(lambda: activations(trial.case, trial.direction, trial.m))
    layer = jax.eval_shape(lambda: layers_of(trial.case, trial.m)[0])
    lora_x = jax.ShapeDtypeStruct((trial.m, MAX_RANK * len(layer[2])), x.dtype)
    return trial.call, (x, None if trial.direction == "dx" else lora_x, layer)


class Timer:
    """Checks and times the programs of one case and direction.

    Args:
      group: its trials, all of which have an executable or a message in `executables`.
      executables: from `ahead.compile_all`, by (trial,).
    """

    def __init__(self, group: Sequence[Trial], executables: Mapping) -> None:
        case, direction = group[0].case, group[0].direction
        self.refused: dict[Trial, str] = {}
        self._calls: dict[Trial | Prologue, tuple[Callable, list]] = {}
        x = activations(case, direction, max(trial.m for trial in group))
        layers = {many: layers_of(case, MANY if many else 1) for many in {trial.m >= MANY for trial in group}}
        first = next(iter(layers.values()))[0]
        lora_x = lora_x_of(x, first, direction)
        expected = exact(x[:256], first[0], direction == "dx")
        if direction == "forward":
            of_each = split_lora_x(lora_x[:256], [b.shape[0] for b in first[2]])
            expected += jnp.concatenate([fp32_matmul(t, b) for t, b in zip(of_each, first[2], strict=True)], axis=1)
        for trial in group:
            found, some = executables[(trial,)], layers[trial.m >= MANY]
            if isinstance(found, str):
                self.refused[trial] = found
                continue
            inputs = x[: trial.m], None if lora_x is None else lora_x[: trial.m]
            call = functools.partial(ahead.load(found, *inputs, some[0]), *inputs)
            try:
                refuse_if_wrong(call(some[0]), expected[: trial.m], str(trial))
            except (SystemExit, jax.errors.JaxRuntimeError) as error:  # keep the rest of the sweep
                self.refused[trial] = f"WRONG: {str(error)[:200]}"
                continue
            self._calls[trial] = call, some
        for prologue in prologues(group):
            found = executables[(prologue,)]
            if isinstance(found, str):
                raise SystemExit(f"{prologue} does not compile: {found}")
            sets = [prologue.inputs(seed) for seed in range(CALLS)]
            self._calls[prologue] = ahead.load(found, sets[0]), sets

    def times(self, several: Sequence[Trial | Prologue], calls: int = CALLS) -> dict[Trial | Prologue, float]:
        """Median microseconds of each kernel over `calls` calls, with all weights in turn."""
        several = [one for one in several if one in self._calls]
        counts = [(0, calls) if one.m < MANY else (8, max(2, calls // 4)) for one in several]

        def run() -> None:
            for one, count in zip(several, counts, strict=True):
                call, layers = self._calls[one]
                for i in range(sum(count)):
                    y = call(layers[i % len(layers)])
                jax.block_until_ready(y)

        return dict(zip(several, kernel_medians(run, lambda name: OURS.search(name) is not None, counts), strict=True))


def all_programs(groups: Sequence[Sequence[Trial]]) -> list[tuple]:
    """Every trial and prologue of some groups, for `ahead.compile_all` with `build`."""
    return [(one,) for group in groups for one in (*group, *prologues(group))]


def present(case: str, m: int, direction: str) -> GemmConfig | SkinnyConfig:
    """The table's choice, with as many stages as it has without adapters."""
    n, k = cases.SHAPES[case]
    transposed = direction == "dx"
    widths = () if transposed else cases.parts(case)
    adapted = tuning.config_for(m, n, k, transposed=transposed, adapters=[(RANK, width) for width in widths])
    return adapted if isinstance(adapted, SkinnyConfig) else tuning.config_for(m, n, k, transposed=transposed)
