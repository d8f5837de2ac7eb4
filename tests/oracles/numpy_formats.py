"""What quantized weights are worth, in float64, and slow quantizers, from the format descriptions."""

import ml_dtypes
import numpy as np
import torch

from oracles import nf4_goldens

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
NF4 = np.asarray(nf4_goldens.NF4)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """u8[n, k/2] -> codes [n, k], even column in the low nibble."""
    out = np.empty((codes.shape[0], codes.shape[1] * 2), np.int64)
    out[:, 0::2], out[:, 1::2] = np.asarray(codes) % 16, np.asarray(codes) // 16
    return out


def nf4_codes(codes: np.ndarray) -> np.ndarray:
    """u8[n, k/2] -> codes [n, k], even column in the high nibble."""
    return np.stack([np.asarray(codes) // 16, np.asarray(codes) % 16], -1).reshape(len(codes), -1)


def nvfp4(codes, scales, global_scale, divides: bool) -> np.ndarray:
    """`code · scale / G` or `code · scale · G` in float64."""
    row = np.broadcast_to(np.asarray(global_scale, np.float64).reshape(-1, 1), (len(codes), 1))
    block = np.repeat(np.asarray(scales).astype(np.float64), 16, axis=1)
    return E2M1[nibbles(codes)] * block * (1 / row if divides else row)


def mxfp4(codes, exponents) -> np.ndarray:
    """`code · 2^(e - 127)` in float64."""
    return E2M1[nibbles(codes)] * np.repeat(2.0 ** (np.asarray(exponents).astype(np.float64) - 127), 32, axis=1)


def nf4(codes, absmax) -> np.ndarray:
    """`table[code] · absmax` in float64."""
    return NF4[nf4_codes(codes)] * np.repeat(np.asarray(absmax, np.float64), 64, axis=1)


def quantize_nvfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """(codes [n, k], scales e4m3 [n, k/16], divisor) as compressed-tensors computes them, on torch tensors; codes by
    ml_dtypes' cast to E2M1.
    """
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[weight.dtype.name]
    divisor = np.float32((448.0 * 6.0 / torch.tensor(weight.astype(np.float32)).to(kind).abs().max()).float())
    blocks = torch.tensor(weight.astype(np.float32)).to(kind).unflatten(-1, (-1, 16))
    sixth = blocks.abs().amax(-1) / 6
    scales = (torch.tensor(divisor) * sixth.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.where(scales.float() == 0, torch.tensor(0.125).to(torch.float8_e4m3fn).float(), scales.float())
    scaled = (blocks.float() / (scales / torch.tensor(divisor))[..., None]).clamp(-6, 6).flatten(-2).numpy()
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    return codes, scales.numpy().astype(ml_dtypes.float8_e4m3fn), divisor


def quantize_mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, exponent bytes), one block at a time: the smallest scale with which every value is below 7."""
    n, k = weight.shape
    codes, exponents = np.empty((n, k), np.uint8), np.empty((n, k // 32), np.uint8)
    for row in range(n):
        for block in range(k // 32):
            values = weight[row, block * 32 : block * 32 + 32].astype(np.float64)
            largest, e = np.abs(values).max(), -127
            while largest >= 7 * 2.0**e:
                e += 1
            exponents[row, block] = e + 127
            scaled = np.clip(values / 2.0**e, -6, 6).astype(ml_dtypes.float4_e2m1fn)
            codes[row, block * 32 : block * 32 + 32] = scaled.view(np.uint8) & 0xF
    return codes, exponents


def quantize_nf4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes, absmax): exhaustive search for the nearest table entry."""
    blocks = weight.astype(np.float64).reshape(len(weight), -1, 64)
    absmax = np.abs(blocks).max(-1)
    unit = blocks / np.where(absmax > 0, absmax, 1)[..., None]
    return np.abs(unit[..., None] - NF4).argmin(-1).reshape(weight.shape), absmax
