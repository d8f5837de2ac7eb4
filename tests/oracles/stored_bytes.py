"""What a policy holds of its model, taken apart into the tensors of the file it came from."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from qerl_kernels.nvfp4_matmul.packing import unpack

from oracles import nf4_goldens
from qerl_jax.checkpoint import names
from qerl_jax.models.formats import Nf4, PackedNvfp4, Weight
from qerl_jax.types import Policy

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "o_proj": ("o_proj",),
    "down_proj": ("down_proj",),
}


def loaded_bytes(policy: Policy) -> Iterator[tuple[str, bytes]]:
    """(name in the file, bytes) of everything a policy holds of its model, taken apart again."""
    frozen, config = policy.frozen, policy.config
    yield names.EMBED, np.asarray(frozen["embed_tokens"]).tobytes()
    yield "model.norm.weight", as_stored(frozen["norm"]["weight"])
    if not config.tie_word_embeddings:
        yield names.LM_HEAD, np.asarray(frozen["lm_head"]).tobytes()
    for layer, blocks in frozen["layers"].items():
        for norm, value in policy.norms["layers"][layer].items():
            yield names.layer_norm(layer, norm), as_stored(value["weight"])
        for fused, parts in FUSED.items():
            block, row = blocks["mlp" if fused in ("gate_up_proj", "down_proj") else "self_attn"][fused], 0
            for part in parts:
                module, rows = names.projection(layer, part), config.projection_shapes()[part][0]
                here = slice(row, row + rows)
                if part in ("q_proj", "k_proj", "v_proj"):
                    yield f"{module}.bias", np.asarray(block["bias"][here]).tobytes()
                yield from weight_bytes(module, block["weight"], here)
                row += rows


def weight_bytes(module: str, weight: Weight, rows: slice) -> Iterator[tuple[str, bytes]]:
    """One part of a fused projection; of a packed one all but the codes of blocks whose scale is zero, of NF4 all but
    the text beside it.
    """
    if hasattr(weight, "values"):
        yield f"{module}.weight", np.asarray(weight.values[rows]).tobytes()
        return
    if isinstance(weight, Nf4):
        yield f"{module}.weight", np.asarray(weight.codes[rows]).tobytes()
        yield f"{module}.weight.absmax", np.asarray(weight.absmax[rows]).tobytes()
        yield f"{module}.weight.quant_map", np.asarray(nf4_goldens.NF4, np.float32).tobytes()
        return
    if isinstance(weight, PackedNvfp4):  # on a Hopper GPU
        weight = unpack(weight)
    codes, divisor = ("weight_packed", "weight_global_scale") if weight.divides else ("weight", "weight_scale_2")
    yield f"{module}.{codes}", np.asarray(weight.codes[rows]).tobytes()
    yield f"{module}.weight_scale", np.asarray(weight.scales[rows]).tobytes()
    yield f"{module}.{divisor}", np.asarray(weight.global_scale[rows][:1]).tobytes()


def as_stored(vector: jax.Array) -> bytes:
    """A norm is kept in fp32 and stored in bf16, which loses nothing on the way back."""
    return np.asarray(vector).astype(jnp.bfloat16).tobytes()
