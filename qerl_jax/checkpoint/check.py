"""The tensors that a checkpoint must hold by its config, checked by their headers: the one guard of every reader."""

from __future__ import annotations

from collections.abc import Container, Sequence

from qerl_jax.checkpoint import names
from qerl_jax.checkpoint.layouts import LAYOUTS, Expected, Layout, Quantization
from qerl_jax.checkpoint.safetensors import FLOATS, CheckpointError, Tensors
from qerl_jax.models.config import ModelConfig, tensors_of


def check_names(tensors: Tensors, config: ModelConfig, quantization: Quantization | None) -> None:
    """Raise CheckpointError, naming file, key and both values, for a tensor that is missing, misshapen, of another
    dtype or unknown, and for projections that are fused here (q, k and v, gate and up) and not all quantized.

    Args:
      tensors: the checkpoint.
      config: its shape.
      quantization: of its weights (`stored_quantization`).
    """
    _refuse_input_scales(tensors)
    expected: Expected = {}
    optional = {names.LM_HEAD} if config.tie_word_embeddings else set()
    for spec in tensors_of(config):
        for layer in spec.places(config.num_layers):
            if spec.kind == "projection" and quantization is not None:
                _refuse_half_fused(tensors, spec.modules(layer), quantization)
            for module, (name, shape) in zip(spec.modules(layer), spec.stored(layer).items(), strict=True):
                layout = None if quantization is None else quantization.layout_of(module)
                if spec.kind == "projection":
                    _refuse_other_form(tensors, module, layout, quantization is not None)
                if spec.kind == "projection" and layout is not None:
                    expected |= layout.expected(tensors, module, shape)
                    optional |= {f"{module}.{suffix}" for suffix in layout.unused}
                else:
                    expected[name] = shape, FLOATS
    check_tensors(tensors, expected, optional)


def check_tensors(tensors: Tensors, expected: Expected, optional: Container[str] = ()) -> None:
    """Raise CheckpointError, naming file, key and both values, for a tensor that is missing, misshapen, of another
    dtype, or neither expected nor optional.
    """
    for name, (shape, dtypes) in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{tensors.where}: tensor {name!r} is missing from the checkpoint")
        _, dtype, found, _ = tensors.entries[name]
        where = f"{tensors.file_of(name)}: {name!r}"
        if found != shape:
            raise CheckpointError(f"{where} has shape {list(found)}, the config asks for {list(shape)}")
        if dtype.name not in dtypes:
            raise CheckpointError(f"{where} has dtype {dtype.name}, expected one of {list(dtypes)}")
    unknown = sorted(
        name for name in tensors if name not in expected and name not in optional and not names.is_unused(name)
    )
    if unknown:
        raise CheckpointError(
            f"{tensors.file_of(unknown[0])}: {len(unknown)} tensors have no place in the model, first {unknown[0]!r}"
        )


def _refuse_input_scales(tensors: Tensors) -> None:
    """Refuse ModelOpt's AWQ where it left channel scales to be multiplied with the inputs of projections."""
    found = sorted(name for name in tensors if name.endswith(".pre_quant_scale"))
    if found:
        raise CheckpointError(
            f"{tensors.file_of(found[0])}: {len(found)} scales of projections' inputs, first {found[0]!r}: ModelOpt's "
            "AWQ folds only some of them into weights, and none is applied here; llm-compressor's AWQModifier folds "
            "all of them"
        )


def _refuse_half_fused(tensors: Tensors, modules: Sequence[str], quantization: Quantization) -> None:
    """Refuse parts of a fused projection only some of which are quantized."""
    dense = [module for module in modules if quantization.layout_of(module) is None]
    if dense and len(dense) < len(modules):
        others = [module for module in modules if module not in dense]
        raise CheckpointError(
            f"{tensors.where}: {dense[0]!r} is not quantized and {others[0]!r} is; they are one matrix here, so that "
            "either all or none of the projections of the same inputs are quantized"
        )


def _refuse_other_form(tensors: Tensors, module: str, layout: Layout | None, others_are: bool) -> None:
    """Refuse a projection that is quantized where config.json says it is not, or the other way round. `others_are`:
    whether it has a quantization_config.
    """
    plain = f"{module}.weight"
    if layout is None:
        said = "leaves it unquantized" if others_are else "has no quantization_config"
        for scales in (f"{module}.{other.scales}" for other in LAYOUTS.values()):
            if scales in tensors:
                raise CheckpointError(
                    f"{tensors.file_of(scales)}: {scales!r} quantizes {module!r}, but config.json {said}"
                )
        return
    codes = f"{module}.{layout.codes}"
    stored = codes if codes in tensors else plain
    if stored in tensors and tensors.entries[stored].dtype.name in FLOATS:
        raise CheckpointError(
            f"{tensors.file_of(stored)}: {module!r} is not quantized ({stored.rpartition('.')[2]} is "
            f"{tensors.entries[stored].dtype.name}), but config.json says {layout.weight_format.upper()}"
        )
