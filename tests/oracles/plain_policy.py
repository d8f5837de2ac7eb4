"""An NVFP4 model with LoRA in PyTorch (float64), and its samples token by token: the policy of `plain_run`.

Axes: V vocab, K input features, N output features, R rank.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.torch
import torch
import transformers

from oracles import numpy_formats, torch_qwen2

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
PREFIX = "base_model.model."
LENGTH, EOS, FAILED = "length", "eos", "failed"


def load_model(directory: Path, first_a: dict[str, np.ndarray], scale: float) -> torch.nn.Module:
    """A compressed-tensors NVFP4 directory as float64 values, with plain LoRA (A given, B zero); adapters and layer
    norms require gradients.
    """
    config = transformers.Qwen2Config(**json.loads((directory / "config.json").read_text()))
    config._attn_implementation = "eager"
    stored = safetensors.torch.load_file(directory / "model.safetensors")
    state = {}
    for name, tensor in stored.items():
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            scales, divisor = stored[f"{module}.weight_scale"].double(), stored[f"{module}.weight_global_scale"]
            value = numpy_formats.nvfp4(tensor.numpy(), scales.numpy(), divisor.numpy(), divides=True)
            state[f"{module}.weight"] = torch.tensor(value)
        elif "_scale" not in name:
            state[name] = tensor.double()
    model = transformers.Qwen2ForCausalLM(config).double().eval()
    model.load_state_dict(state)
    adapters = {}
    for layer in range(config.num_hidden_layers):
        for part in PROJECTIONS:
            a = first_a[f"{PREFIX}{module_name(layer, part)}.lora_A.weight"].astype(np.float64)
            linear = model.get_submodule(module_name(layer, part))
            adapters[layer, part] = (a, np.zeros((linear.out_features, len(a))), scale)
    torch_qwen2.attach_lora(model, adapters)
    for norm in layer_norms(model):
        norm.weight.requires_grad_(True)
    return model


def module_name(layer: int, part: str) -> str:
    """Name of a projection in a Qwen2 checkpoint."""
    return f"model.layers.{layer}.{torch_qwen2.PARENT[part]}.{part}"


def layer_norms(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The 2 L layer norms, in the order in which they draw their noise."""
    return [getattr(layer, name) for layer in model.model.layers for name in NORMS]


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every trained parameter under its name in a PEFT adapter."""
    found = {}
    for layer, block in enumerate(model.model.layers):
        for part in PROJECTIONS:
            module = model.get_submodule(module_name(layer, part))
            found[f"{PREFIX}{module_name(layer, part)}.lora_A.weight"] = module.a
            found[f"{PREFIX}{module_name(layer, part)}.lora_B.weight"] = module.b
        for norm in NORMS:
            found[f"{PREFIX}model.layers.{layer}.{norm}.weight"] = getattr(block, norm).weight
    return found


def key_of(seed: int, *words: int) -> jax.Array:
    """`fold_in` of each word, one after the other, into the seed's key."""
    key = jax.random.key(seed)
    for word in words:
        key = jax.random.fold_in(key, word)
    return key


@functools.partial(jax.jit, static_argnames="vocab")
def _noise(key: jax.Array, ids: np.ndarray, samples: np.ndarray, positions: np.ndarray, vocab: int) -> jax.Array:
    """Gumbel noise [rows, positions, V]: the key of a token is (problem, sample in group, position)."""

    def at(problem, sample, position):
        token_key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, problem), sample), position)
        return jax.random.gumbel(token_key, (vocab,), np.float32)

    return jax.vmap(jax.vmap(at, (None, None, 0)))(ids, samples, positions)


def kept_logits(logits: np.ndarray, sampling: dict[str, float]) -> np.ndarray:
    """Logits [rows, V] over the temperature, −inf where top-k, then top-p, then min-p drops a token."""
    logits = logits / sampling["temperature"]
    if sampling.get("top_k"):
        least = np.sort(logits, axis=-1)[:, -sampling["top_k"]]
        logits = np.where(logits >= least[:, None], logits, -np.inf)
    if sampling["top_p"] < 1:
        order = np.argsort(-logits, axis=-1)
        p = np.take_along_axis(np.exp(logits - log_sum_exp(logits)), order, axis=-1)
        needed = np.cumsum(p, axis=-1) - p < sampling["top_p"]  # what stands before does not reach it
        kept = np.zeros(logits.shape, bool)
        np.put_along_axis(kept, order, needed, axis=-1)
        logits = np.where(kept, logits, -np.inf)
    if sampling.get("min_p"):
        least = logits.max(axis=-1, keepdims=True) + math.log(sampling["min_p"])
        logits = np.where(logits >= least, logits, -np.inf)
    return logits


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, which stays."""
    top = logits.max(axis=-1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def sample(
    model: torch.nn.Module, problems: list[dict], group: int, length: int, sampling: dict, key: jax.Array, eos: set[int]
) -> list[dict[str, Any]]:
    """`group` completions of each problem: the whole forward pass of every row for each token."""
    rows = [
        {
            "problem": problem, "sample": g, "ids": list(problem["ids"]), "logprobs": [], "entropies": [],
            "finish": LENGTH,
        }
        for problem in problems
        for g in range(group)
    ]  # fmt: skip
    width, vocab = max(len(row["ids"]) for row in rows) + length, model.config.vocab_size
    ids = np.array([row["problem"]["id"] for row in rows], np.int32)
    samples = np.array([row["sample"] for row in rows], np.int32)
    positions = np.array([len(row["ids"]) for row in rows], np.int32)[:, None] + np.arange(length, dtype=np.int32)
    noise = np.asarray(_noise(key, ids, samples, positions, vocab))
    for t in range(length):
        with torch.no_grad():
            tokens = torch.tensor([row["ids"] + [0] * (width - len(row["ids"])) for row in rows])
            logits = model(tokens).logits.numpy()
        for i, row in enumerate(rows):
            if row["finish"] == EOS:
                continue
            at = len(row["ids"])
            kept = kept_logits(logits[i, at - 1 : at], sampling)[0]
            token = int(np.argmax(kept + noise[i, t]))
            row["ids"].append(token)
            row["logprobs"].append(kept[token] - log_sum_exp(kept)[0])
            every = logits[i, at - 1] / sampling["temperature"]  # the policy's own entropy: nothing is truncated
            logp = every - log_sum_exp(every)
            row["entropies"].append(-float(np.sum(np.exp(logp) * logp)))
            row["finish"] = EOS if token in eos else LENGTH
    for row in rows:
        row["new"] = row["ids"][len(row["problem"]["ids"]) :]
    return rows
