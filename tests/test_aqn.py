"""AQN: schedules in closed form at every stage border, and the noise itself."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, fp32_policy, logits_of, with_norm_offsets

from qerl_jax import aqn
from qerl_jax.checkpoint.adapter import map_layers
from qerl_jax.config import Config, ConfigError

KEY = jax.random.key(5)


@dataclasses.dataclass(frozen=True)
class Noise:
    num_iterations: int = 1
    sigma_start: float = 1e-2
    sigma_end: float = 5e-4
    num_stages: int = 10
    noise_schedule: str = "exponential"
    noise_formula: str = "qerl"


def closed_form(config: Noise, stage: int) -> float:
    """σ of a stage, from the text of the paper's eq. 11 and of the released code."""
    if stage == 0:
        return 0.0
    s, e, k = config.sigma_start, config.sigma_end, config.num_stages
    u = (stage - 1) / (k - 2) if config.noise_formula == "qerl" else (stage - 1) / (k - 1)
    return {
        "exponential": s * (e / s) ** u,
        "linear": s - (s - e) * u,
        "cosine": e + (s - e) * (1 + math.cos(math.pi * u)) / 2,
        "logarithmic": s - (s - e) * math.log(1 + u * (math.e - 1)),
    }[config.noise_schedule]


@pytest.mark.parametrize("formula", ["qerl", "paper"])
@pytest.mark.parametrize("schedule", ["exponential", "linear", "cosine", "logarithmic"])
def test_every_step_has_its_stages_sigma(formula, schedule):
    """Stage k starts at the first step with (step + 1) · K >= k · M, in integers; the last one lasts to the end."""
    for steps, stages in ((200, 10), (97, 10), (7, 10), (30, 3), (11, 4), (1, 5)):
        config = Noise(noise_schedule=schedule, noise_formula=formula, num_stages=stages)
        borders = [0, *(-(-k * steps // stages) - 1 for k in range(1, stages)), steps]
        for stage in range(stages):
            wanted = pytest.approx(closed_form(config, stage), rel=1e-12, abs=0)
            for step in range(borders[stage], borders[stage + 1]):
                assert aqn.sigma(config, step, steps) == wanted, (steps, stages, step)


def test_a_run_without_a_stage_without_noise_is_told():
    for steps, updates, stages in itertools.product((1, 3, 4, 10, 11), (1, 2), (3, 4, 10)):
        config = Noise(num_iterations=updates, num_stages=stages)
        note, first = aqn.note(config, steps), aqn.sigma(config, 0, steps)
        assert (note is None) == (first == 0)
        assert note is None or f"{steps * updates} updates are no more than num_stages {stages}:" in note
        assert note is None or f"has sigma {first:.4g};" in note
        assert aqn.note(dataclasses.replace(config, sigma_start=0.0, sigma_end=0.0), steps) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_stages": 2}, "num_stages 2 .* 'qerl'.* 3"),
        ({"num_stages": 1, "noise_formula": "paper"}, "num_stages 1 .* 'paper'.* 2"),
        ({"sigma_end": 0.0}, r"exponential .* 0\.0"),
        ({"sigma_start": -1.0}, r"sigma_start .* -1\.0"),
        ({"sigma_start": 0.0}, r"sigma_start 0 with sigma_end 0\.0005"),
        ({"noise_schedule": "step"}, "'step'"),
        ({"noise_formula": "mine"}, "'mine'"),
        ({"sigma_start": float("nan")}, "nan"),
        ({"sigma_end": float("inf")}, "inf"),
    ],
)
def test_schedules_that_cannot_be(change, message):
    with pytest.raises(ConfigError, match=message):
        Config(**{"sigma_start": 1e-2, "sigma_end": 5e-4} | change)


@pytest.mark.parametrize("step", [-1, 10, 11])
def test_steps_outside_the_run(step):
    with pytest.raises(ValueError, match=f"step {step} lies outside a run of 10 steps"):
        aqn.sigma(Noise(), step, 10)


def test_no_noise_at_all():
    assert aqn.sigma(Noise(sigma_start=0.0, sigma_end=0.0, num_stages=2), 9, 10) == 0.0


@pytest.fixture(scope="module")
def policy(micro_dir):
    return with_norm_offsets(fp32_policy(micro_dir), 1)


def test_the_norms_perturbed_are_two_a_layer_and_none_without_noise(policy):
    counts = [aqn.count_perturbed(policy.norms, aqn.perturb(policy.norms, sigma, KEY)) for sigma in (0.0, 1e-6)]
    assert counts == [0, 2 * 2]
    only_one = jax.tree.map(lambda w: w, policy.norms)
    only_one["layers"][1]["input_layernorm"]["weight"] += 1
    assert aqn.count_perturbed(policy.norms, only_one) == 1


def test_sigma_zero_is_the_same_bits(policy):
    assert_trees_equal(aqn.perturb(policy.norms, 0.0, KEY), policy.norms)
    assert_trees_equal(jax.jit(aqn.perturb)(policy.norms, jnp.float32(0), KEY), policy.norms)


def test_noise_is_normal_with_the_deviation_asked_for():
    """64 norms of 4096, whatever their weights: mean and deviation within five standard errors, skewness and kurtosis
    those of a normal."""
    norms = {"layers": {i: {n: {"weight": jnp.full(4096, weight)} for n, weight in zip("ab", (0.25, 2.0), strict=True)}
                        for i in range(32)}}  # fmt: skip
    pairs = zip(*map(jax.tree.leaves, (aqn.perturb(norms, 0.01, KEY), norms)), strict=True)
    noise = np.concatenate([np.asarray(noisy - clean, np.float64) for noisy, clean in pairs])
    n = noise.size
    z = noise / 0.01
    assert abs(z.mean()) < 5 / n**0.5 and abs(z.std() - 1) < 5 / (2 * n) ** 0.5
    assert abs((z**3).mean()) < 5 * (15 / n) ** 0.5 and abs((z**4).mean() - 3) < 5 * (96 / n) ** 0.5


def test_every_norm_and_key_has_noise_of_its_own(policy):
    first, second = (aqn.perturb(policy.norms, 0.1, jax.random.fold_in(KEY, i)) for i in range(2))
    noises = [
        np.asarray(a - b)
        for noisy in (first, second)
        for a, b in zip(*map(jax.tree.leaves, (noisy, policy.norms)), strict=True)
    ]
    for i, a in enumerate(noises):
        for b in noises[:i]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.8 and np.abs(a - b).max() > 0.01
    assert_trees_equal(aqn.perturb(policy.norms, 0.1, jax.random.fold_in(KEY, 0)), first)
    for i, weight in enumerate(jax.tree.leaves(policy.norms)):  # the draws that earlier versions made, too
        drawn = jax.random.normal(jax.random.fold_in(jax.random.fold_in(KEY, 0), i), weight.shape)
        np.testing.assert_allclose(noises[i], 0.1 * drawn, atol=1e-6)


def test_norms_of_several_widths_have_the_draws_of_their_own_places():
    norms = [jnp.full(width, 2.0) for width in (3, 5, 3, 5)]
    for i, (noisy, clean) in enumerate(zip(aqn.perturb(norms, 0.1, KEY), norms, strict=True)):
        drawn = jax.random.normal(jax.random.fold_in(KEY, i), clean.shape)
        np.testing.assert_allclose(noisy, clean + 0.1 * drawn, atol=1e-6)


def test_weights_that_are_not_fp32_are_refused(policy):
    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16), policy.norms)
    with pytest.raises(ValueError, match="bfloat16"):
        aqn.perturb(rounded, 0.1, KEY)


def test_noise_equals_scaled_columns_of_the_weights_behind_the_norm(policy):
    """Paper eq. 12: (w + Z) ⊙ x̂ through W is w ⊙ x̂ through W with column j scaled by 1 + Z_j / w_j: of q, k, v behind
    the input norm, of gate and up behind the other; of no other weight.
    """
    noisy = aqn.perturb(policy.norms, 0.05, KEY)
    factors = {}
    map_layers(
        lambda layer, name, w: factors.setdefault((layer, name), w),
        jax.tree.map(lambda a, b: a / b, noisy, policy.norms),
    )
    scaled = jax.tree.map(lambda leaf: leaf, policy.frozen)
    for layer in range(2):
        for block, fused, norm in (
            ("self_attn", "qkv_proj", "input_layernorm"),
            ("mlp", "gate_up_proj", "post_attention_layernorm"),
        ):
            place = scaled["layers"][layer][block][fused]
            place["weight"] = dataclasses.replace(
                place["weight"], values=place["weight"].values * factors[layer, norm][None, :]
            )
    tokens = np.random.default_rng(0).integers(0, 64, (2, 9))
    got = np.asarray(logits_of(policy.replace(norms=noisy), tokens))
    expected = np.asarray(logits_of(policy.replace(frozen=scaled), tokens))
    np.testing.assert_allclose(got, expected, atol=2e-4)
    assert np.abs(got - np.asarray(logits_of(policy, tokens))).max() > 0.05
