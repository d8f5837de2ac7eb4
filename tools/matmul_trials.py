"""The programs of `tune_matmul.py`: a GEMM with one config, and the decode prologue that the config needs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from matmul_model import RANK
from matmul_programs import Gemm, adapters, weights_of
from qerl_kernels.decode_prologue import config as prologue_config
from qerl_kernels.decode_prologue import reference
from qerl_kernels.decode_prologue.api import lora_prologue, rms_norm_prologue, silu_mul_prologue
from qerl_kernels.nvfp4_matmul import cases, tuning
from qerl_kernels.nvfp4_matmul.gemm.config import GemmConfig
from qerl_kernels.nvfp4_matmul.gemm.kernel import gemm
from qerl_kernels.nvfp4_matmul.gemm.transposed import gemm_dx
from qerl_kernels.nvfp4_matmul.lora_input import MAX_RANK, LoraForm, split_lora_x
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig
from qerl_kernels.nvfp4_matmul.skinny.kernel import skinny_matmul

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
    """Weights as `weights_of` has them, each with A of its adapters side by side and B of each."""
    return [(weight, *adapters(case, RANK, i)) for i, weight in enumerate(weights_of(case, m))]


def activations(case: str, direction: str, m: int) -> jax.Array:
    """x, or dy for dx."""
    return jax.random.normal(jax.random.key(0), (m, Gemm(case, m, direction).width()), jnp.bfloat16)


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
