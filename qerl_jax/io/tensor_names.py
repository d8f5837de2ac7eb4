"""The tensors that a checkpoint must hold by its config, checked by their headers before hours of work."""

from __future__ import annotations

from qerl_kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK

from qerl_jax.io import bitsandbytes, names
from qerl_jax.io.safetensors import FLOATS, CheckpointError, TensorSource
from qerl_jax.models.config import HEAD_NORMS, LAYER_NORMS, ModelConfig


def check_names(tensors: TensorSource, config: ModelConfig, scheme: str | None) -> None:
    """Raise CheckpointError, naming file, key and both values, for a tensor that is missing, misshapen or unknown, and
    for projections some of which are quantized and some not.

    Args:
      tensors: the checkpoint.
      config: its shape.
      scheme: layout of its quantized weights, a key of `names.QUANTIZED`; None if it is not quantized.
    """
    refuse_input_scales(tensors)
    expected = _unquantized_shapes(config)
    for layer in range(config.num_layers):
        for part, shape in config.projection_shapes().items():
            module = names.projection(layer, part)
            refuse_other_form(tensors, module, scheme)
            expected |= _projection_shapes(tensors, module, shape, scheme)
    for name, shape in expected.items():
        tensors.require(name)
        found = tensors.spec(name)[1]
        if found != shape:
            raise CheckpointError(
                f"{tensors.file_of(name)}: {name!r} has shape {list(found)}, the config asks for {list(shape)}"
            )
    optional = {names.LM_HEAD} if config.tie_word_embeddings else set()
    if scheme is not None:
        optional |= {
            f"{names.projection(layer, part)}.{names.QUANTIZED[scheme][3]}"
            for layer in range(config.num_layers)
            for part in config.projection_shapes()
        }
    unknown = sorted(name for name in set(tensors) - set(expected) - optional if not is_frequencies(name))
    if unknown:
        raise CheckpointError(
            f"{tensors.file_of(unknown[0])}: {len(unknown)} tensors have no place in the model, first {unknown[0]!r}"
        )


def is_frequencies(name: str) -> bool:
    """Whether a tensor holds rotary frequencies, which some checkpoints store and every library computes itself."""
    return name.endswith("rotary_emb.inv_freq")


def _unquantized_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, shapes = config.hidden_size, config.projection_shapes()
    found: dict[str, tuple[int, ...]] = {names.EMBED: (config.vocab_size, d), names.FINAL_NORM: (d,)}
    if not config.tie_word_embeddings:
        found[names.LM_HEAD] = (config.vocab_size, d)
    for layer in range(config.num_layers):
        found |= {names.layer_norm(layer, name): (d,) for name in LAYER_NORMS}
        if config.qk_norm:
            found |= {names.head_norm(layer, name): (config.head_dim,) for name in HEAD_NORMS}
        if config.qkv_bias:
            found |= {f"{names.projection(layer, part)}.bias": (shapes[part][0],) for part in names.BIASED}
    return found


def _projection_shapes(
    tensors: TensorSource, module: str, shape: tuple[int, int], scheme: str | None
) -> dict[str, tuple[int, ...]]:
    if scheme is None:
        return {f"{module}.weight": shape}
    if names.STORED_FORMAT[scheme] == "nf4":
        return bitsandbytes.stored_shapes(tensors, module, shape)
    n, k = shape
    codes, scales, global_scale, _ = (f"{module}.{suffix}" for suffix in names.QUANTIZED[scheme])
    if names.STORED_FORMAT[scheme] == "mxfp4":
        return {codes: (n, k // 2), scales: (n, k // MXFP4_BLOCK)}
    is_vector = scheme == "compressed-tensors"
    return {codes: (n, k // 2), scales: (n, k // NVFP4_BLOCK), global_scale: (1,) if is_vector else ()}


def refuse_input_scales(tensors: TensorSource) -> None:
    """Refuse ModelOpt's AWQ where it left channel scales to be multiplied with the inputs of projections."""
    found = sorted(name for name in tensors if name.endswith(".pre_quant_scale"))
    if found:
        raise CheckpointError(
            f"{tensors.file_of(found[0])}: {len(found)} scales of projections' inputs, first {found[0]!r}: ModelOpt's "
            "AWQ folds only some of them into weights, and none is applied here; llm-compressor's AWQModifier folds "
            "all of them"
        )


def refuse_other_form(tensors: TensorSource, module: str, scheme: str | None) -> None:
    """Raise CheckpointError for a projection that is quantized where config.json says it is not, or the other way
    round. `scheme`: as for `check_names`.
    """
    plain = f"{module}.weight"
    if scheme is None:
        for suffixes in names.QUANTIZED.values():
            if (scales := f"{module}.{suffixes[1]}") in tensors:
                raise CheckpointError(
                    f"{tensors.file_of(scales)}: {scales!r} quantizes {module!r}, but config.json has no "
                    "quantization_config"
                )
        return
    codes = f"{module}.{names.QUANTIZED[scheme][0]}"
    stored = codes if codes in tensors else plain
    if stored in tensors and tensors.spec(stored)[0].name in FLOATS:
        raise CheckpointError(
            f"{tensors.file_of(stored)}: {module!r} is not quantized ({stored.rpartition('.')[2]} is "
            f"{tensors.spec(stored)[0].name}), but config.json says {names.STORED_FORMAT[scheme].upper()}"
        )
