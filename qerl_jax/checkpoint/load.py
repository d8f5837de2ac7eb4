"""Load a Hugging Face directory as a `Policy`: bf16, NVFP4, MXFP4 or NF4, memory-mapped, layer by layer."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Int32

from qerl_jax import keys
from qerl_jax.checkpoint import assets, hf_config, hub
from qerl_jax.checkpoint.adapter import import_adapter
from qerl_jax.checkpoint.layouts import Quantization
from qerl_jax.checkpoint.peft_config import adapter_config
from qerl_jax.checkpoint.reader import WeightReader
from qerl_jax.checkpoint.safetensors import open_checkpoint
from qerl_jax.checkpoint.tokenizer import load_tokenizer, refuse_other_tokenizer
from qerl_jax.compilation import committed
from qerl_jax.models.config import ModelConfig, TensorSpec, tensors_of
from qerl_jax.models.formats import WEIGHT_FORMATS
from qerl_jax.models.lora import PROJECTIONS, Lora, LoraConfig, draw_lora_a
from qerl_jax.models.trees import layer_adapters, weight_trees
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
    tensor_parallel: int = 1,
    tokenizer: Future | None = None,
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
      matmul_kernel: "xla"; "mosaic_gpu": the Pallas kernels for 4-bit weights on an NVIDIA GPU; or "auto": those where
        they can run.
      progress: called with the number of layers loaded and the number of all layers.
      tensor_parallel: devices over which the layers are divided (`partition`); the policy is committed to them.
      tokenizer: result of `read_tokenizer` in another thread; None: a thread here reads it.

    Raises:
      FileNotFoundError: no such directory, config or weights.
      CheckpointError (a ValueError): missing, unknown, misshapen or non-finite tensors, naming file, key and both
        values; an adapter directory with another tokenizer than the model's.
      ValueError: an unknown format, or one that the checkpoint cannot be brought into; `tensor_parallel` that does not
        divide the model, or for which there are too few devices.
    """
    name, path = str(path), assets.model_path(str(path))
    dtype = jnp.dtype(dtype)  # which may be a name
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype must be bfloat16 or float32, got {dtype.name}")
    config = dataclasses.replace(hf_config.model_config(path), tensor_parallel=tensor_parallel)
    if lora is None:
        lora = LoraConfig() if adapter is None else adapter_config(Path(adapter))
    if tokenizer is None:
        pool = ThreadPoolExecutor(1)  # transformers takes seconds to import
        tokenizer = pool.submit(read_tokenizer, path, adapter)
        pool.shutdown(wait=False)

    def report(done: int, total: int) -> None:
        if tokenizer.done():
            tokenizer.result()  # raises what was wrong with it
        progress(done, total)

    frozen, norms = load_weights(path, config, weight_format, dtype, matmul_kernel, report)
    source = name if hub.is_hub_id(name) else str(path)
    policy = build_policy(config, frozen, norms, lora, seed)
    policy = policy if adapter is None else import_adapter(policy, adapter)
    policy = policy if tensor_parallel == 1 else committed(policy, tensor_parallel)
    return policy.replace(tokenizer=tokenizer.result(), source=source)


def read_tokenizer(path: Path, adapter: str | Path | None = None) -> Any:
    """The tokenizer of a model, or None. Raises CheckpointError as `load_tokenizer`, and for an adapter that has
    another.
    """
    if adapter is not None:
        refuse_other_tokenizer(path, Path(adapter))
    return load_tokenizer(path, hf_config.model_config(path).vocab_size)


def build_policy(config: ModelConfig, frozen: Any, norms: Any, lora: LoraConfig, seed: int) -> Policy:
    """A policy over given trees (`models.trees.weight_trees`) with fresh adapters."""
    key = keys.for_step(seed, keys.Purpose.LORA_INIT, 0)
    layers = {i: _init_layer_adapters(config, lora, key, np.int32(i)) for i in range(config.num_layers)}
    adapters = {"layers": layers} if any(layers.values()) else {}
    return Policy(frozen, norms, adapters, config=config, lora_config=lora)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_layer_adapters(
    config: ModelConfig, lora: LoraConfig, key: jax.Array, layer: Int32[ArrayLike, ""]
) -> dict[str, Any]:
    """Adapters of one layer, A drawn and B zero, so that the adapted policy starts as the base: by one program for all
    layers instead of a dispatch for each of hundreds of arrays, with one draw for all A of a shape, which compiles in
    half the time.
    """
    layer_key = jax.random.fold_in(key, layer)
    parts: dict[int, list[str]] = {}  # by K
    for part, (_, k) in config.projection_shapes().items():
        if lora.rank and part in lora.target_modules:
            parts.setdefault(k, []).append(part)
    a: dict[str, jax.Array] = {}
    for k, of_k in parts.items():
        places = np.array([PROJECTIONS.index(part) for part in of_k])
        own_keys = jax.vmap(jax.random.fold_in, (None, 0))(layer_key, places)
        a |= zip(of_k, draw_lora_a(k, lora.rank, own_keys), strict=True)

    def adapter(part: str, k: int, n: int, offset: int) -> Lora | None:
        if part not in a:
            return None
        return Lora(a[part], jnp.zeros((lora.rank, n), jnp.float32), lora.scale, offset // config.tensor_parallel)

    return layer_adapters(config, adapter)


def load_weights(
    path: Path,
    config: ModelConfig,
    weight_format: str | None,
    dtype: DTypeLike,
    matmul_kernel: str = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict, dict]:
    """`Policy.frozen` and `Policy.norms` on the default device, or divided over several, q/k/v and gate/up fused
    by concatenating rows.

    Threads read, check and quantize up to `_THREADS` layers concurrently (NumPy releases the interpreter lock). The
    host holds no more layers than these; they are copied to the device one by one. Arguments and errors as for
    `load_policy`.
    """
    quantization = accepted_quantization(path, weight_format)
    reader = WeightReader(open_checkpoint(path), config, quantization, weight_format or "bf16", dtype, matmul_kernel)
    found: dict[tuple[TensorSpec, int | None], Any] = {}
    for spec in (spec for spec in tensors_of(config) if not spec.in_layer):
        value = reader.to_device(reader.read(spec), spec)
        found[spec, None] = value.astype(dtype) if spec.kind == "table" else value
    for layer, weights in enumerate(_load_layers(reader, config, progress)):
        found |= {(spec, layer): value for spec, value in weights.items()}
    reader.refuse_other_head()
    return weight_trees(config, lambda spec, layer: found[spec, layer])


def accepted_quantization(path: Path, weight_format: str | None) -> Quantization | None:
    """`hf_config.stored_quantization`. Raises ValueError for a `weight_format` that is none, or that the checkpoint
    cannot be brought into.
    """
    if weight_format is not None and weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight_format {weight_format!r} is not one of {list(WEIGHT_FORMATS)}")
    quantization = hf_config.stored_quantization(path)
    if quantization is not None and weight_format not in (None, stored := quantization.layout.weight_format):
        raise ValueError(
            f"{path} holds {stored.upper()} weights ({quantization.layout.name}); weight_format {weight_format!r} "
            "would need the unquantized checkpoint"
        )
    return quantization


def _load_layers(reader: WeightReader, config: ModelConfig, progress: Callable[[int, int], None]) -> list[dict]:
    count, layers = config.num_layers, []
    with ThreadPoolExecutor(_THREADS) as pool:
        pending = deque(pool.submit(_read_layer, reader, config, layer) for layer in range(min(_THREADS, count)))
        while pending:
            host = pending.popleft().result()
            if (following := len(layers) + 1 + len(pending)) < count:
                pending.append(pool.submit(_read_layer, reader, config, following))
            layers.append({spec: reader.to_device(value, spec) for spec, value in host.items()})
            progress(len(layers), count)
    return layers


def _read_layer(reader: WeightReader, config: ModelConfig, layer: int) -> dict[TensorSpec, Any]:
    """A layer's weights as NumPy arrays."""
    return {spec: reader.read(spec, layer) for spec in tensors_of(config) if spec.in_layer}
