"""NVFP4 as compressed-tensors (llm-compressor) and NVIDIA's ModelOpt store it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from qerl_kernels.formats import NVFP4_BLOCK, Nvfp4

from qerl_jax.checkpoint.safetensors import CheckpointError, Tensors
from qerl_jax.messages import shown
from qerl_jax.models.formats import nvfp4

_E4M3_LARGEST = 0x7E
# Bounds of a global scale as a multiplier: normal in fp32, and code · scale · multiplier at most its largest number.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max) / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
# ModelOpt's algorithms whose weights have the layout of NVFP4. That of AWQ also tells that inputs of some projections
# may be scaled; `tensor_names` refuses those.
_MODELOPT = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
# What a compressed-tensors scheme must say of its weights, where it says it, for the bytes to mean a block-scaled FP4.
_FP4_WEIGHTS = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}


@dataclasses.dataclass(frozen=True)
class Fp4Layout:
    """What the layouts of FP4 have in common: codes, block scales, and the `quantization_config` of compressed-tensors.

    Attributes:
      name, weight_format, codes, scales, unused: as in `Layout`.
      block: input features of a block scale.
      weights, config: what the config says of weights, and at its end, besides what it says of any FP4.
    """

    name: str
    weight_format: str
    block: int
    codes: str = "weight_packed"
    scales: str = "weight_scale"
    unused: tuple[str, ...] = ("input_global_scale",)
    weights: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def _packed(self) -> str:
        return f"{self.weight_format}-pack-quantized"

    def describes(self, section: Mapping[str, Any], where: str) -> bool:
        """As `Layout.describes`, of a section of compressed-tensors."""
        if section.get("quant_method") != "compressed-tensors" or section.get("format") != self._packed:
            return False
        groups = section.get("config_groups") or {}
        for name, group in groups.items() if isinstance(groups, dict) else [("", groups)]:
            weights = (group.get("weights") if isinstance(group, dict) else None) or {}
            for key, expected in {**_FP4_WEIGHTS, "group_size": self.block}.items():
                if not isinstance(weights, dict) or weights.get(key, expected) != expected:
                    raise CheckpointError(
                        f"{where}: config_groups.{name}.weights is {shown(weights)}, {self.weight_format.upper()} has "
                        f"{key} {expected!r}"
                    )
        return True

    def quantization_config(self, dtype: np.dtype, ignored: Sequence[str]) -> dict[str, Any]:
        """As compressed-tensors writes it."""
        weights = {**_FP4_WEIGHTS, "group_size": self.block, **self.weights}
        group = {
            "format": self._packed,
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": dict(sorted(weights.items())),
        }
        return {
            "config_groups": {"group_0": group},
            "format": self._packed,
            "global_compression_ratio": None,
            "ignore": [*ignored, "lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            **self.config,
        }


@dataclasses.dataclass(frozen=True)
class _Nvfp4Layout(Fp4Layout):
    """A `Layout` of codes, E4M3 block scales and one fp32 global scale, by which values are divided or multiplied."""

    global_scale: str = "weight_global_scale"
    divides: bool = True

    def expected(self, tensors: Tensors, module: str, shape: tuple[int, int]) -> dict:
        n, k = shape
        return {
            f"{module}.{self.codes}": ((n, k // 2), ("uint8",)),
            f"{module}.{self.scales}": ((n, k // NVFP4_BLOCK), ("float8_e4m3fn",)),
            f"{module}.{self.global_scale}": ((1,) if self.divides else (), ("float32",)),
        }

    def read(self, tensors: Tensors, module: str, shape: tuple[int, int]) -> Nvfp4:
        codes, scale_name, global_name = (f"{module}.{part}" for part in (self.codes, self.scales, self.global_scale))
        value = tensors[global_name].reshape(-1)[0]
        where = f"{tensors.file_of(global_name)}: {global_name!r} is {value}"
        if not (np.isfinite(value) and value > 0):
            raise CheckpointError(f"{where}, must be finite and above 0")
        multiplier = 1 / float(value) if self.divides else float(value)
        if not _SMALLEST <= multiplier <= _LARGEST:
            raise CheckpointError(
                f"{where}, which multiplies weights by {multiplier:.3g}; it must lie between {_SMALLEST:.3g} and "
                f"{_LARGEST:.3g} for them to be numbers"
            )
        scales = tensors[scale_name]
        bits = np.asarray(scales).view(np.uint8)
        if bits.max() > _E4M3_LARGEST:  # sign bit set, or the NaN 0x7F
            row, column = np.argwhere(bits > _E4M3_LARGEST)[0]
            raise CheckpointError(
                f"{tensors.file_of(scale_name)}: {scale_name!r}[{row}, {column}] is {scales[row, column]}, must be a "
                "number of at least 0"
            )
        return Nvfp4(tensors[codes], scales, np.full(shape[0], value, np.float32), self.divides)

    def stored(self, module: str, weight: Nvfp4, dtype: np.dtype) -> dict[str, np.ndarray]:
        parts = {self.codes: weight.codes, self.scales: weight.scales, self.global_scale: weight.global_scale[:1]}
        return {f"{module}.{suffix}": array for suffix, array in parts.items()}


class _ModelOptLayout(_Nvfp4Layout):
    """Read only. Its section lies in config.json or in hf_quant_config.json, there under "quantization"."""

    def describes(self, section: Mapping[str, Any], where: str) -> bool:
        producer, nested = section.get("producer"), section.get("quantization")
        is_producer = isinstance(producer, dict) and producer.get("name") == "modelopt"
        if section.get("quant_method") not in ("modelopt", "modelopt_fp4") and not is_producer:
            return False
        algorithm = (nested if isinstance(nested, dict) else section).get("quant_algo")
        if algorithm not in _MODELOPT:
            raise CheckpointError(f"{where}: ModelOpt quant_algo {shown(algorithm)}, supported are {list(_MODELOPT)}")
        return True


NVFP4 = _Nvfp4Layout(
    "compressed-tensors",
    "nvfp4",
    NVFP4_BLOCK,
    weights={
        "actorder": None,
        "block_structure": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.float8_e4m3fn",
        "strategy": "tensor_group",
        "zp_dtype": None,
    },
    config={"sparsity_config": {}, "transform_config": {}, "version": "0.19.0"},
)
"""As llm-compressor 0.14.0.1 writes it."""
MODELOPT = _ModelOptLayout(
    "modelopt",
    "nvfp4",
    NVFP4_BLOCK,
    codes="weight",
    unused=("input_scale",),
    global_scale="weight_scale_2",
    divides=False,
)
