"""Block scales of NVFP4 chosen by the error they leave, where `nvfp4.quantize` derives them from the block's maximum.

Rounding a block of 16 with the scale s leaves `Σ_k h_k (Q_k − W_k)²`, with h_k the importance of input feature k: its
mean square over calibration tokens, so that this is the expected squared error of the output, cross terms left out.
Mapping the largest magnitude of the block to 6, as round-to-nearest does, is one choice of s; mapping it to 4 is
another, often the better one ("Four Over Six", arXiv 2512.02010), because E2M1 has no value between 4 and 6. Here every
E4M3 number near that maximum is tried: two below the one of round-to-nearest, and five above, up to a maximum of about
4.

Axes: n output features, k input features, b blocks of 16 of them, t tokens; lowercase as in the kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float32, UInt8
from qerl_kernels.formats import NVFP4_BLOCK
from qerl_kernels.ops import fp32_matmul

from qerl_jax.models.formats.nvfp4 import E2M1_MAX, E4M3_MAX, row_slices

_OFFSETS = (0, -2, -1, 1, 2, 3, 4, 5)  # in steps of E4M3, eight an octave; 0 first: it wins ties
_LARGEST_CODE = 0x7E  # 448


def block_scales(
    weight: Float32[np.ndarray, "n k"], importance: Float32[np.ndarray, " k"], divisor: np.float32
) -> np.ndarray:
    """The E4M3 scale of each block [n, k/16] that leaves the least error; `divisor` is the global scale."""
    n, k = weight.shape
    found = [_best_scales(jnp.asarray(weight[a:b]), importance, divisor) for a, b in row_slices(n, k)]
    return np.concatenate([np.asarray(bits) for bits in found]).view(ml_dtypes.float8_e4m3fn)


def output_error(
    weight: Float32[Array, "n k"],
    rows: Float32[np.ndarray, " n"],
    columns: Float32[np.ndarray, " k"],
    importance: Float32[np.ndarray, " k"],
    divisor: np.float32,
    inputs: Float32[Array, "t k"],
    part: tuple[int, int],
) -> float:
    """`‖X (W' − W)ᵀ‖²` over some rows of W. W' stands for W where `W · columns / rows` is stored in NVFP4, with the
    scales of `block_scales`.

    Args:
      weight: W.
      rows, columns: factors that neighbouring operations take over (`models.awq`).
      importance: importance of each input feature of the stored weight.
      divisor: its global scale.
      inputs: X, inputs of W for some tokens.
      part: first row, and the one behind the last.
    """
    errors = [
        _squared_error(weight[a:b], rows[a:b], columns, importance, divisor, inputs) for a, b in _spans(weight, part)
    ]
    return float(sum(np.asarray(error, np.float64) for error in errors))


def output_energy(weight: Float32[Array, "n k"], inputs: Float32[Array, "t k"], part: tuple[int, int]) -> float:
    """`‖X Wᵀ‖²` over some rows of W."""
    return float(sum(np.asarray(_energy(weight[a:b], inputs), np.float64) for a, b in _spans(weight, part)))


def largest_magnitude(
    weight: Float32[Array, "n k"], rows: Float32[np.ndarray, " n"], columns: Float32[np.ndarray, " k"]
) -> float:
    """max |W · columns / rows|."""
    spans = _spans(weight, (0, weight.shape[0]))
    return max(float(_largest(weight[a:b], rows[a:b], columns)) for a, b in spans)


def _spans(weight: Float32[Array, "n k"], part: tuple[int, int]) -> list[tuple[int, int]]:
    start, stop = part
    return [(start + a, start + b) for a, b in row_slices(stop - start, weight.shape[1])]


@jax.jit
def _largest(weight, rows, columns) -> Float32[Array, ""]:
    return jnp.abs(weight * columns / rows[:, None]).max()


@jax.jit
def _energy(weight, inputs) -> Float32[Array, ""]:
    return (fp32_matmul(inputs, weight.T) ** 2).sum()


@jax.jit
def _squared_error(weight, rows, columns, importance, divisor, inputs) -> Float32[Array, ""]:
    stored = weight * columns / rows[:, None]
    bits = _best_scales(stored, importance, divisor)
    values = _rounded(_blocks(stored), bits, divisor).reshape(weight.shape)
    return (fp32_matmul(inputs, (values * rows[:, None] / columns - weight).T) ** 2).sum()


@jax.jit
def _best_scales(
    weight: Float32[Array, "n k"], importance: Float32[Array, " k"], divisor: Float32[Array, ""]
) -> UInt8[Array, "n b"]:
    """Bits of the best scales. As integers throughout: XLA would leave out a rounding to E4M3 and back."""
    blocks, weights = _blocks(weight), importance.reshape(-1, NVFP4_BLOCK)
    amax = jnp.abs(blocks).max(-1)
    nearest = jnp.clip(divisor * (amax / E2M1_MAX), 0, E4M3_MAX).astype(jnp.float8_e4m3fn)
    nearest = jax.lax.bitcast_convert_type(nearest, jnp.uint8).astype(jnp.int32)
    best, least = None, None
    for offset in _OFFSETS:
        bits = jnp.clip(nearest + offset, 1, _LARGEST_CODE).astype(jnp.uint8)
        error = (weights * (_rounded(blocks, bits, divisor) - blocks) ** 2).sum(-1)
        better = True if least is None else error < least
        best = bits if best is None else jnp.where(better, bits, best)
        least = error if least is None else jnp.where(better, error, least)
    return best


def _blocks(weight: Float32[Array, "n k"]) -> Float32[Array, "n b 16"]:
    n, k = weight.shape
    return weight.reshape(n, k // NVFP4_BLOCK, NVFP4_BLOCK)


def _rounded(
    blocks: Float32[Array, "n b 16"], bits: UInt8[Array, "n b"], divisor: Float32[Array, ""]
) -> Float32[Array, "n b 16"]:
    """The values that blocks have in NVFP4 under given scales: nearest E2M1 number, ties to the even code."""
    scales = jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
    step = (scales / divisor)[..., None]
    scaled = blocks / step
    magnitude = jnp.minimum(jnp.abs(scaled), E2M1_MAX)
    gap = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))  # between neighbours in E2M1
    return jnp.sign(scaled) * jnp.round(magnitude / gap) * gap * step
