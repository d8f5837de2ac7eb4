"""The A operand of the forward GEMM: the packed weight as it lies."""

from __future__ import annotations

from typing import Any

import jax

from qerl_kernels.nvfp4_matmul.dequant import SCALES, WORDS, dequantize
from qerl_kernels.ptx.load import load


class Forward:
    """`WeightOperand` of `y = x Wᵀ`."""

    name = "matmul"

    def words(self, words: jax.Array) -> jax.Array:
        """As packed."""
        return words

    def word_transforms(self) -> tuple:
        """None: a thread reads 16 bytes of its own."""
        return ()

    def place(self, along_n: Any, along_k: Any) -> tuple[Any, Any]:
        """The weight lies as (n, k)."""
        return along_n, along_k

    def load(self, words_s: jax.Ref, scales_s: jax.Ref) -> tuple[jax.Array, jax.Array]:
        """128-bit loads: the words of the four k16 steps of a thread side by side."""
        return load(words_s, WORDS), load(scales_s, SCALES)

    def dequantize(self, words: jax.Array, scales: jax.Array) -> jax.Array:
        """[64 n, 64 k]."""
        return dequantize(words, scales)

    def multiplier_row(self, first: jax.Array) -> jax.Array | int:
        """Each output feature has its own."""
        return first

    def store(self, out_s: jax.Ref, y: jax.Array) -> None:
        """Features are in their order."""
        out_s.T[...] = y


FORWARD = Forward()
