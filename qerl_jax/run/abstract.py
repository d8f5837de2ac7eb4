"""Policy and training state as shapes, without an array of the model's size."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from qerl_kernels import dispatch
from qerl_kernels.formats import Nvfp4
from qerl_kernels.gpu import Gpu
from qerl_kernels.nvfp4_matmul.packing import pack

from qerl_jax import partition
from qerl_jax.checkpoint import hf_config
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.layouts import Quantization
from qerl_jax.checkpoint.load import build_policy
from qerl_jax.checkpoint.of_run import loaded_format
from qerl_jax.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE
from qerl_jax.config import Config
from qerl_jax.models.config import ModelConfig, TensorSpec
from qerl_jax.models.formats import FORMATS, Weight, format_of
from qerl_jax.models.trees import weight_trees
from qerl_jax.rl.state import init_state
from qerl_jax.types import Policy, TrainState


def abstract_run(
    config: Config, optimizer: Any = None, tensor_parallel: int = 1, gpu: Gpu | None = None
) -> tuple[Policy, TrainState]:
    """Policy and first state of the run that a config describes, from config.json alone: `ShapeDtypeStruct` for arrays.

    Args:
      config: config of the run.
      optimizer: as in `init_state`.
      tensor_parallel: devices over which the layers are divided.
      gpu: on which the run is; None: the default device.

    Raises FileNotFoundError or CheckpointError for a model directory that cannot be read.
    """
    directory = model_path(config.model, weights=False)
    quantization = hf_config.stored_quantization(directory)
    model = dataclasses.replace(hf_config.model_config(directory), tensor_parallel=tensor_parallel)
    return abstract_trees(model, loaded_format(directory, config.weight_format), config, optimizer, quantization, gpu)


def has_weights(directory: Path) -> bool:
    """Whether the model directory holds weight files."""
    return any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))


def abstract_trees(
    model: ModelConfig,
    stored: str,
    config: Config,
    optimizer: Any = None,
    quantization: Quantization | None = None,
    gpu: Gpu | None = None,
) -> tuple[Policy, TrainState]:
    """Policy and first state of a run with `ShapeDtypeStruct` for arrays, traced from the code that makes real ones.
    Packed NVFP4 weights have one global scale for all rows, as this project and llm-compressor write them. With tensor
    parallelism arrays are those of all devices.

    Args:
      model: shapes of the model.
      stored: format of the projections, one of `WEIGHT_FORMATS`.
      config: config of the run.
      optimizer: as in `init_state`.
      quantization: that of the checkpoint; None: all projections have the format.
      gpu: as in `abstract_run`.
    """
    config = config.with_max_steps(config.num_prompts)  # no shape depends on the number of steps

    def build() -> tuple[Policy, TrainState]:
        dtype = jnp.dtype(config.dtype)
        frozen, norms = _zero_weights(model, stored, quantization, dtype, config.matmul_kernel, gpu)
        policy = build_policy(model, frozen, norms, config.lora, config.seed)
        return policy, init_state(policy, config, optimizer)

    return jax.eval_shape(build)


def _zero_weights(
    model: ModelConfig,
    stored: str,
    quantization: Quantization | None,
    dtype: DTypeLike,
    matmul_kernel: str,
    gpu: Gpu | None,
) -> tuple[dict, dict]:
    count = model.tensor_parallel
    runs = matmul_kernel == "mosaic_gpu"
    runs = runs or (matmul_kernel == "auto" and dispatch.missing_for_mosaic_gpu(dtype, gpu) is None)

    def tensor(spec: TensorSpec, layer: int | None) -> Weight | jax.Array:
        part, division = part_of(spec, layer), partition.division_of(spec.path)
        return part if count == 1 or division is None else partition.joined([part] * count, division)

    def part_of(spec: TensorSpec, layer: int | None) -> Weight | jax.Array:
        if spec.kind != "projection":
            return jnp.zeros(spec.shape, jnp.float32 if spec.kind == "norm" else dtype)
        return projection(spec, quantization is not None and quantization.layout_of(spec.modules(layer)[0]) is None)

    @functools.cache  # one for all layers
    def projection(spec: TensorSpec, is_dense: bool) -> Weight:
        weight = FORMATS["bf16" if is_dense else stored].zeros(*spec.shape, dtype)
        if not runs or not format_of(weight).packs:
            return weight
        return dataclasses.replace(pack(weight), uniform=isinstance(weight, Nvfp4))

    return weight_trees(model.part, tensor)


def tree_size(tree: Any) -> int:
    """Number of elements of every array of a tree, abstract or real."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
