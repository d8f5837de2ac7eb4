"""Chunked log-probabilities and entropy against the full softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import fp32_policy, logits_of, logprobs_of, randomized
from oracles import torch_qwen2

from qerl_jax.rl.logprobs import hidden_states, logprobs_entropy_and_gradients, token_logprobs
from qerl_jax.types import Sampling

B, T, D, V = 2, 7, 5, 23


def values(head, hidden, targets, sampling, chunk):
    """Log-probability of each target and entropy, with the head as it multiplies from the right."""
    arrays = head.T, hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    *both, _ = logprobs_entropy_and_gradients(*arrays, jnp.int32(targets.size), sampling.distribution, chunk, ())
    return [value.reshape(targets.shape) for value in both]


def product(hidden, head):
    """In fp32 as `Qwen2.logits` has it; a GPU's default would be tf32."""
    return jnp.matmul(hidden, head, precision=jax.lax.Precision.HIGHEST)


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(B, T, D)), 2 * rng.normal(size=(D, V))
    targets = rng.integers(0, V, (B, T))
    targets[:, ::2] = (hidden @ head).argmax(-1)[:, ::2]
    return jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(targets)


def full(hidden, head, targets, temperature):
    """In float64 numpy: log-probabilities and entropy."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / temperature
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logp, np.asarray(targets)[..., None], -1)[..., 0], -(np.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize(("chunk", "temperature"), [(3, 0.6), (1000, 1.0)])
def test_values_equal_the_full_softmax(case, chunk, temperature):
    hidden, head, targets = case
    sampling = Sampling(1, temperature=temperature)
    logp, entropy = values(head, hidden, targets, sampling, chunk)
    expected, expected_entropy = full(hidden, head, targets, temperature)
    np.testing.assert_allclose(logp, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(1, temperature=0.6), Sampling(1, 0.8, top_k=5)], ids=["full", "k"])
def test_the_heads_gradients_equal_those_of_the_full_logits(case, sampling):
    """Those of log-probability and entropy, each to its own hidden state, against float64 PyTorch; the kept set of a
    truncation is a constant. Rows behind the count are 0, and a gradient that was not asked for is not there.
    """
    (hidden, head, targets), count = case, B * T - 3
    hidden, targets = np.asarray(hidden).reshape(-1, D), np.asarray(targets).reshape(-1)
    state = torch.tensor(hidden, dtype=torch.float64, requires_grad=True)
    scaled = state @ torch.tensor(np.asarray(head), dtype=torch.float64) / sampling.temperature
    if sampling.top_k:
        kept = scaled >= scaled.topk(sampling.top_k).values[:, -1:]
        kept |= torch.nn.functional.one_hot(torch.tensor(targets).long(), V).bool()
        scaled = scaled.masked_fill(~kept, -1e9)
    logp = torch.log_softmax(scaled, -1)
    expected = logp.gather(-1, torch.tensor(targets).long()[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    arrays = head.T, jnp.asarray(hidden), jnp.asarray(targets), jnp.int32(count)
    for of in (("logprobs", "entropy"), ()) if sampling.top_k == 0 else (("logprobs", "entropy"),):
        logp, entropy, found = logprobs_entropy_and_gradients(*arrays, sampling.distribution, 4, of)
        assert tuple(found) == of
        for got, want in zip((logp, entropy), expected, strict=True):
            np.testing.assert_allclose(got[:count], want.detach()[:count], atol=1e-5)
            assert (np.asarray(got)[count:] == 0).all()
        for name, value in zip(of, expected, strict=False):
            [want] = torch.autograd.grad(value.sum(), state, retain_graph=True)
            np.testing.assert_allclose(found[name][:count], want[:count], atol=2e-5, err_msg=name)
            assert (np.asarray(found[name])[count:] == 0).all() and want.abs().max() > 0.1


def test_entropy_in_closed_form():
    hidden, targets = jnp.ones((1, 2, 1)), jnp.zeros((1, 2), int)
    uniform = values(jnp.zeros((1, V)), hidden, targets, Sampling(1), 2)
    np.testing.assert_allclose(uniform[1], np.log(V), rtol=1e-6)
    np.testing.assert_allclose(uniform[0], -np.log(V), rtol=1e-6)
    certain = values(jnp.full((1, V), -1e9).at[0, 0].set(0), hidden, targets, Sampling(1), 2)
    np.testing.assert_allclose(certain[1], 0, atol=1e-6)
    half = values(jnp.full((1, V), -jnp.inf).at[0, :2].set(3.0), hidden, targets, Sampling(1), 2)
    np.testing.assert_allclose(half[1], np.log(2), rtol=1e-6)


def shapes(jaxpr):
    """Of all values that a program computes."""
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars if hasattr(v.aval, "shape"))
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                    yield from shapes(inner)


def rows_of_logits(function, argument, vocab):
    return {
        int(np.prod(shape[:-1])) for shape in shapes(jax.make_jaxpr(function)(argument).jaxpr) if shape[-1:] == (vocab,)
    }


def test_no_array_of_the_size_of_all_logits(case, stories_dir):
    """Neither the head's pass nor value and gradient of `token_logprobs` hold the logits of all tokens; those of 2 at a
    time they do.
    """
    hidden, head, targets = case
    flat, target = hidden.reshape(-1, D), targets.reshape(-1)

    def of_head(flat):
        distribution = Sampling(1).distribution
        return logprobs_entropy_and_gradients(
            head.T, flat, target, jnp.int32(B * T), distribution, 2, ("logprobs", "entropy")
        )

    assert max(rows_of_logits(of_head, flat, V) - {D}) == 2
    policy = fp32_policy(stories_dir)

    def loss(lora):
        return token_logprobs(policy.replace(lora=lora), np.ones((3, 9), np.int32), chunk=2).sum()

    width = policy.config.hidden_size
    assert max(rows_of_logits(jax.value_and_grad(loss), policy.lora, policy.config.vocab_size) - {width}) == 2


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1, 0.8, top_k=5), Sampling(1, 0.8, top_p=0.7), Sampling(1, 0.8, min_p=0.2)],
    ids=["k", "p", "min"],
)
def test_truncated_distributions_are_renormalized_over_the_kept_set_and_the_target(case, sampling):
    """Slow set arithmetic; the target is in the set whatever this model thinks of it: the sampler had kept it."""
    hidden, head, targets = case
    logp, entropy = values(head, hidden, targets, sampling, 3)
    logits = np.asarray(product(hidden, head), np.float64) / sampling.temperature
    outside = 0
    for b in range(B):
        for t in range(T):
            p = np.exp(logits[b, t]) / np.exp(logits[b, t]).sum()
            order = np.argsort(-p)
            if sampling.top_k:
                kept = set(order[: sampling.top_k])
            elif sampling.top_p < 1:
                kept = set(order[: int(np.searchsorted(np.cumsum(p[order]), sampling.top_p)) + 1])
            else:
                kept = set(np.flatnonzero(p >= sampling.min_p * p.max()))
            target = int(targets[b, t])
            outside += target not in kept
            kept = sorted(kept | {target})
            q = p[kept] / p[kept].sum()
            assert float(logp[b, t]) == pytest.approx(np.log(q[kept.index(target)]), abs=1e-5)
            assert float(entropy[b, t]) == pytest.approx(-(q * np.log(q)).sum(), abs=1e-5)
    assert 0 < outside < B * T


def test_token_logprobs_are_those_of_the_logits(stories_dir):
    policy = randomized(fp32_policy(stories_dir), 1)
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 512, (3, 9))
    mask = np.arange(9) >= np.array([0, 4, 2])[:, None]
    logits = np.asarray(logits_of(policy, tokens, mask), np.float64)
    got = np.asarray(logprobs_of(policy, tokens, mask, temperature=0.5, chunk=5))
    assert got.shape == (3, 8)
    scaled = logits[:, :-1] / 0.5
    logp = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    expected = np.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(got[mask[:, :-1]], expected[mask[:, :-1]], atol=1e-4)
    for temperature in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"temperature must be above 0, got {temperature}"):
            logprobs_of(policy, tokens, mask, temperature=temperature)


def test_hidden_states_are_those_of_transformers(stories_dir):
    """Padding on the left; the last entry has yet to pass the final norm."""
    policy, model = fp32_policy(stories_dir), torch_qwen2.load(stories_dir)
    tokens = np.random.default_rng(0).integers(0, 512, (2, 6)).astype(np.int32)
    mask = np.arange(6) >= np.array([0, 2])[:, None]
    positions = torch.tensor(np.maximum(mask.cumsum(1) - 1, 0))
    inputs = {"input_ids": torch.tensor(tokens).long(), "attention_mask": torch.tensor(mask).long()}
    with torch.no_grad():
        theirs = model(**inputs, position_ids=positions, output_hidden_states=True).hidden_states
    ours = hidden_states(policy, tokens, mask)
    assert ours.shape == (policy.config.num_layers + 1, 2, 6, policy.config.hidden_size)
    last = model.model.norm(torch.tensor(np.asarray(ours[-1])))
    for got, want in zip([*ours[:-1], last.detach()], theirs, strict=True):
        np.testing.assert_allclose(np.asarray(got)[mask], want.numpy()[mask], atol=1e-4)
