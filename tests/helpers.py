"""Small policies and compiled functions that many tests share."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax import keys
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.models.distribution import sample
from qerl_jax.models.lora import Lora, LoraConfig
from qerl_jax.programs import calling
from qerl_jax.rl.logprobs import policy_logits, token_logprobs
from qerl_jax.types import FinishReason, Policy, Sampling

logits_of = jax.jit(policy_logits)
_draw = jax.jit(sample)
logprobs_of = jax.jit(token_logprobs, static_argnames=("temperature", "chunk"))


def fp32_policy(directory: Path, rank: int = 4, **options: Any) -> Policy:
    """The model of a directory in fp32, with fresh adapters on all seven projections."""
    return load_policy(directory, lora=LoraConfig(rank=rank), dtype=jnp.float32, **options)


@contextlib.contextmanager
def noted_programs(note: Callable[[str, tuple, Any], None]) -> Iterator[None]:
    """Within this context `note(name, arguments, results)` is called after each call of a program."""

    def call(program: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        results = program(*args, **kwargs)
        note(program.__name__, args, results)
        return results

    with calling(call):
        yield


def randomized(policy: Policy, seed: int, size: float = 0.1) -> Policy:
    """The policy with normal A and B, as if it had been trained."""
    rng = np.random.default_rng(seed)

    def draw(lora: Lora) -> Lora:
        a, b = (jnp.asarray(rng.normal(size=x.shape, scale=size), jnp.float32) for x in (lora.a, lora.b))
        return dataclasses.replace(lora, a=a, b=b)

    return policy.replace(lora=jax.tree.map(draw, policy.lora, is_leaf=lambda node: isinstance(node, Lora)))


def with_norm_offsets(policy: Policy, seed: int, size: float = 0.1) -> Policy:
    """The policy with every layer norm moved by normal noise of numpy's, not of `aqn`."""
    rng = np.random.default_rng(seed)
    norms = jax.tree.map(lambda w: w + jnp.asarray(rng.normal(size=w.shape, scale=size), jnp.float32), policy.norms)
    return policy.replace(norms=norms)


def plain_rollout(policy: Policy, prompts: list[list[int]], sampling: Sampling, key: jax.Array) -> list[tuple]:
    """(token ids, log-probabilities, finish) of every completion, without cache, slots or batch: the whole forward pass
    of one row for each token. What the engine must agree with.
    """
    width = max(map(len, prompts)) + sampling.max_new_tokens  # one trace: what follows a token does not touch it
    rows = []
    for p, prompt in enumerate(prompts):
        for g in range(sampling.num_generations):
            row_key = keys.for_rows(key, jnp.array([p]), jnp.array([g]))
            ids, logprobs, finish = list(prompt), [], FinishReason.LENGTH
            while len(logprobs) < sampling.max_new_tokens and finish == FinishReason.LENGTH:
                padded = np.array([ids + [0] * (width - len(ids))], np.int32)
                logits = logits_of(policy, padded)[:, len(ids) - 1]
                token, logprob, _ = _draw(
                    logits, sampling.distribution, keys.for_positions(row_key, jnp.array([len(ids)]))
                )
                ids.append(int(token[0]))
                logprobs.append(float(logprob[0]))
                finish = FinishReason.EOS if ids[-1] in policy.config.eos_token_ids else FinishReason.LENGTH
            rows.append((ids[len(prompt) :], logprobs, finish))
    return rows


def assert_trees_equal(a: Any, b: Any) -> None:
    """Same structure and the same bits."""
    chex.assert_trees_all_equal(a, b)
