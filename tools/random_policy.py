"""A policy with the published shapes and random weights, made on the device in seconds, for benchmarks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from make_checkpoint import hf_config
from qerl_kernels import dispatch
from qerl_kernels.formats import Nvfp4

from qerl_jax.checkpoint.hf_config import parse_config
from qerl_jax.checkpoint.load import build_policy
from qerl_jax.checkpoint.reader import kernel_form, on_devices
from qerl_jax.compilation import committed
from qerl_jax.models.config import TensorSpec
from qerl_jax.models.formats import Dense, Weight
from qerl_jax.models.lora import LoraConfig
from qerl_jax.models.trees import weight_trees
from qerl_jax.types import Policy

_STD = 0.02  # initializer_range of the published models


@functools.partial(jax.jit, static_argnames=("n", "k"))
def _nvfp4(key: jax.Array, n: int, k: int) -> Nvfp4:
    """Uniform codes (rms 3.0) and scales of 32 to 60, so that weights have the published standard deviation."""
    a, b = jax.random.split(key)
    scales = jax.lax.bitcast_convert_type(
        jax.random.bits(b, (n, k // 16), jnp.uint8) % 8 + jnp.uint8(0x60), jnp.float8_e4m3fn
    )
    return Nvfp4(jax.random.bits(a, (n, k // 2), jnp.uint8), scales, jnp.full(n, 46 * 3.0 / _STD, jnp.float32), True)


@jax.jit
def _random_b(key: jax.Array, b: jax.Array) -> jax.Array:
    return 1e-3 * jax.random.normal(key, b.shape, b.dtype)


@functools.partial(jax.jit, static_argnames=("n", "k"))
def _bf16(key: jax.Array, n: int, k: int) -> jax.Array:
    """Normal weights, drawn in fp32 and rounded: `jax.random.normal` in bf16 takes 128 values whose mean is −0.012 σ,
    and a mean is a rank-one component, which at 7B's widths amplifies its own direction more than the random part does.
    """
    return (_STD * jax.random.normal(key, (n, k), jnp.float32)).astype(jnp.bfloat16)


def random_policy(
    size: str,
    weight_format: str,
    lora: LoraConfig,
    matmul_kernel: str,
    seed: int = 0,
    dtype: jnp.dtype = jnp.bfloat16,
    tensor_parallel: int = 1,
) -> Policy:
    """A policy without a tokenizer that never samples an EOS.

    Args:
      size: "0.5B" to "72B".
      weight_format: format of the projections, "nvfp4" or "bf16".
      lora: shape of the adapters; A is random, B random and small, so that adapters change the output.
      matmul_kernel: as in `load_policy`.
      seed: seed of all weights.
      dtype: compute dtype; weights hold bf16 values in either.
      tensor_parallel: as in `load_policy`. The weights are those of one device.
    """
    config = parse_config({**hf_config(size), "eos_token_id": []}, {}, size)
    config = dataclasses.replace(config, tensor_parallel=tensor_parallel)
    keys, missing = _keys(seed), dispatch.missing_for_mosaic_gpu(dtype)

    def tensor(spec: TensorSpec, layer: int | None) -> Weight | jax.Array:
        return on_devices(whole(spec), spec, tensor_parallel, formed)

    def formed(value: Weight | jax.Array) -> Weight | jax.Array:
        return kernel_form(value, matmul_kernel, missing) if isinstance(value, Nvfp4) else value

    def whole(spec: TensorSpec) -> Weight | jax.Array:
        if spec.kind == "norm":
            return jnp.ones(spec.shape, jnp.float32)
        if spec.kind == "projection" and weight_format != "bf16":
            return _nvfp4(next(keys), *spec.shape)
        values = _bf16(next(keys), *spec.shape[-2:]) if spec.columns else _bf16(next(keys), 1, *spec.shape)[0]
        return Dense(values.astype(dtype)) if spec.kind == "projection" else values.astype(dtype)

    policy = build_policy(config, *weight_trees(config, tensor), lora, seed)
    policy = policy.replace(lora=jax.tree.map(lambda x: _random_b(next(keys), x) if not x.any() else x, policy.lora))
    return policy if tensor_parallel == 1 else committed(policy, tensor_parallel)


def _keys(seed: int) -> Iterator[jax.Array]:
    key = jax.random.key(seed)
    while True:
        key, one = jax.random.split(key)
        yield one
