"""A Hugging Face directory to a `Policy`: bf16 or NVFP4, single or sharded, memory-mapped, one tensor at a time."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Int32
from qerl_kernels import dispatch
from qerl_kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK
from qerl_kernels.nvfp4_matmul.packing import missing_for_packing, pack

from qerl_jax import aqn, keys
from qerl_jax.io import hf_config, names
from qerl_jax.io.adapter import adapter_config, import_adapter
from qerl_jax.io.quantize import max_magnitude
from qerl_jax.io.safetensors import FLOATS, CheckpointError, Tensors, open_checkpoint
from qerl_jax.io.tokenizer import load_tokenizer
from qerl_jax.models.config import FUSED_PROJECTIONS, LAYER_NORMS, ModelConfig
from qerl_jax.models.formats import WEIGHT_FORMATS, Dense, Mxfp4, Nf4, Nvfp4, Weight, mxfp4, nf4, nvfp4
from qerl_jax.models.lora import LoraConfig, init_lora
from qerl_jax.models.modules import Adapter, Frozen, Norm
from qerl_jax.models.qwen2 import Qwen2
from qerl_jax.types import Policy

_THREADS = min(8, os.cpu_count() or 1)
_BLOCK = {"nvfp4": NVFP4_BLOCK, "mxfp4": MXFP4_BLOCK, "nf4": nf4.NF4_BLOCK, "bf16": 1}


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
    """Load a Qwen2.5 model directory as a policy with fresh or imported adapters.

    Args:
      path: Hugging Face directory with config.json and safetensors, bf16 or NVFP4 (compressed-tensors or ModelOpt). A
        directory without a tokenizer is legal.
      weight_format: "bf16", "nvfp4", "mxfp4" or "nf4" to quantize an unquantized checkpoint while loading; None keeps
        what is stored.
      lora: shape of the adapters; None is `LoraConfig(rank=32)`, or the adapter's own shape where `adapter` is given.
      dtype: compute dtype, bfloat16 or float32; also of dense weights.
      adapter: PEFT directory to start from, norms included.
      seed: seed of the initial LoRA A.
      matmul_kernel: "xla"; "mosaic_gpu": the Pallas kernels for 4-bit weights on a Hopper GPU; or "auto": those where
        they can run.
      progress: called with the number of layers loaded and in all.

    Raises:
      FileNotFoundError: no such directory, config or weights.
      CheckpointError (a ValueError): missing, unknown, misshapen or non-finite tensors, naming file, key and both
      values.
      ValueError: an unknown format, or one that the checkpoint cannot be brought into.
    """
    path = Path(path)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype must be bfloat16 or float32, got {jnp.dtype(dtype).name}")
    config = hf_config.model_config(path)
    if lora is None:
        lora = LoraConfig() if adapter is None else adapter_config(Path(adapter))
    tokenizer = load_tokenizer(path, config.vocab_size)
    weights = load_weights(path, config, weight_format, dtype, matmul_kernel, progress)
    policy = build_policy(config, weights, lora, seed).replace(tokenizer=tokenizer)
    return policy if adapter is None else import_adapter(policy, Path(adapter))


def build_policy(config: ModelConfig, weights: dict, lora: LoraConfig, seed: int) -> Policy:
    """A policy over given weights (as `Qwen2` describes them), split once into its trees."""
    model = Qwen2(config, weights, init_adapters(config, lora, seed))
    graphdef, frozen, norms, adapters = nnx.split(model, Frozen, Norm, Adapter)
    trees = [nnx.to_pure_dict(state) for state in (frozen, norms, adapters)]
    policy = Policy(*trees, graphdef=graphdef, config=config, lora_config=lora)
    expected = 2 * config.num_layers
    if aqn.count_norms(policy.norms) != expected:
        raise AssertionError(
            f"{aqn.count_norms(policy.norms)} layer norms for {config.num_layers} layers, expected {expected}"
        )
    return policy


def init_adapters(config: ModelConfig, lora: LoraConfig, seed: int) -> list[dict[str, dict]]:
    """Fresh adapters of every layer: `{fused projection: {part: Lora}}`."""
    key = keys.for_step(seed, keys.Purpose.LORA_INIT, 0)
    return [_init_layer_adapters(config, lora, key, np.int32(layer)) for layer in range(config.num_layers)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init_layer_adapters(
    config: ModelConfig, lora: LoraConfig, key: jax.Array, layer: Int32[ArrayLike, ""]
) -> dict[str, dict]:
    """One layer's adapters: one program for all layers instead of a dispatch for each of hundreds of arrays."""
    shapes = config.projection_shapes()
    layer_key = jax.random.fold_in(key, layer)
    adapters: dict[str, dict] = {}
    for fused, parts in {**FUSED_PROJECTIONS, "o_proj": ("o_proj",), "down_proj": ("down_proj",)}.items():
        offset, adapters[fused] = 0, {}
        for part in parts:
            n, k = shapes[part]
            if lora.rank and part in lora.target_modules:
                part_key = jax.random.fold_in(layer_key, list(shapes).index(part))
                adapters[fused][part] = init_lora(lora, k, n, offset, part_key)
            offset += n
    return adapters


def load_weights(
    path: Path,
    config: ModelConfig,
    weight_format: str | None,
    dtype: DTypeLike,
    matmul_kernel: str = "auto",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """Every weight of the model on the default device, q/k/v and gate/up fused by concatenating rows.

    Threads read, check and quantize up to `_THREADS` layers side by side (NumPy releases the interpreter's lock); the
    host holds no more than these, and the device takes them one by one.
    """
    if weight_format is not None and weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight_format {weight_format!r} is not one of {list(WEIGHT_FORMATS)}")
    json_config = hf_config.read_json(path / "config.json")
    scheme = hf_config.quantization_format(json_config, str(path / "config.json"))
    if scheme is not None and weight_format not in (None, "nvfp4"):
        raise ValueError(
            f"{path} holds NVFP4 weights ({scheme}); weight_format {weight_format!r} would need the unquantized "
            "checkpoint"
        )
    source = _Source(open_checkpoint(path), scheme, weight_format or "bf16", dtype, matmul_kernel)
    d = config.hidden_size
    weights = {
        "embed_tokens": source.dense(names.EMBED, (config.vocab_size, d)),
        "norm": jnp.asarray(source.vector(names.FINAL_NORM, d, jnp.float32)),
        "lm_head": None if config.tie_word_embeddings else source.dense(names.LM_HEAD, (config.vocab_size, d)),
        "layers": _load_layers(source, config, progress),
    }
    if config.tie_word_embeddings and names.LM_HEAD in source.tensors:  # some tied checkpoints store it once more
        source.refuse_other_head((config.vocab_size, d))
    source.refuse_unknown()
    return weights


def _load_layers(source: _Source, config: ModelConfig, progress: Callable[[int, int], None]) -> list[dict]:
    count, layers = config.num_layers, []
    with ThreadPoolExecutor(_THREADS) as pool:
        pending = deque(pool.submit(_read_layer, source, config, layer) for layer in range(min(_THREADS, count)))
        while pending:
            host = pending.popleft().result()
            if (following := len(layers) + 1 + len(pending)) < count:
                pending.append(pool.submit(_read_layer, source, config, following))
            layers.append({name: source.to_device(value) for name, value in host.items()})
            progress(len(layers), count)
    return layers


def _read_layer(source: _Source, config: ModelConfig, layer: int) -> dict:
    """A layer's weights as NumPy arrays."""
    shapes = config.projection_shapes()

    def fused(parts: tuple[str, ...]) -> Weight | np.ndarray:
        return source.projection([(names.projection(layer, part), shapes[part]) for part in parts])

    return {
        "qkv_proj": fused(FUSED_PROJECTIONS["qkv_proj"]),
        "qkv_bias": _biases(source, config, layer),
        "o_proj": fused(("o_proj",)),
        "gate_up_proj": fused(FUSED_PROJECTIONS["gate_up_proj"]),
        "down_proj": fused(("down_proj",)),
        **{norm: source.vector(names.layer_norm(layer, norm), config.hidden_size, jnp.float32) for norm in LAYER_NORMS},
    }


def _biases(source: _Source, config: ModelConfig, layer: int) -> np.ndarray:
    shapes = config.projection_shapes()
    parts = [source.vector(f"{names.projection(layer, p)}.bias", shapes[p][0], source.dtype) for p in names.BIASED]
    return np.concatenate(parts)


def load_biases(path: str | Path, config: ModelConfig, dtype: DTypeLike) -> list[jax.Array]:
    """The biases of q, k and v of every layer, one after the other, as `load_policy` reads and checks them: a few KB.

    Raises CheckpointError as that does.
    """
    source = _Source(open_checkpoint(Path(path)), None, "bf16", dtype, "xla")
    return [jnp.asarray(_biases(source, config, layer)) for layer in range(config.num_layers)]


class _Source:
    """Reads tensors by name with their expected shape, and remembers which were used."""

    def __init__(self, tensors: Tensors, scheme: str | None, weight_format: str, dtype: DTypeLike, matmul_kernel: str):
        self.tensors, self.scheme, self.weight_format = tensors, scheme, weight_format
        self.dtype, self.matmul_kernel = dtype, matmul_kernel
        self.used: set[str] = set()

    def read(self, name: str, shape: tuple[int, ...], kinds: tuple[str, ...]) -> np.ndarray:
        quantized = self.scheme is None and f"{name}_packed" in self.tensors
        hint = "; it is stored quantized, but config.json has no quantization_config" if quantized else ""
        self.tensors.require(name, hint)
        self.used.add(name)
        array, where = self.tensors[name], self.tensors.file_of(name)
        if array.shape != shape:
            raise CheckpointError(f"{where}: {name!r} has shape {list(array.shape)}, the config asks for {list(shape)}")
        if array.dtype.name not in kinds:
            raise CheckpointError(f"{where}: {name!r} has dtype {array.dtype.name}, expected one of {list(kinds)}")
        return array

    def _finite(self, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, float]:
        """An unquantized tensor and its largest magnitude, once every value is known to be finite."""
        array = self.read(name, shape, FLOATS)
        largest = max_magnitude(self.tensors, name, array)
        if not np.isfinite(jnp.asarray(largest, self.dtype)):
            raise CheckpointError(
                f"{self.tensors.file_of(name)}: {name!r} holds a value of magnitude {largest:.3g}, which "
                f"{jnp.dtype(self.dtype).name} cannot hold"
            )
        return array, largest

    def dense(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(self._finite(name, shape)[0]).astype(self.dtype)

    def vector(self, name: str, size: int, dtype: DTypeLike) -> np.ndarray:
        return self._finite(name, (size,))[0].astype(dtype)

    def to_device(self, value: Weight | np.ndarray) -> Weight | jax.Array:
        """A vector as it is; a projection as the matmul in use reads it."""
        weight = jax.tree.map(jnp.asarray, value)
        if isinstance(weight, jax.Array):
            if weight.ndim == 1:
                return weight
            weight = Dense(weight)
        return kernel_form(weight, self.dtype, self.matmul_kernel)

    def projection(self, parts: list[tuple[str, tuple[int, int]]]) -> Weight | np.ndarray:
        """The parts of a fused projection, one below the other, as NumPy arrays: a matrix, or its quantized form."""
        if self.scheme is not None:
            return _concatenate([self._stored_nvfp4(module, shape) for module, shape in parts])
        arrays, largest = zip(*(self._finite(f"{module}.weight", shape) for module, shape in parts), strict=True)
        if self.weight_format == "bf16":
            return np.concatenate(arrays).astype(self.dtype, copy=False)
        block, k = _BLOCK[self.weight_format], parts[0][1][1]
        if k % block:
            raise ValueError(
                f"{parts[0][0]}: {k} input features are not a multiple of {block}, which {self.weight_format} needs"
            )
        quantize = _quantizer(self.weight_format, max(largest))
        return _concatenate([quantize(array) for array in arrays])

    def _stored_nvfp4(self, module: str, shape: tuple[int, int]) -> Nvfp4:
        n, k = shape
        codes_name, scale_name, global_name, activation = (
            f"{module}.{suffix}" for suffix in names.QUANTIZED[self.scheme]
        )
        if codes_name not in self.tensors and f"{module}.weight" in self.tensors:
            raise CheckpointError(
                f"{self.tensors.file_of(f'{module}.weight')}: {module!r} is not quantized, but config.json says NVFP4"
            )
        codes = self.read(codes_name, (n, k // 2), ("uint8",))
        scales = self.read(scale_name, (n, k // NVFP4_BLOCK), ("float8_e4m3fn",))
        divides = self.scheme == "compressed-tensors"
        value = self.read(global_name, (1,) if divides else (), ("float32",)).reshape(-1)
        if activation in self.tensors:
            self.used.add(activation)  # activation scale for W4A4 inference, unused by weight-only arithmetic
        where = self.tensors.file_of(scale_name)
        if not (np.isfinite(value[0]) and value[0] > 0):
            raise CheckpointError(
                f"{self.tensors.file_of(global_name)}: {global_name!r} is {value[0]}, must be finite and above 0"
            )
        multiplier = 1 / float(value[0]) if divides else float(value[0])
        if not _SMALLEST <= multiplier <= _LARGEST:
            raise CheckpointError(
                f"{self.tensors.file_of(global_name)}: {global_name!r} is {value[0]}, which multiplies weights by "
                f"{multiplier:.3g}; it must lie between {_SMALLEST:.3g} and {_LARGEST:.3g} for them to be numbers"
            )
        bits = np.asarray(scales).view(np.uint8)
        if bits.max() > _E4M3_LARGEST:  # sign bit set, or the NaN 0x7F
            row, column = np.argwhere(bits > _E4M3_LARGEST)[0]
            raise CheckpointError(
                f"{where}: {scale_name!r}[{row}, {column}] is {scales[row, column]}, must be a number of at least 0"
            )
        return Nvfp4(codes, scales, np.full(n, value[0], np.float32), divides)

    def refuse_other_head(self, shape: tuple[int, int]) -> None:
        """A tied model's head, where the file holds one, must be its embedding."""
        head, embedding = (self.read(name, shape, FLOATS) for name in (names.LM_HEAD, names.EMBED))
        bits = f"u{head.dtype.itemsize}"
        if head.dtype != embedding.dtype or not np.array_equal(head.view(bits), embedding.view(bits)):
            raise CheckpointError(
                f"{self.tensors.file_of(names.LM_HEAD)}: {names.LM_HEAD!r} differs from {names.EMBED!r}, but "
                "config.json says tie_word_embeddings true"
            )

    def refuse_unknown(self) -> None:
        unknown = sorted(set(self.tensors) - self.used - {n for n in self.tensors if n.endswith("rotary_emb.inv_freq")})
        if unknown:
            raise CheckpointError(
                f"{self.tensors.file_of(unknown[0])}: {len(unknown)} tensors have no place in the model, "
                f"first {unknown[0]!r}"
            )


_E4M3_LARGEST = 0x7E
# Bounds of a global scale as a multiplier: normal in fp32, and code · scale · multiplier at most its largest number.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max) / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)


def kernel_form(weight: Weight, dtype: DTypeLike, matmul_kernel: str) -> Weight:
    """The weight as `matmul_kernel` reads it: itself for "xla", packed for "mosaic_gpu", for "auto" packed where that
    can run.

    An MXFP4 weight whose exponents span too much for the packed form stays as it is (said once).

    Raises ValueError where "mosaic_gpu" cannot run, naming what is missing, or has no 4-bit weight to run on.
    """
    missing = dispatch.missing_for_mosaic_gpu(dtype)
    if matmul_kernel == "mosaic_gpu":
        if not isinstance(weight, Nvfp4 | Mxfp4):
            raise ValueError(
                f"matmul_kernel {matmul_kernel!r} needs NVFP4 or MXFP4 weights, these are {type(weight).__name__}"
            )
        dispatch.choose("nvfp4_matmul", matmul_kernel, missing)
    if matmul_kernel == "xla" or not isinstance(weight, Nvfp4 | Mxfp4):
        return weight
    return (
        pack(weight)
        if dispatch.choose("nvfp4_matmul", None, missing or missing_for_packing(weight)) == "mosaic_gpu"
        else weight
    )


def _quantizer(weight_format: str, largest: float) -> Callable[[np.ndarray], Weight]:
    """The quantizer of the parts of a fused projection, whose largest magnitude is given."""
    if weight_format == "nvfp4":  # one global scale for the whole fused projection, as llm-compressor writes it
        return functools.partial(nvfp4.quantize, divisor=nvfp4.global_scale(largest))
    return {"mxfp4": mxfp4.quantize, "nf4": nf4.quantize}[weight_format]


def _concatenate(parts: list[Nvfp4] | list[Mxfp4] | list[Nf4]) -> Weight:
    """Fused parts in one weight: every field is a matrix or vector with a row for each output feature.

    The host concatenates: the device would need the memory twice, and one more program for each shape.
    """
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
