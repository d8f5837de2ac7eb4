"""NF4 as bitsandbytes lays it out and transformers saves it: names, metadata and reading. The library is not needed.

A projection X of [n, k] is `X.weight` u8 [n·k/2, 1]; `X.weight.absmax` [n·k/64], in fp32, or with double quantization
as 8-bit codes; `X.weight.quant_map`, the table of the 16 values; and JSON text in `X.weight.quant_state.…`
(bitsandbytes' `QuantState.as_dict(packed=True)`). With double quantization an absmax is
`nested_quant_map[code] · nested_absmax + nested_offset`, one nested absmax for 256 codes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from qerl_jax.checkpoint.safetensors import CheckpointError, Tensors
from qerl_jax.messages import shown
from qerl_jax.models.formats.nf4 import NF4_BLOCK, NF4_VALUES, Nf4

WEIGHT, ABSMAX, QUANT_MAP = "weight", "weight.absmax", "weight.quant_map"
STATE, _FP4_STATE = "weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"
_NESTED_ABSMAX, _NESTED_MAP, _NESTED_BLOCK = "weight.nested_absmax", "weight.nested_quant_map", 256
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)  # an absmax that bf16 can hold
# What bitsandbytes must say for its bytes to mean NF4, and what an older config leaves unsaid means.
_NF4_CONFIG = {
    "load_in_8bit": (False, False),
    "load_in_4bit": (True, False),
    "bnb_4bit_quant_type": ("nf4", False),
    "bnb_4bit_quant_storage": ("uint8", "uint8"),
}


def quant_state(shape: tuple[int, int], dtype: str) -> np.ndarray:
    """The JSON text beside a weight, as bytes; `dtype`: what bitsandbytes rounds its values to."""
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": dtype, "shape": list(shape)}
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


@dataclasses.dataclass(frozen=True)
class _Nf4Layout:
    """A `Layout` of codes, absmax and the two tensors by which bitsandbytes knows the format. It is written byte for
    byte as transformers saves it with bitsandbytes 0.50.2 on a CPU, without double quantization.
    """

    name: str = "bitsandbytes"
    weight_format: str = "nf4"
    codes: str = WEIGHT
    scales: str = ABSMAX
    unused: tuple[str, ...] = ()

    def describes(self, section: Mapping[str, Any], where: str) -> bool:
        if section.get("quant_method") != "bitsandbytes":
            return False
        for key, (expected, unsaid) in _NF4_CONFIG.items():
            value = section.get(key, unsaid)
            if value != expected:
                raise CheckpointError(f"{where}: quantization_config has {key} {shown(value)}, NF4 has {expected!r}")
        return True

    def expected(self, tensors: Tensors, module: str, shape: tuple[int, int]) -> dict:
        """The text may have any length. The double quantization is the stored one: transformers does not look at
        `bnb_4bit_use_double_quant` either. Raises CheckpointError for FP4, and for blocks that cross rows.
        """
        n, k = shape
        fp4, state = f"{module}.{_FP4_STATE}", f"{module}.{STATE}"
        if fp4 in tensors:
            raise CheckpointError(f"{tensors.file_of(fp4)}: {fp4!r}: {module!r} is stored as 'fp4', supported is 'nf4'")
        if k % NF4_BLOCK:
            raise CheckpointError(
                f"{tensors.where}: {module!r} has {k} input features, but NF4 needs whole blocks of {NF4_BLOCK}"
            )
        blocks, nested = n * k // NF4_BLOCK, f"{module}.{_NESTED_ABSMAX}" in tensors
        found = {
            WEIGHT: ((n * k // 2, 1), ("uint8",)),
            ABSMAX: ((blocks,), ("uint8" if nested else "float32",)),
            QUANT_MAP: ((len(NF4_VALUES),), ("float32",)),
            STATE: (tensors.entries[state].shape if state in tensors else (0,), ("uint8",)),
        }
        if nested:
            found[_NESTED_ABSMAX] = (-(-blocks // _NESTED_BLOCK),), ("float32",)
            found[_NESTED_MAP] = (256,), ("float32",)
        return {f"{module}.{suffix}": value for suffix, value in found.items()}

    def read(self, tensors: Tensors, module: str, shape: tuple[int, int]) -> Nf4:
        (n, k), nested = shape, f"{module}.{_NESTED_ABSMAX}" in tensors
        state = _parse_state(tensors[f"{module}.{STATE}"], shape, nested, _where(tensors, module, STATE))
        table, expected = tensors[f"{module}.{QUANT_MAP}"], np.asarray(NF4_VALUES, np.float32)
        if not np.array_equal(table, expected):
            at = int(np.argmax(table != expected))
            raise CheckpointError(f"{_where(tensors, module, QUANT_MAP)}[{at}] is {table[at]}, NF4 has {expected[at]}")
        absmax = np.asarray(tensors[f"{module}.{ABSMAX}"])
        if nested:
            absmax = _nested_absmax(tensors, module, absmax, state["nested_offset"])
        lowest = -_LARGEST if nested else 0.0  # double quantization may take an absmax near 0 below it
        is_sound = (absmax >= lowest) & (absmax <= _LARGEST)
        if not is_sound.all():
            at = int(np.argmin(is_sound))
            where = _where(tensors, module, ABSMAX)
            raise CheckpointError(f"{where}[{at}] is {absmax[at]}, must lie between {lowest:.3g} and {_LARGEST:.3g}")
        return Nf4(tensors[f"{module}.{WEIGHT}"].reshape(n, k // 2), absmax.reshape(n, k // NF4_BLOCK))

    def stored(self, module: str, weight: Nf4, dtype: np.dtype) -> dict[str, np.ndarray]:
        parts = {
            WEIGHT: weight.codes.reshape(-1, 1),
            ABSMAX: weight.absmax.reshape(-1),
            QUANT_MAP: np.asarray(NF4_VALUES, np.float32),
            STATE: quant_state(weight.shape, dtype.name),
        }
        return {f"{module}.{suffix}": array for suffix, array in parts.items()}

    def quantization_config(self, dtype: np.dtype, ignored: Sequence[str]) -> dict[str, Any]:
        """As transformers 5.23 saves it; `dtype`: what transformers computes in."""
        return {
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": dtype.name,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": [*ignored, "lm_head"] if ignored else None,
            "llm_int8_threshold": 6.0,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "quant_method": "bitsandbytes",
        }


NF4 = _Nf4Layout()


def _nested_absmax(tensors: Tensors, module: str, codes: np.ndarray, offset: float) -> np.ndarray:
    """The fp32 absmax that bitsandbytes computes from a double-quantized one."""
    table = tensors[f"{module}.{_NESTED_MAP}"]
    scales = np.repeat(tensors[f"{module}.{_NESTED_ABSMAX}"], _NESTED_BLOCK)[: len(codes)]
    with np.errstate(over="ignore", invalid="ignore"):  # damaged ones; the caller looks at the result
        return table[codes] * scales + np.float32(offset)


def _where(tensors: Tensors, module: str, suffix: str) -> str:
    name = f"{module}.{suffix}"
    return f"{tensors.file_of(name)}: {name!r}"


def _parse_state(text: np.ndarray, shape: tuple[int, int], nested: bool, where: str) -> dict[str, Any]:
    """The JSON object beside a weight, checked for everything that gives its tensors their meaning."""
    try:
        state = json.loads(text.tobytes().decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{where} holds {shown(state)}, not an object")
    needed = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "shape": list(shape)}
    needed["nested_blocksize"] = _NESTED_BLOCK if nested else None
    for key, value in needed.items():
        if state.get(key) != value:
            raise CheckpointError(f"{where} has {key} {shown(state.get(key))}, expected is {value!r}")
    offset = state.get("nested_offset")
    if nested and (isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) <= _LARGEST):
        raise CheckpointError(f"{where} has nested_offset {shown(offset)}, which must be a finite number")
    return state
