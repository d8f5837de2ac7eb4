"""Load a Hugging Face directory as a `Policy`: bf16, NVFP4, MXFP4 or NF4, memory-mapped, layer by layer."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Int32

from qerl_jax import keys
from qerl_jax.io import assets, hf_config, hub
from qerl_jax.io.adapter import import_adapter
from qerl_jax.io.layouts import LAYOUTS
from qerl_jax.io.peft_config import adapter_config
from qerl_jax.io.safetensors import open_checkpoint
from qerl_jax.io.tokenizer import load_tokenizer, refuse_other_tokenizer
from qerl_jax.io.weights import WeightReader
from qerl_jax.models.config import LAYER_NORMS, ModelConfig, tensors_of
from qerl_jax.models.formats import WEIGHT_FORMATS
from qerl_jax.models.lora import LoraConfig, init_lora
from qerl_jax.models.modules import Adapter, Frozen, Norm
from qerl_jax.models.qwen2 import Qwen2
from qerl_jax.types import Policy

_THREADS = min(8, os.cpu_count() or 1)


def load_policy(
    path: str | Path,
    weight_format: str | None = None,
    lora: LoraConfig | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    adapter: str | Path | None = None,
    seed: int = 0,
    matmul_kernel: str = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Policy:
    """Load a Qwen2.5, Qwen3 (dense) or Llama 3 directory as a policy with fresh or imported adapters.

    Args:
      path: "tiny", the bundled policy, or a Hugging Face directory with config.json and safetensors, bf16, NVFP4
        (compressed-tensors or ModelOpt), MXFP4 (compressed-tensors) or NF4 (bitsandbytes). A directory without a
        tokenizer is legal.
      weight_format: "bf16", "nvfp4", "mxfp4" or "nf4" to quantize an unquantized checkpoint while loading; None keeps
        the stored format.
      lora: shape of the adapters; None is `LoraConfig(rank=32)`, or the adapter's own shape where `adapter` is given.
      dtype: compute dtype, bfloat16 or float32; also of dense weights.
      adapter: PEFT directory to start from, norms included.
      seed: seed of the initial LoRA A.
      matmul_kernel: "xla"; "mosaic_gpu": the Pallas kernels for 4-bit weights on a Hopper GPU; or "auto": those where
        they can run.
      progress: called with the number of layers loaded and the number of all layers.

    Raises:
      FileNotFoundError: no such directory, config or weights.
      CheckpointError (a ValueError): missing, unknown, misshapen or non-finite tensors, naming file, key and both
        values; an adapter directory with another tokenizer than the model's.
      ValueError: an unknown format, or one that the checkpoint cannot be brought into.
    """
    name, path = str(path), assets.model_path(str(path))
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype must be bfloat16 or float32, got {jnp.dtype(dtype).name}")
    config = hf_config.model_config(path)
    if lora is None:
        lora = LoraConfig() if adapter is None else adapter_config(Path(adapter))
    # In a thread: transformers takes seconds to import, 13 where it imports PyTorch too.
    pool = ThreadPoolExecutor(1)
    loading = pool.submit(_load_tokenizer, path, config.vocab_size, adapter)
    pool.shutdown(wait=False)

    def report(done: int, total: int) -> None:
        if loading.done():
            loading.result()  # raises what was wrong with it
        progress(done, total)

    weights = load_weights(path, config, weight_format, dtype, matmul_kernel, report)
    tokenizer = loading.result()
    source = name if hub.is_hub_id(name) else str(path)
    policy = build_policy(config, weights, lora, seed).replace(tokenizer=tokenizer, source=source)
    return policy if adapter is None else import_adapter(policy, Path(adapter))


def _load_tokenizer(path: Path, vocab_size: int, adapter: str | Path | None) -> Any:
    """The model's tokenizer. Raises CheckpointError for an adapter that has another."""
    if adapter is not None:
        refuse_other_tokenizer(path, Path(adapter))
    return load_tokenizer(path, vocab_size)


def build_policy(config: ModelConfig, weights: dict, lora: LoraConfig, seed: int) -> Policy:
    """A policy over given weights (as `Qwen2` describes them) with fresh adapters, split into its trees."""
    model = Qwen2(config, weights, init_adapters(config, lora, seed))
    graphdef, frozen, norms, adapters = nnx.split(model, Frozen, Norm, Adapter)
    trees = [nnx.to_pure_dict(state) for state in (frozen, norms, adapters)]
    policy = Policy(*trees, graphdef=graphdef, config=config, lora_config=lora)
    chex.assert_tree_shape_suffix(policy.norms, (config.hidden_size,))
    chex.assert_equal(len(jax.tree.leaves(policy.norms)), len(LAYER_NORMS) * config.num_layers)
    return policy


def init_adapters(config: ModelConfig, lora: LoraConfig, seed: int) -> list[dict[str, dict]]:
    """Fresh adapters, one dict a layer: `{fused projection: {part: Lora}}`."""
    key = keys.for_step(seed, keys.Purpose.LORA_INIT, 0)
    return [_init_layer_adapters(config, lora, key, np.int32(layer)) for layer in range(config.num_layers)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_layer_adapters(
    config: ModelConfig, lora: LoraConfig, key: jax.Array, layer: Int32[ArrayLike, ""]
) -> dict[str, dict]:
    """Adapters of one layer, by one program for all layers instead of a dispatch for each of hundreds of arrays."""
    layer_key, index = jax.random.fold_in(key, layer), 0
    adapters: dict[str, dict] = {}
    for spec in (spec for spec in tensors_of(config) if spec.kind == "projection"):
        offset, own = 0, adapters.setdefault(spec.name, {})
        for part, n in spec.part_rows().items():
            if lora.rank and part in lora.target_modules:
                own[part] = init_lora(lora, spec.columns, n, offset, jax.random.fold_in(layer_key, index))
            offset, index = offset + n, index + 1
    return adapters


def load_weights(
    path: Path,
    config: ModelConfig,
    weight_format: str | None,
    dtype: DTypeLike,
    matmul_kernel: str = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """All weights of the model on the default device, q/k/v and gate/up fused by concatenating rows.

    Threads read, check and quantize up to `_THREADS` layers concurrently (NumPy releases the interpreter lock). The
    host holds no more layers than these; they are copied to the device one by one. Arguments and errors as for
    `load_policy`.
    """
    scheme = stored_scheme(path, weight_format)
    reader = WeightReader(open_checkpoint(path), config, scheme, weight_format or "bf16", dtype, matmul_kernel)
    weights: dict[str, Any] = {}
    for spec in (spec for spec in tensors_of(config) if not spec.in_layer):
        value = reader.to_device(reader.read(spec))
        weights[spec.name] = value.astype(dtype) if spec.kind == "table" else value
    weights["layers"] = _load_layers(reader, config, progress)
    reader.refuse_other_head()
    return weights


def stored_scheme(path: Path, weight_format: str | None) -> str | None:
    """`hf_config.stored_format`. Raises ValueError for a `weight_format` that is none, or that the checkpoint cannot be
    brought into.
    """
    if weight_format is not None and weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight_format {weight_format!r} is not one of {list(WEIGHT_FORMATS)}")
    scheme = hf_config.stored_format(path)
    if scheme is not None and weight_format not in (None, stored := LAYOUTS[scheme].weight_format):
        raise ValueError(
            f"{path} holds {stored.upper()} weights ({scheme}); weight_format {weight_format!r} would need the "
            "unquantized checkpoint"
        )
    return scheme


def _load_layers(reader: WeightReader, config: ModelConfig, progress: Callable[[int, int], None]) -> list[dict]:
    count, layers = config.num_layers, []
    with ThreadPoolExecutor(_THREADS) as pool:
        pending = deque(pool.submit(read_layer, reader, config, layer) for layer in range(min(_THREADS, count)))
        while pending:
            host = pending.popleft().result()
            if (following := len(layers) + 1 + len(pending)) < count:
                pending.append(pool.submit(read_layer, reader, config, following))
            layers.append({name: reader.to_device(value) for name, value in host.items()})
            progress(len(layers), count)
    return layers


def read_layer(reader: WeightReader, config: ModelConfig, layer: int) -> dict:
    """A layer's weights as `Qwen2` describes them, but as NumPy arrays."""
    own = {spec.name: reader.read(spec, layer) for spec in tensors_of(config) if spec.in_layer}
    return {"qkv_bias": None, **own}
