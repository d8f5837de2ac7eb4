"""Policy and training state as shapes, without an array of the model's size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from qerl_kernels import dispatch
from qerl_kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK, Mxfp4, Nvfp4
from qerl_kernels.nvfp4_matmul.packing import pack

from qerl_jax.config import Config
from qerl_jax.io.load import build_policy
from qerl_jax.models.config import FUSED_PROJECTIONS, LAYER_NORMS, ModelConfig
from qerl_jax.models.formats import Dense, Nf4, Weight
from qerl_jax.models.formats.nf4 import NF4_BLOCK
from qerl_jax.rl.state import init_state
from qerl_jax.types import Policy, TrainState


def abstract_trees(model: ModelConfig, stored: str, config: Config) -> tuple[Policy, TrainState]:
    """Policy and first state of a run with `ShapeDtypeStruct` for arrays, traced from the code that makes real ones.

    Args:
      model: shapes of the model.
      stored: format of the projections, one of `WEIGHT_FORMATS`.
      config: config of the run.
    """
    config = config.with_max_steps(config.num_prompts)  # no shape depends on the number of steps

    def build() -> tuple[Policy, TrainState]:
        weights = _zero_weights(model, stored, jnp.dtype(config.dtype), config.matmul_kernel)
        policy = build_policy(model, weights, config.lora, config.seed)
        return policy, init_state(policy, config)

    return jax.eval_shape(build)


def _zero_weights(model: ModelConfig, stored: str, dtype: DTypeLike, matmul_kernel: str) -> dict[str, Any]:
    shapes, d = model.projection_shapes(), model.hidden_size

    def fused(*parts: str) -> Weight:
        weight = _zeros(stored, sum(shapes[part][0] for part in parts), shapes[parts[0]][1], dtype)
        runs = matmul_kernel == "mosaic_gpu" or (
            matmul_kernel == "auto" and dispatch.missing_for_mosaic_gpu(dtype) is None
        )
        return pack(weight) if runs and isinstance(weight, Nvfp4 | Mxfp4) else weight

    def layer() -> dict[str, Any]:
        return {
            "qkv_proj": fused(*FUSED_PROJECTIONS["qkv_proj"]),
            "qkv_bias": jnp.zeros(sum(shapes[part][0] for part in FUSED_PROJECTIONS["qkv_proj"]), dtype),
            "o_proj": fused("o_proj"),
            "gate_up_proj": fused(*FUSED_PROJECTIONS["gate_up_proj"]),
            "down_proj": fused("down_proj"),
            **{norm: jnp.zeros(d, jnp.float32) for norm in LAYER_NORMS},
        }

    table = jnp.zeros((model.vocab_size, d), dtype)
    return {
        "embed_tokens": table,
        "norm": jnp.zeros(d, jnp.float32),
        "lm_head": None if model.tie_word_embeddings else table,
        "layers": [layer() for _ in range(model.num_layers)],
    }


def _zeros(stored: str, n: int, k: int, dtype: DTypeLike) -> Weight:
    match stored:
        case "nvfp4":
            scales = jnp.zeros((n, k // NVFP4_BLOCK), jnp.float8_e4m3fn)
            return Nvfp4(jnp.zeros((n, k // 2), jnp.uint8), scales, jnp.ones(n, jnp.float32), True)
        case "mxfp4":
            return Mxfp4(jnp.zeros((n, k // 2), jnp.uint8), jnp.zeros((n, k // MXFP4_BLOCK), jnp.uint8))
        case "nf4":
            return Nf4(jnp.zeros((n, k // 2), jnp.uint8), jnp.zeros((n, k // NF4_BLOCK), jnp.float32))
        case _:
            return Dense(jnp.zeros((n, k), dtype))


def tree_bytes(tree: Any) -> int:
    """Bytes of every array of a tree, abstract or real."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def tree_size(tree: Any) -> int:
    """Number of elements of every array of a tree, abstract or real."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
