"""The reference of `python -m qerl_jax.compare`: transformers on the CPU, and peft for adapters. The only module that
imports PyTorch, and that within functions: it is no dependency.

Axes: L1 layers + 1, T tokens, D model, V vocab.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from qerl_jax.checkpoint import hf_config
from qerl_jax.checkpoint.policy_tensors import dense_tensors
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.messages import one_line

_BF16_UNIT = 2.0**-8  # largest relative error of rounding to bf16
_LOCAL = {"local_files_only": True, "use_safetensors": True}


@dataclasses.dataclass(frozen=True)
class Outputs:
    """A model's arrays on one prompt.

    Attributes:
      states: the residual stream before the first layer and behind each one.
      logits: one row for each position.
      logprobs: log-probability of each token but the first.
    """

    states: Float32[np.ndarray, "L1 T D"]
    logits: Float32[np.ndarray, "T V"]
    logprobs: Float32[np.ndarray, " T-1"]


def missing_packages(adapter: bool) -> list[str]:
    """Names of the packages that are needed and not installed; `adapter`: whether there is one."""
    needed = ["torch", *(["peft"] if adapter else [])]
    return [name for name in needed if importlib.util.find_spec(name) is None]


def reference_outputs(
    path: Path, adapter: Path | None, weight_format: str | None, prompts: Sequence[Sequence[int]]
) -> tuple[list[Outputs], str]:
    """A model on each prompt, in fp32, and in words how it was computed.

    Args:
      path: model directory.
      adapter: PEFT directory.
      weight_format: as for `load_policy`.
      prompts: ids of the tokens.
    """
    import torch

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    with _quiet():
        model, label = _torch_model(path, weight_format, options)
        final_norm = model.model.norm  # found here, before peft wraps the model
        label = f"transformers {_version('transformers')} in float32{label}"
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(adapter))
            label += f", adapter by peft {_version('peft')}"
        return _outputs(model.eval(), final_norm, prompts), label


def _outputs(model: Any, final_norm: Any, prompts: Sequence[Sequence[int]]) -> list[Outputs]:
    """A model on each prompt; the input of its final norm stands for the last entry of `output_hidden_states`."""
    import torch

    seen: list[Any] = []
    hook = final_norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    found = []
    with torch.no_grad():
        for ids in prompts:
            tokens = torch.tensor([list(ids)])
            result = model(input_ids=tokens, output_hidden_states=True, use_cache=False)
            states = torch.stack([*result.hidden_states[:-1], seen.pop()])[:, 0]
            logits = result.logits[0].float()
            logprobs = torch.log_softmax(logits, -1)[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
            found.append(Outputs(*(value.float().numpy() for value in (states, logits, logprobs))))
    hook.remove()
    return found


def _torch_model(path: Path, weight_format: str | None, options: dict[str, Any]) -> tuple[Any, str]:
    """The base in transformers, and where the weights of a quantized one are from."""
    from transformers import AutoConfig, AutoModelForCausalLM

    quantization = hf_config.stored_quantization(path)
    if quantization is None and weight_format in (None, "bf16"):
        return AutoModelForCausalLM.from_pretrained(path, **_LOCAL, **options), ""
    model, label = (
        _decompressed(path, options)
        if quantization is not None and quantization.layout.name == "compressed-tensors"
        else (None, "")
    )
    is_decompressed = model is not None
    if not is_decompressed:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        if hasattr(config, "quantization_config"):  # ModelOpt may have its own file for it
            del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, **options)
        label = f", weights dequantized by our loader{label}"
    _fill(model, dense_tensors(path, weight_format, dtype=np.float32), where_close=is_decompressed)
    return model, label


def _decompressed(path: Path, options: dict[str, Any]) -> tuple[Any, str]:
    """The model as compressed-tensors dequantizes it, or None where that is not installed or fails; and a remark."""
    if importlib.util.find_spec("compressed_tensors") is None:
        return None, " (compressed-tensors is not installed)"
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    name = f"compressed-tensors {_version('compressed-tensors')}"
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
            quantization = CompressedTensorsConfig(dequantize=True)
            model = AutoModelForCausalLM.from_pretrained(path, quantization_config=quantization, **_LOCAL, **options)
    except Exception as error:  # whatever that library meets on a CPU
        return None, f" ({name} fails: {one_line(error)})"
    return model, f", weights dequantized by {name}, without its rounding to bf16"


def _fill(model: Any, tensors: Tensors, where_close: bool) -> None:
    """Give a model the weights of a checkpoint in fp32. With `where_close` only those that it has up to rounding to
    bf16, as from compressed-tensors: one that is further off stays, so that its layer is seen to differ.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.from_numpy(np.array(tensors[name])).to(parameter.dtype)
            if not where_close or torch.allclose(parameter, value, rtol=_BF16_UNIT, atol=0):
                parameter.copy_(value)


def _version(package: str) -> str:
    return importlib.metadata.version(package)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and progress bars of transformers and peft."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
