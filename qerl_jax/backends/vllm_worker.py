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


def replace_layer_norms(model: Any, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write layer norms in place, where compiled programs and CUDA graphs read them; returns all as they are then."""
    norms = layer_norms(model)
    for name, value in values.items():
        weight = norms[name].weight.data
        weight.copy_(weight.new_tensor(value))
    return {name: norm.weight.data.cpu().numpy().copy() for name, norm in norms.items()}


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

    def set_layer_norms(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
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
    ) -> list[tuple[list[int], list[float], str | None]]:
        """Complete token ids, each with its own arguments of `SamplingParams`: token ids, their log-probabilities, and
        vLLM's finish reason.
        """
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            [self._sampling_params(**arguments) for arguments in sampling],
            use_tqdm=False,
            lora_request=self._adapter,
        )
        found = []
        for output in outputs:
            (own,) = output.outputs
            logprobs = [at[token].logprob for token, at in zip(own.token_ids, own.logprobs, strict=True)]
            found.append(([int(token) for token in own.token_ids], logprobs, own.finish_reason))
        return found


def serve(connection: Connection) -> None:
    """Answer calls until the other end closes; the first is the options of `vllm.LLM`, answered by vLLM's version."""
    worker = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        try:
            if worker is None:
                import vllm

                worker, answer = Worker(message), vllm.__version__
            else:
                name, arguments = message
                answer = getattr(worker, name)(*arguments)
            connection.send((None, answer))
        except Exception as problem:
            traceback.print_exc()
            connection.send((f"{type(problem).__name__}: {problem}", None))


if __name__ == "__main__":
    if sys.platform == "linux":  # killed by the kernel when its parent ends, however that ends: a call may take minutes
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    serve(Connection(int(sys.argv[1])))
