"""The forms in which a trained policy leaves: a PEFT adapter, an adapter with a base for vLLM, one model without an
adapter in bf16 (the only one after full fine-tuning), and that model quantized again. All are written tensor by tensor.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int32

from qerl_jax.io import hf_config, names
from qerl_jax.io.adapter import write_adapter
from qerl_jax.io.adapter_reader import AdapterReader
from qerl_jax.io.policy_tensors import DenseTensors, Overlaid
from qerl_jax.io.quantize import write_quantized
from qerl_jax.io.rewrite import ADAPTER_PART, BASE_PART, CARD_FILE, write_checkpoint
from qerl_jax.io.safetensors import TensorSource, open_checkpoint
from qerl_jax.io.streamed import streamed_logits
from qerl_jax.io.tokenizer import TOKENIZER_FILES
from qerl_jax.io.trained import TrainedWeights
from qerl_jax.models.config import ModelConfig

Kind = Literal["peft", "vllm", "merged", "merged-nvfp4"]
Progress = Callable[[str, int, int], None]
"""Called with "scan" or "write", and the numbers of layers or tensors done and of all."""

_QUANTIZATION_FILES = ("hf_quant_config.json", "recipe.yaml")  # ModelOpt's and llm-compressor's, besides config.json


@dataclasses.dataclass(frozen=True)
class StoredPolicy:
    """A policy as directories.

    Attributes:
      base: model directory.
      weight_format: format into which an unquantized base is quantized while loading; None: as stored.
      adapter: PEFT directory; None: the base alone.
      weights: the weights that full fine-tuning trained; the base then gives the other files, and the shards.
    """

    base: Path
    weight_format: str | None = None
    adapter: Path | None = None
    weights: TrainedWeights | None = None

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return hf_config.model_config(self.base)

    @property
    def quantizes(self) -> bool:
        """Whether the base is quantized while loading."""
        return self.weight_format not in (None, "bf16") and hf_config.stored_format(self.base) is None

    def reader(self) -> AdapterReader | None:
        """The adapter's tensors. Raises CheckpointError where they do not fit the base."""
        return None if self.adapter is None else AdapterReader(self.adapter, self.config)

    def logits(
        self, tokens: Int32[np.ndarray, "B T"], progress: Callable[[int, int], None]
    ) -> Float32[np.ndarray, "B T V"]:
        """`streamed_logits`."""
        if self.weights is not None:
            return streamed_logits(self.weights, self.config, tokens, progress=progress)
        return streamed_logits(
            open_checkpoint(self.base),
            self.config,
            tokens,
            hf_config.stored_format(self.base),
            self.weight_format,
            self.reader(),
            progress,
        )

    def dense(self) -> DenseTensors | TrainedWeights:
        """The policy as one bf16 model without an adapter."""
        if self.weights is not None:
            return self.weights.in_bf16()
        return DenseTensors(self.base, self.weight_format, self.reader())

    def rounded(self) -> frozenset[str]:
        """Names of the tensors that `dense` rounds to bf16."""
        dense = self.dense()
        if self.weights is not None:
            return frozenset(name for name in dense if self.weights.spec(name)[0] != dense.spec(name)[0])
        return frozenset(name for name in dense if not dense.is_copy(name))


@dataclasses.dataclass(frozen=True)
class Written:
    """An export.

    Attributes:
      policy: how to load it.
      rounded: names of the tensors whose values were rounded to bf16, or to NVFP4 where the export is quantized again;
        all others are the policy's, bit for bit.
    """

    policy: StoredPolicy
    rounded: frozenset[str] = frozenset()


def write(
    kind: Kind, policy: StoredPolicy, directory: Path, final: Path, base_model: str, progress: Progress
) -> Written:
    """Write a policy into an empty directory.

    Args:
      kind: the form.
      policy: with an adapter; of full fine-tuning only for "merged" and "merged-nvfp4".
      directory: where to write.
      final: the directory's name later.
      base_model: name of the base, written into an adapter's config.
      progress: as `Progress`.

    Raises CheckpointError for tensors that are not those of the config, and for an adapter of another model.
    """
    match kind:
        case "peft":
            return _write_peft(policy, directory, base_model)
        case "vllm":
            return _write_vllm(policy, directory, final, base_model, progress)
    merged, rounded = policy.dense(), policy.rounded()
    if kind == "merged":
        _write_dense(policy, directory, merged, progress)
    else:
        _write_quantized(policy, directory, merged, _unquantized(policy.base), progress)
        parts = policy.config.projection_shapes()
        layers = range(policy.config.num_layers)
        rounded |= {f"{names.projection(layer, part)}.weight" for layer in layers for part in parts}
    return Written(StoredPolicy(directory), rounded)


def _write_peft(policy: StoredPolicy, directory: Path, base_model: str) -> Written:
    reader = policy.reader()
    write_adapter(directory, reader.config, reader.lora_tensors(), reader.norm_tensors(), base_model)
    for name in TOKENIZER_FILES:
        if (policy.base / name).is_file():
            shutil.copyfile(policy.base / name, directory / name)
    return Written(dataclasses.replace(policy, adapter=directory))


def _write_vllm(policy: StoredPolicy, directory: Path, final: Path, base_model: str, progress: Progress) -> Written:
    """The LoRA alone, and the base with the adapter's norms; the base only where it is not the one that there is."""
    reader, written = policy.reader(), dataclasses.replace(policy, adapter=None)
    rounded: frozenset[str] = frozenset()
    if reader.has_norms or policy.quantizes:
        written, base_model = StoredPolicy(directory / BASE_PART), str(final.absolute() / BASE_PART)
        rounded = _write_base(policy, reader, directory / BASE_PART, progress)
    if reader.config.rank:
        (directory / ADAPTER_PART).mkdir()
        write_adapter(directory / ADAPTER_PART, reader.config, reader.lora_tensors(), {}, base_model)
        written = dataclasses.replace(written, adapter=directory / ADAPTER_PART)
    return Written(written, rounded)


def _write_base(policy: StoredPolicy, reader: AdapterReader, directory: Path, progress: Progress) -> frozenset[str]:
    """The base as the policy has it: quantized if it was while loading, with the adapter's norms in fp32. Names of what
    was rounded for it.
    """
    directory.mkdir()
    layers = policy.config.num_layers
    if policy.quantizes and policy.weight_format != "nvfp4":  # other formats: their values, in bf16
        dense = DenseTensors(policy.base, policy.weight_format)
        _write_dense(policy, directory, Overlaid(dense, reader, layers), progress)
        return frozenset(name for name in dense if not dense.is_copy(name))
    tensors = Overlaid(open_checkpoint(policy.base), reader, layers)
    raw = hf_config.read_json(policy.base / "config.json")
    if policy.quantizes:
        _write_quantized(policy, directory, tensors, raw, progress)
    else:
        _copy(policy.base, directory, tensors, raw, progress, (CARD_FILE,))
    return frozenset()


def _write_dense(policy: StoredPolicy, directory: Path, tensors: TensorSource, progress: Progress) -> None:
    config = _unquantized(policy.base)
    _copy(policy.base, directory, tensors, config, progress, (CARD_FILE, *_QUANTIZATION_FILES))


def _copy(
    base: Path, directory: Path, tensors: TensorSource, config: dict, progress: Progress, leave_out: Container[str]
) -> None:
    write_checkpoint(
        base,
        directory,
        tensors,
        config,
        progress=lambda done: progress("write", done, len(tensors)),
        leave_out=leave_out,
    )


def _write_quantized(
    policy: StoredPolicy, directory: Path, tensors: TensorSource, config: dict[str, Any], progress: Progress
) -> None:
    stages = {"scan": "scan", "quantize": "write"}
    write_quantized(
        policy.base,
        directory,
        tensors,
        config,
        policy.config.num_layers,
        lambda stage, done, total: progress(stages[stage], done, total),
        (CARD_FILE, *_QUANTIZATION_FILES),
    )


def _unquantized(base: Path) -> dict[str, Any]:
    """config.json of the base in bf16."""
    raw = hf_config.read_json(base / "config.json")
    raw.pop("quantization_config", None)
    keys = [key for key in ("dtype", "torch_dtype") if key in raw] or ["dtype"]
    return {**raw, **dict.fromkeys(keys, "bfloat16")}
