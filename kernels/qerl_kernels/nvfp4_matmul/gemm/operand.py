"""The A operand of the forward GEMM: the packed weight as it lies."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from qerl_kernels.nvfp4_matmul.dequant import SCALES, WORDS, dequantize


class Forward:
    """`Operand` of `y = x Wᵀ`; the functions are described there."""

    name = "matmul"

    def words(self, words: jax.Array) -> jax.Array:
        return words

    def word_transforms(self) -> tuple:
        return ()

    def place(self, along_n: Any, along_k: Any) -> tuple[Any, Any]:
        return along_n, along_k

    def load(self, words_s: jax.Ref, scales_s: jax.Ref) -> tuple[jax.Array, jax.Array]:
        words = plgpu.load(words_s, layout=WORDS, optimized=False)
        scales = plgpu.load(scales_s, layout=SCALES, optimized=False)
        return words, scales

    def dequantize(self, words: jax.Array, scales: jax.Array) -> jax.Array:
        return dequantize(words, scales)

    def multiplier_row(self, first: jax.Array) -> jax.Array | int:
        return first

    def store(self, out_s: jax.Ref, y: jax.Array) -> None:
        out_s.T[...] = y


FORWARD = Forward()
