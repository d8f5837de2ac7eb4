"""A stand-in for vLLM 0.22.1: the surface that `qerl_jax.backends.vllm_worker` uses, with the names and signatures of
that version. It computes with this package, on the CPU: base, adapter and the norms of its torch modules.

Each request and each change is appended to `asked.jsonl` beside it. A file `fault` in the model's directory names what
goes wrong.
"""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from vllm.model_executor.model_loader import LOADERS

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__ = "0.22.1"

VARIABLES = ("VLLM_USE_V2_MODEL_RUNNER", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def note(**entry):
    with Path(__file__).parents[1].joinpath("asked.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


@dataclasses.dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True


@dataclasses.dataclass
class LoadConfig:
    load_format: str


class RMSNorm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16))


class Model(torch.nn.Module):
    """The modules of Qwen2ForCausalLM that have norms; `load_weights` copies into their dtype, as vLLM's does."""

    def __init__(self, layers, size):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(layers))
        for layer in self.model.layers:
            layer.input_layernorm, layer.post_attention_layernorm = RMSNorm(size), RMSNorm(size)
        self.model.norm = RMSNorm(size)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, value in weights:
            if name in parameters:
                parameters[name].data.copy_(torch.from_numpy(np.asarray(value, np.float32)))


class Engine:
    def __init__(self, enabled, fault):
        self.enabled, self.fault, self.adapters = enabled, fault, {}

    def _require(self):
        if not self.enabled:
            raise RuntimeError("LoRA is not enabled. Use --enable-lora to enable LoRA.")

    def add_lora(self, request):
        self._require()
        files = sorted(path.name for path in Path(request.lora_path).iterdir())
        note(event="add_lora", id=request.lora_int_id, name=request.lora_name, files=files)
        self.adapters[request.lora_int_id] = request
        return True

    def remove_lora(self, lora_id):
        self._require()
        if self.fault != "adapter":
            del self.adapters[lora_id]
        return True

    def list_loras(self):
        self._require()
        return set(self.adapters)


class LLM:
    def __init__(self, model, *, load_format="auto", enable_lora=False, **options):
        from qerl_jax.checkpoint.hf_config import model_config

        note(event="environment", values=[os.environ.get(name) for name in VARIABLES])
        note(event="start", model=model, load_format=load_format, enable_lora=enable_lora, **options)
        fault = Path(model) / "fault"
        self.fault = fault.read_text() if fault.exists() else ""
        if self.fault == "start":
            raise RuntimeError("no memory left for the KV cache")
        self.path, self.config = Path(model), model_config(Path(model))
        self.most, self.rows = options["max_model_len"], options["max_num_seqs"]
        self.model = Model(self.config.num_layers, self.config.hidden_size)
        LOADERS[load_format](LoadConfig(load_format)).load_weights(self.model, SimpleNamespace(model=model))
        self.llm_engine = Engine(enable_lora, self.fault)

    def apply_model(self, function):
        result = function(self.model)
        if self.fault == "norms":
            name, value = next(iter(result.items()))
            result[name] = value.astype(np.float16).astype(np.float32)
        return [result]

    def policy(self, adapter):
        import jax.numpy as jnp

        from qerl_jax.checkpoint.adapter import map_layers
        from qerl_jax.checkpoint.load import load_policy
        from qerl_jax.models.lora import LoraConfig

        path = adapter and Path(adapter.lora_path)
        base = LoraConfig(rank=0) if path is None else None
        policy = load_policy(self.path, lora=base, dtype=jnp.float32, adapter=path)
        layers = self.model.model.layers
        return policy.replace(
            norms=map_layers(
                lambda layer, name, old: jnp.asarray(getattr(layers[layer], name).weight.data.numpy()), policy.norms
            )
        )

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None):
        import jax

        from qerl_jax import Prompts, Sampling, generate, token_logprobs

        note(
            event="generate",
            prompts=[prompt["prompt_token_ids"] for prompt in prompts],
            sampling=[dataclasses.asdict(own) for own in sampling_params],
            lora=lora_request and lora_request.lora_int_id,
        )
        if self.fault == "dies":
            os._exit(9)
        own = sampling_params[0]
        assert all(dataclasses.replace(other, seed=own.seed) == own for other in sampling_params)
        assert own.ignore_eos and not own.detokenize
        assert sorted(own.stop_token_ids) == sorted(self.config.eos_token_ids)
        tokens = [prompt["prompt_token_ids"] for prompt in prompts]
        assert max(map(len, tokens)) + own.max_tokens <= self.most
        # A request's samples depend on its seed, which is its problem's number here.
        seeds = [int(np.random.default_rng(other.seed).integers(2**31)) for other in sampling_params]
        sampling = Sampling(own.max_tokens, own.temperature, own.top_k, own.top_p, own.min_p)
        policy = self.policy(lora_request)
        more = self.rows - len(tokens)  # one shape for all requests
        prompts = Prompts.from_lists(tokens + tokens[:1] * more, seeds + [0] * more, length=self.most - own.max_tokens)
        rollout = generate(policy, prompts, sampling, jax.random.key(0))
        if own.temperature == 0:  # vLLM tells the log-probabilities of the model
            found = token_logprobs(policy, rollout.tokens, rollout.attention_mask)
            rollout = rollout.replace(logprobs=np.pad(found, ((0, 0), (1, 0))))
        outputs = []
        for row, start in enumerate(rollout.prompt_lengths.tolist()[: len(tokens)]):
            columns = slice(start, int(rollout.lengths[row]))
            ids, values = (np.asarray(x)[row, columns].tolist() for x in (rollout.tokens, rollout.logprobs))
            reason = "stop" if ids[-1] in own.stop_token_ids else "length"
            entries = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids, values, strict=True)]
            completion = SimpleNamespace(token_ids=tuple(ids), logprobs=entries, finish_reason=reason)
            outputs.append(SimpleNamespace(outputs=[completion]))
        return outputs
