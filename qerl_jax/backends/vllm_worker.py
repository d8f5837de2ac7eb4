"""The process in which vLLM runs, started by `vllm_engine`: it imports vLLM and NumPy, and nothing of this package.

It answers calls that come through a pipe, (name of a method, arguments), with (error or None, result).

vLLM is version 0.22.1; private parts of it that are used: `RMSNorm.weight` of the decoder layers, the base class of its
loaders, and `llm_engine`'s adapters.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

LOAD_FORMAT = "qerl_fp32_layer_norms"
_PR_SET_PDEATHSIG = 1
_LAYER_NORM = re.compile(r"model\.layers\.\d+\.(input|post_attention)_layernorm")


def layer_norms(model: Any) -> dict[str, Any]:
    """Name of the weight in a checkpoint -> module, for the 2 L norms of the decoder layers."""
    return {f"{name}.weight": module for name, module in model.named_modules() if _LAYER_NORM.fullmatch(name)}


def register_loader() -> None:
    """Makes the load format LOAD_FORMAT: safetensors, with the layer norms in fp32, where vLLM would round them to
    bf16. Noise of a small σ would be lost in that. vLLM's RMSNorm multiplies in the dtype of its weight.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader(LOAD_FORMAT)
    class LayerNormsInFp32(DefaultModelLoader):
        """Reads safetensors."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(dataclasses.replace(load_config, load_format="safetensors"))

        def load_weights(self, model: Any, model_config: Any) -> None:
            for norm in layer_norms(model).values():
                norm.float()  # before compilation, which fixes the dtype
            super().load_weights(model, model_config)


def replace_layer_norms(model: Any, values: Mapping[str, np.ndarray]) -> tuple[int, dict[str, np.ndarray]]:
    """Write layer norms in place, where compiled programs and CUDA graphs read them.

    Returns the number of norms that this changed, and all of them as they are now.

    Raises ValueError if `values` are not exactly the model's norms, or these are not in fp32.
    """
    norms = layer_norms(model)
    if norms.keys() != values.keys():
        other = sorted(norms.keys() ^ values.keys())
        raise ValueError(f"{len(norms)} layer norms in vLLM's model, {len(values)} to write, first other {other[0]!r}")
    changed, found = 0, {}
    for name, norm in norms.items():
        weight = norm.weight.data
        if str(weight.dtype) != "torch.float32":
            raise ValueError(f"{name} is {weight.dtype} in vLLM's model: noise needs float32")
        before = weight.cpu().numpy().copy()
        weight.copy_(weight.new_tensor(values[name]))
        found[name] = weight.cpu().numpy().copy()
        changed += not np.array_equal(before, found[name])
    return changed, found


class Worker:
    """vLLM with one model and at most one adapter. Its public methods are the calls it answers.

    Args:
      options: arguments of `vllm.LLM`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        import vllm
        from vllm.lora.request import LoRARequest

        register_loader()
        self._sampling_params, self._lora_request = vllm.SamplingParams, LoRARequest
        self._llm = vllm.LLM(load_format=LOAD_FORMAT, **options)
        self._adapter: Any = None

    def set_layer_norms(self, values: Mapping[str, np.ndarray]) -> tuple[int, dict[str, np.ndarray]]:
        """`replace_layer_norms` in vLLM's model."""
        (result,) = self._llm.apply_model(lambda model: replace_layer_norms(model, values))
        return result

    def set_adapter(self, number: int, directory: str | None) -> list[int]:
        """Take a PEFT directory as the adapter `number` in place of the last one; None: no adapter. Returns the numbers
        of the adapters that vLLM now has.
        """
        engine = self._llm.llm_engine
        if self._adapter is not None:
            engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = None
        if directory is not None:
            self._adapter = self._lora_request(f"adapter-{number}", number, directory)
            engine.add_lora(self._adapter)
        return sorted(engine.list_loras())

    def complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[Mapping[str, Any]]
    ) -> list[tuple[list[int], list[dict[int, float]], str | None]]:
        """Complete token ids, each with its own arguments of `SamplingParams`: token ids, log-probabilities by token at
        each position, and vLLM's finish reason.
        """
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [self._sampling_params(**arguments) for arguments in sampling],
            use_tqdm=False,
            lora_request=self._adapter,
        )
        completions = [output.outputs[0] for output in outputs]
        return [
            (
                [int(token) for token in completion.token_ids],
                [{int(token): entry.logprob for token, entry in at.items()} for at in completion.logprobs],
                completion.finish_reason,
            )
            for completion in completions
        ]


def serve(connection: Connection) -> None:
    """Answer calls until the other end closes; the first is (options of `vllm.LLM`, the version it must have)."""
    options, version = connection.recv()
    worker = None
    try:
        import vllm

        if vllm.__version__.partition("+")[0] == version:
            worker = Worker(options)
        error = None
    except Exception as problem:
        error = _told(problem)
    connection.send((error, None if error else vllm.__version__))
    while worker is not None:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = None, getattr(worker, name)(*arguments)
        except Exception as problem:
            answer = _told(problem), None
        connection.send(answer)


def _told(problem: Exception) -> str:
    traceback.print_exc()
    return f"{type(problem).__name__}: {problem}"


def end_with_parent() -> None:
    """Have the kernel (Linux) kill this process when its parent ends, however that ends: a call may take minutes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    serve(Connection(int(sys.argv[1])))
