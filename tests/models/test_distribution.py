"""Sampling filters against slow set arithmetic and transformers' processors, draws against the distribution claimed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from qerl_jax.models.distribution import sample, sampled_logits
from qerl_jax.types import Sampling

SETTINGS = [
    Sampling(1), Sampling(1, temperature=0.6), Sampling(1, top_k=1), Sampling(1, temperature=0.7, top_k=5),
    Sampling(1, top_k=1000), Sampling(1, top_p=1e-6), Sampling(1, temperature=1.5, top_p=0.5),
    Sampling(1, top_p=0.95), Sampling(1, min_p=0.3), Sampling(1, min_p=1.0), Sampling(1, temperature=0.6, min_p=0.3),
    Sampling(1, temperature=0.8, top_k=7, top_p=0.8, min_p=0.1),
]  # fmt: skip


def slow(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities of one row by set arithmetic in float64."""
    scaled = logits.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    kept = set(range(len(p)))
    if sampling.top_k:
        kept = set(np.argsort(-p)[: sampling.top_k].tolist())
    if sampling.top_p < 1:
        total, nucleus, reached = sum(p[i] for i in kept), set(), 0.0
        for i in sorted(kept, key=lambda i: -p[i]):
            nucleus.add(i)
            reached += p[i] / total
            if reached >= sampling.top_p:
                break
        kept = nucleus
    kept = {i for i in kept if p[i] >= sampling.min_p * p.max()}
    q = np.array([p[i] if i in kept else 0.0 for i in range(len(p))])
    return q / q.sum()


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return (3 * np.random.default_rng(0).normal(size=(8, 30))).astype(np.float32)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_filters_equal_the_slow_ones_and_transformers(logits, sampling):
    ours = np.asarray(jax.nn.softmax(sampled_logits(jnp.asarray(logits), sampling.distribution)))
    np.testing.assert_allclose(ours, [slow(row, sampling) for row in logits], atol=1e-6)
    scores = torch.tensor(logits)
    processors = [TemperatureLogitsWarper(sampling.temperature)]
    processors += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    processors += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    processors += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for processor in processors:
        scores = processor(None, scores)
    np.testing.assert_allclose(ours, scores.softmax(-1).numpy(), atol=1e-6)


@pytest.mark.parametrize("top_k", range(1, 8))
def test_logits_that_differ_in_the_last_bit_are_no_ties(top_k):
    logits = jnp.arange(1.0, 1 + 8 * 2**-23, 2**-23)  # the eight floats from 1 on
    kept = jnp.isfinite(sampled_logits(logits, Sampling(1, top_k=top_k).distribution))
    assert kept.tolist() == [False] * (8 - top_k) + [True] * top_k


def test_tokens_tied_with_the_last_kept_one_stay():
    logits = jnp.asarray([[2.0, 1.0, 1.0, 0.0]])
    assert np.isfinite(sampled_logits(logits, Sampling(1, top_k=2).distribution))[0].tolist() == [
        True, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("sampling", [SETTINGS[0], SETTINGS[1], SETTINGS[-1]], ids=str)
def test_entropy_is_that_of_the_softmax_at_the_temperature_before_truncation(logits, sampling):
    rows = np.concatenate([logits, logits[:1] + 64, 1e4 * logits[:1], np.eye(30, dtype=np.float32)[:1]])
    rows = np.concatenate([rows, np.where(np.arange(30) < 12, logits[1:2], -np.inf)])
    entropy = sample(jnp.asarray(rows), sampling.distribution, jax.random.split(jax.random.key(0), len(rows)))[2]
    p = np.array([slow(row, Sampling(1, sampling.temperature)) for row in rows])
    np.testing.assert_allclose(entropy, -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=1), atol=2e-5)


@pytest.mark.parametrize("sampling", [*SETTINGS, Sampling(1, temperature=0)], ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_finite_largest_logit_has_no_finite_logprob(logits, sampling, value):
    """One NaN or infinity among 30 logits, or nothing but −infinity; the other rows have one."""
    rows = logits.copy()
    rows[3, 7 if value != -np.inf else slice(None)] = value
    logprobs = sample(jnp.asarray(rows), sampling.distribution, jax.random.split(jax.random.key(0), 8))[1]
    assert np.isfinite(logprobs).tolist() == [row != 3 for row in range(8)]


def test_greedy_takes_the_first_of_the_likeliest():
    logits = jnp.asarray([[0.0, 5.0, 5.0], [3.0, 1.0, 2.0]])
    tokens, logprobs, entropy = sample(
        logits, Sampling(1, temperature=0).distribution, jax.random.split(jax.random.key(0), 2)
    )
    assert tokens.tolist() == [1, 0] and logprobs.tolist() == entropy.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "sampling", [Sampling(1, 0.7), Sampling(1, top_k=4), Sampling(1, top_p=0.8), Sampling(1, min_p=0.2)], ids=str
)
def test_draws_follow_the_distribution_and_report_its_logprob(sampling):
    """Chi-square over 20,000 draws from three blocks of four tokens, with fixed keys; 99.99 % quantiles by Wilson and
    Hilferty.
    """
    row = np.random.default_rng(1).normal(size=12).astype(np.float32)
    count = 20_000
    logits = jnp.broadcast_to(jnp.asarray(row), (count, 12))
    keys = jax.random.split(jax.random.key(3), count)
    tokens, logprobs, _ = jax.jit(sample)(logits, sampling.distribution, keys)
    p = slow(row, sampling)
    observed = np.bincount(np.asarray(tokens), minlength=12)
    assert observed[p == 0].sum() == 0
    live = p > 0
    chi2 = ((observed[live] - count * p[live]) ** 2 / (count * p[live])).sum()
    df = live.sum() - 1
    quantile = df * (1 - 2 / (9 * df) + 3.72 * (2 / (9 * df)) ** 0.5) ** 3
    assert chi2 < quantile
    wrong = slow(row, Sampling(1, 0.8 * sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p))
    assert ((observed[live] - count * wrong[live]) ** 2 / np.maximum(count * wrong[live], 1)).sum() > quantile, (
        "would not notice"
    )
    np.testing.assert_allclose(logprobs, np.log(p[np.asarray(tokens)]), atol=1e-5)


def test_a_rows_draw_depends_on_its_own_key_and_logits_only(logits):
    """And not on a number added to them, for which `exp` would overflow."""
    keys = jax.random.split(jax.random.key(4), 8)
    whole = sample(jnp.asarray(logits), Sampling(1).distribution, keys)
    assert sample(jnp.asarray(logits + 128), Sampling(1).distribution, keys)[0].tolist() == whole[0].tolist()
    for row in (0, 5):
        alone = sample(jnp.asarray(logits[row : row + 1]), Sampling(1).distribution, keys[row : row + 1])
        assert int(alone[0][0]) == int(whole[0][row]) and float(alone[1][0]) == pytest.approx(
            float(whole[1][row]), abs=1e-6
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"num_generations": 0}, "num_generations must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], got 1.1"),
        ({"min_p": 1.1}, r"min_p must lie in \[0, 1\], got 1.1"),
        ({"temperature": float("nan")}, "temperature .* nan"),
        ({"top_p": float("nan")}, "top_p .* nan"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**{"max_new_tokens": 4, **changes})
