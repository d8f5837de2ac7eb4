"""vLLM as the engine of rollouts and evaluations, in a process of its own (`vllm_worker`) beside the trainer.

Everything but the forward pass and the sampler stays as it is: prompts are token ids made here, completions end at the
model's EOS ids or their limit, and come back as a `Rollout`. vLLM holds a copy of the base; `set_weights` brings it the
adapter and the layer norms (the noisy ones in a training rollout), and checks that they arrived.

Axes: B sequences, P prompts, G group (row = p · G + g), T tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from qerl_jax import keys
from qerl_jax.checkpoint import hf_config, names
from qerl_jax.checkpoint.adapter import adapter_tensors, norm_tensors, write_adapter
from qerl_jax.checkpoint.adapter_reader import AdapterReader
from qerl_jax.checkpoint.safetensors import open_checkpoint
from qerl_jax.checkpoint.tokenizer import refuse_other_tokenizer
from qerl_jax.models.config import LAYER_NORMS, ModelConfig
from qerl_jax.models.lora import LoraConfig
from qerl_jax.rollout.engine import check_positions
from qerl_jax.types import Engine, FinishReason, Policy, Prompts, Rollout, Sampling

_WORKER = Path(__file__).with_name("vllm_worker.py")
_LINES = 20  # lines of the log in an error
_FIRST_ADAPTER = 1001  # vLLM warms up with adapters of its own, from 1 on

_SETTINGS = {  # environment variables that vLLM reads
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in the worker itself, whose model can then be written
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler gives the log-probabilities described below
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_NETWORK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # unless set


Completion = tuple[list[int], list[float], str]
"""Token ids, their log-probabilities, and vLLM's reason of the end: "stop" or "length"."""


class VllmError(ValueError):
    """vLLM failed, or did not do what was asked for."""


def sampling_arguments(sampling: Sampling, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams`, but for the seed."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": [int(token) for token in eos_token_ids],
        "ignore_eos": True,  # it has no others
        "logprobs": 0,  # that of the sampled token alone
        "detokenize": False,
    }


def row_seeds(key: Array, ids: Int[np.ndarray, " B"], samples: Int[np.ndarray, " B"]) -> list[int]:
    """A seed for each row, from the rollout's key, its problem and its number among that problem's samples."""
    row_keys = keys.for_rows(key, jnp.asarray(ids, jnp.int32), jnp.asarray(samples, jnp.int32))
    high, low = np.asarray(jax.vmap(lambda key: jax.random.bits(key, (2,)))(row_keys)).astype(np.int64).T
    return [int(seed) for seed in (high >> 1 << 32) | low]


def assemble(
    prompts: Prompts,
    rows: Int[np.ndarray, " B"],
    completions: Sequence[Completion],
    sampling: Sampling,
    model: ModelConfig,
) -> Rollout:
    """vLLM's completions as a `Rollout`. Greedy tokens have log-probability 0, as they are sampled with certainty; a
    completion with a log-probability that is not finite has failed.

    `rows` has the prompt of each completion. Raises VllmError for a completion that ended before its limit
    without one of the model's EOS ids.
    """
    prompt_tokens, prompt_lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)[rows]
    shape = (len(rows), prompt_tokens.shape[1] + sampling.max_new_tokens)
    tokens, logprobs = np.full(shape, model.pad_token_id, np.int32), np.zeros(shape, np.float32)
    lengths, finish = prompt_lengths.copy(), np.zeros(len(rows), np.int8)
    for row, (ids, values, reason) in enumerate(completions):
        ended = bool(ids) and ids[-1] in model.eos_token_ids
        if reason != ("stop" if ended else "length") or not (ended or len(ids) == sampling.max_new_tokens):
            raise VllmError(f"vLLM ended completion {row} by {reason!r} after {len(ids)} tokens, {ids[-1:]} the last")
        start = prompt_lengths[row]
        own = slice(start, start + len(ids))
        tokens[row, :start], tokens[row, own] = prompt_tokens[rows[row], :start], ids
        lengths[row] += len(ids)
        finish[row] = FinishReason.EOS if ended else FinishReason.LENGTH
        if not np.isfinite(values).all():
            finish[row] = FinishReason.FAILED
        elif sampling.temperature > 0:
            logprobs[row, own] = values
    arrays = (tokens, logprobs, prompt_lengths, lengths, finish, rows.astype(np.int32))
    return Rollout(*map(jax.device_put, arrays))


@dataclasses.dataclass(frozen=True)
class Weights:
    """What vLLM computes with besides the base."""

    config: LoraConfig
    lora: dict[str, np.ndarray]
    """PEFT name -> f32 array (`checkpoint.adapter.adapter_tensors`); empty: no adapter."""
    norms: dict[str, np.ndarray]
    """Name in the base checkpoint -> f32[D], the 2 L layer norms."""

    @classmethod
    def of_policy(cls, policy: Policy) -> Self:
        """Those of a policy."""
        return cls(policy.lora_config, adapter_tensors(policy), norm_tensors(policy))

    @classmethod
    def of_files(cls, base: Path, adapter: Path | None) -> Self:
        """Those of a base, or of a PEFT adapter on it, whose layer norms replace the base's.

        Raises CheckpointError for an adapter of another model, or with another tokenizer.
        """
        model, tensors = hf_config.model_config(base), open_checkpoint(base)
        places = [(layer, name) for layer in range(model.num_layers) for name in LAYER_NORMS]
        norms = {names.layer_norm(*place): tensors[names.layer_norm(*place)].astype(np.float32) for place in places}
        if adapter is None:
            return cls(LoraConfig(rank=0), {}, norms)
        refuse_other_tokenizer(base, adapter)
        reader = AdapterReader(adapter, model)
        return cls(reader.config, reader.lora_tensors(), norms | reader.norm_tensors())


class VllmEngine:
    """vLLM with one base model. As a context it ends with `close`.

    Args:
      options: from `engine_options`.
      model: the model's config.

    Raises VllmError, with the end of its log, if it does not start.
    """

    def __init__(self, options: Mapping[str, Any], model: ModelConfig) -> None:
        self._model, self._base, self._number = model, str(options["model"]), _FIRST_ADAPTER - 1
        self._norms: Mapping[str, np.ndarray] = {}
        self._lora: Mapping[str, np.ndarray] = {}
        self.directory = Path(tempfile.mkdtemp(prefix="qerl-jax-vllm-"))
        self.log = self.directory / "vllm.log"
        self._connection, theirs = Pipe()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                # -P: no folder of this package before the installed vLLM
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_NETWORK | dict(os.environ) | _SETTINGS,
                start_new_session=True,  # Ctrl-C is the trainer's
            )
        theirs.close()
        try:
            self.version = self._ask(dict(options), "start")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End vLLM and free its memory."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _ask(self, message: Any, what: str) -> Any:
        try:
            self._connection.send(message)
            error, result = self._connection.recv()
        except (EOFError, OSError):
            error, result = f"its process ended with {self._process.wait()}", None
        if error is None:
            return result
        end = self.log.read_text(errors="replace").splitlines()[-_LINES:]
        raise VllmError("\n".join([f"vLLM failed ({what}): {error}; the end of its log:", *end]))

    def set_weights(self, weights: Weights) -> None:
        """Have vLLM compute with these; what it has already is not sent again.

        Raises VllmError unless the norms read back from its model are these, bit for bit, and the adapter is the only
        one that it has.
        """
        if not _equal(self._norms, weights.norms):
            self._norms = {}  # unknown, should this fail
            found = self._ask(("set_layer_norms", (weights.norms,)), "layer norms")
            wrong = sorted(name for name in found.keys() | weights.norms if not _same(found, weights.norms, name))
            if wrong:
                raise VllmError(f"{len(wrong)} of {len(found)} layer norms in vLLM are not those written: {wrong[0]}")
            self._norms = weights.norms
        if not _equal(self._lora, weights.lora):
            self._set_adapter(weights)
            self._lora = weights.lora

    def _set_adapter(self, weights: Weights) -> None:
        last, directory = self.directory / f"adapter-{self._number}", None
        if weights.lora:
            self._number += 1
            directory = self.directory / f"adapter-{self._number}"
            directory.mkdir()
            write_adapter(directory, weights.config, weights.lora, {}, self._base, None)
        found = self._ask(("set_adapter", (self._number, directory and str(directory))), "adapter")
        if found != ([self._number] if directory else []):
            raise VllmError(f"vLLM has the adapters {found}, not {self._number if directory else 'none'}")
        shutil.rmtree(last, ignore_errors=True)

    def generate(
        self, policy: Policy, prompts: Prompts, sampling: Sampling, key: Array, engine: Engine | None = None
    ) -> Rollout:
        """`rollout.engine.generate` by vLLM: the same contract, other samples. `engine` is not used."""
        self.set_weights(Weights.of_policy(policy))
        return self.sample(prompts, sampling, key)

    def sample(self, prompts: Prompts, sampling: Sampling, key: Array) -> Rollout:
        """`generate` with the weights that were set last."""
        tokens, lengths, ids = (np.asarray(x) for x in (prompts.tokens, prompts.lengths, prompts.ids))
        check_positions(self._model, tokens.shape[1], sampling.max_new_tokens)
        group = sampling.num_generations
        rows = np.repeat(np.arange(len(lengths)), group)
        numbers = np.repeat(group * prompts.earlier(), group) + np.tile(np.arange(group), len(lengths))
        shared = sampling_arguments(sampling, self._model.eos_token_ids)
        arguments = [shared | {"seed": seed} for seed in row_seeds(key, ids[rows], numbers)]
        completions = self._ask(("complete", ([tokens[p, : lengths[p]].tolist() for p in rows], arguments)), "rollout")
        return assemble(prompts, rows, completions, sampling, self._model)


def _equal(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    return all(_same(a, b, name) for name in a.keys() | b)


def _same(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], name: str) -> bool:
    return name in a and name in b and a[name].dtype == b[name].dtype and np.array_equal(a[name], b[name])
