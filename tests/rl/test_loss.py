"""Loss values and gradients against PyTorch from the formulas and against TRL."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from oracles import torch_grpo

from qerl_jax.config import Config
from qerl_jax.rl.loss import ClippedLoss, LossSettings, token_losses, token_weights

LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo", "cispo")
B, T = 5, 6


def make_settings(loss_type: str = "grpo", importance_sampling_level: str = "token", **changes) -> Config:
    """Of a loss without importance weights, unless `changes` say so."""
    own = {"max_completion_length": 9, "importance_sampling_cap": None} | changes
    return Config(loss_type=loss_type, importance_sampling_level=importance_sampling_level, **own)


@pytest.fixture(scope="module", autouse=True)
def strict_ranks():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module")
def case() -> dict[str, np.ndarray]:
    """Ratios from 0.3 to 3, of whole sequences, too, and advantages of both signs, so that every clip binds somewhere;
    a mask of different lengths with a hole, the last row without a token."""
    rng = np.random.default_rng(0)
    shift = np.array([-0.5, 0.6, 0.1, -0.6, 0.2], np.float32)[:, None]
    logp = -rng.gamma(2, 1, (B, T)).astype(np.float32)
    mask = np.arange(T) < np.array([6, 3, 1, 5, 0])[:, None]
    mask[3, 2] = False
    return {
        "logp": logp,
        "old": logp + shift + rng.normal(size=(B, T), scale=0.5).astype(np.float32),
        "behaviour": logp + rng.normal(size=(B, T), scale=0.8).astype(np.float32),
        "reference": logp + rng.normal(size=(B, T), scale=0.5).astype(np.float32),
        "advantages": np.array([1.3, -0.7, 0.4, -1.1, 0.9], np.float32),
        "mask": mask,
    }


def ours(case: dict[str, np.ndarray], settings: Config) -> tuple[float, np.ndarray, dict]:
    """Loss, its gradient in the log-probabilities, and the values to report."""
    mask = jnp.asarray(case["mask"])
    weights = token_weights(mask, settings.loss_type, settings.max_completion_length)
    arrays = {k: jnp.asarray(v) for k, v in case.items()}

    def total(logp):
        reference = arrays["reference"] if settings.beta else None
        losses, values = token_losses(
            logp, arrays["old"], arrays["behaviour"], reference, arrays["advantages"], mask, LossSettings.of(settings)
        )
        assert losses.shape == mask.shape and (jnp.where(mask, 0, losses) == 0).all()
        return jnp.sum(weights * losses), values

    (value, values), gradient = jax.value_and_grad(total, has_aux=True)(arrays["logp"])
    return float(value), np.asarray(gradient), values


def theirs(case, settings, function=torch_grpo.loss):
    tensors = {k: torch.tensor(v, dtype=torch.bool if k == "mask" else torch.float64) for k, v in case.items()}
    tensors["logp"].requires_grad_(True)
    result = function(**tensors, settings=settings)
    value, metrics = result if isinstance(result, tuple) else (result, None)
    value.backward()
    return value.item(), tensors["logp"].grad.numpy(), metrics


GRID = [
    make_settings(
        *choice[:2],
        epsilon_high=1.2 if choice[0] == "cispo" else 0.28,
        delta=choice[2],
        beta=choice[3],
        importance_sampling_cap=choice[4],
    )
    for choice in itertools.product(LOSSES, ("token", "sequence"), (None, 1.4), (0.0, 0.3), (None, 1.5))
    if not (choice[0] == "cispo" and choice[2])
]


@pytest.mark.parametrize("loss_type", LOSSES)
def test_values_gradients_and_metrics_equal_the_formulas_and_trl(case, loss_type):
    """`bnpo` and `dapo` differ in TRL by the batch they normalize over, which is one batch here."""
    for settings in (s for s in GRID if s.loss_type == loss_type):
        value, gradient, values = ours(case, settings)
        for oracle in (torch_grpo.loss, torch_grpo.trl_loss):
            expected, expected_gradient, metrics = theirs(case, settings, oracle)
            assert value == pytest.approx(expected, abs=1e-6), settings
            np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6, err_msg=str(settings))
        assert (gradient[~case["mask"]] == 0).all()
        tokens = case["mask"].sum()
        if settings.beta:
            assert float(values["kl"].sum() / tokens) == pytest.approx(metrics["kl"], abs=1e-6)
        if settings.importance_sampling_level == "token" and loss_type != "cispo":
            for side in ("low", "high"):
                ratio = float(values[f"clip_ratio/{side}_mean"].sum() / tokens)
                assert ratio == pytest.approx(metrics[f"clip_ratio/{side}_mean"], abs=1e-6)


def test_the_case_makes_every_setting_matter(case):
    """Each of the settings changes the loss, so that the comparison above can tell them apart; and every clip binds."""
    base = make_settings()
    values = [theirs(case, s)[0] for s in GRID]
    assert len({round(v, 6) for v in values}) == len([s for s in GRID if s.loss_type != "bnpo"])  # bnpo is dapo
    for changes in (
        {"epsilon": 0.05}, {"epsilon_high": 0.05}, {"delta": 1.4}, {"beta": 0.3}, {"importance_sampling_cap": 1.5},
    ):  # fmt: skip
        assert abs(ours(case, dataclasses.replace(base, **changes))[0] - ours(case, base)[0]) > 1e-4, changes
    flags = ours(case, base)[2]
    assert flags["clip_ratio/low_mean"].sum() > 0 and flags["clip_ratio/high_mean"].sum() > 0


def test_clips_are_counted_at_their_own_bounds():
    """Bounds 0.8 and 1.28: the first ratio is clipped under a negative advantage, the last under a positive one."""
    logp = jnp.log(jnp.asarray([[0.75, 0.85, 1.25, 1.3]] * 2, jnp.float32))
    old, mask = jnp.zeros_like(logp), jnp.ones(logp.shape, bool)
    _, flags = ClippedLoss(0.2, 0.28, None, "token")(logp, old, old, None, jnp.asarray([-1.0, 1.0]), mask)
    assert flags["clip_ratio/low_mean"].tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert flags["clip_ratio/high_mean"].tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("changes", [{"epsilon": 0.0}, {"epsilon_high": 0.0}, {"epsilon": 0.0, "epsilon_high": 0.0}])
def test_a_ratio_at_the_bound_of_its_clip_has_its_whole_gradient(case, changes):
    """Every ratio of a rollout's first update is 1, which no clip changes, ε = 0 included."""
    first = {**case, "old": case["logp"]}
    settings = make_settings(**changes)
    _, gradient, _ = ours(first, settings)
    for expected in (theirs(first, settings, torch_grpo.trl_loss), ours(first, make_settings())):
        np.testing.assert_allclose(gradient, expected[1], atol=1e-7)
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("loss_type", LOSSES)
def test_token_weights_by_hand(loss_type):
    mask = jnp.asarray([[True, True, False, True], [False, False, True, False], [False] * 4])
    weights = np.asarray(token_weights(mask, loss_type, 10))
    expected = {
        "grpo": [1 / 9, 1 / 9, 0, 1 / 9, 0, 0, 1 / 3, 0],
        "dr_grpo": [1 / 30, 1 / 30, 0, 1 / 30, 0, 0, 1 / 30, 0],
    }.get(loss_type, [1 / 4, 1 / 4, 0, 1 / 4, 0, 0, 1 / 4, 0])
    np.testing.assert_allclose(weights.reshape(-1), [*expected, 0, 0, 0, 0], rtol=1e-6)
    empty = token_weights(jnp.zeros((2, 3), bool), loss_type, 10)
    assert (np.asarray(empty) == 0).all()


def test_the_upper_clip_is_that_of_the_loss():
    """TRL's help on `epsilon_high` recommends 0.28 for the clip, and another value for the cap of `cispo`."""
    from trl import GRPOConfig

    text = GRPOConfig.__dataclass_fields__["epsilon_high"].metadata["help"]
    of_clip, of_cap = map(float, re.findall(r"`([0-9.]+)`", text))
    for loss_type in LOSSES:
        assert Config(loss_type=loss_type).upper_clip == (of_cap if loss_type == "cispo" else of_clip)
        assert Config(loss_type=loss_type, epsilon_high=1.5).upper_clip == 1.5


@pytest.mark.parametrize(
    "settings",
    [make_settings(t, "sequence", beta=0.3) for t in LOSSES] + [make_settings()],
    ids=lambda settings: f"{settings.loss_type}-{settings.importance_sampling_level}",
)
def test_a_masked_row_counts_in_the_mean_over_rows_alone(case, settings):
    """Garbage, infinities and NaN behind the mask change nothing; a masked row is an absent one but for the number of
    rows that `grpo` and `dr_grpo` divide by."""
    masked = {k: v.copy() for k, v in case.items()}
    masked["mask"][1] = False
    dropped = {k: np.delete(v, 1, axis=0) for k, v in case.items()}
    value, gradient, _ = ours(dropped, settings)
    share = (B - 1) / B if settings.loss_type in ("grpo", "dr_grpo") else 1
    for garbage in (3.0, -1e30, np.nan):
        for name in ("logp", "old", "behaviour", "reference"):
            masked[name][~masked["mask"]] = garbage
        got, got_gradient, values = ours(masked, settings)
        assert got == pytest.approx(share * value, abs=1e-6)
        np.testing.assert_allclose(np.delete(got_gradient, 1, axis=0), share * gradient, atol=1e-6)
        assert (got_gradient[1] == 0).all()
        assert all(np.isfinite(v).all() for v in jax.tree.leaves(values))


@pytest.mark.parametrize("loss_type", LOSSES)
def test_first_update_gradient_is_reinforce(case, loss_type):
    """At ratio 1 nothing clips, so every variant's gradient is -weight · A; CISPO's cap above 1 never binds."""
    on_policy = {**case, "old": case["logp"]}
    settings = make_settings(loss_type, epsilon_high=3.0 if loss_type == "cispo" else 0.28)
    _, gradient, _ = ours(on_policy, settings)
    weights = np.asarray(token_weights(jnp.asarray(case["mask"]), loss_type, 9))
    np.testing.assert_allclose(gradient, -weights * case["advantages"][:, None], atol=1e-6)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("floor", [None, 0.8])
def test_the_importance_weights_are_trls(case, mode, floor):
    """Against TRL's own lines, and formulas; ratios lie below, between and above the bounds, of tokens and sequences.
    The KL penalty is not weighted."""
    settings = make_settings(
        beta=0.3, importance_sampling_mode=mode, importance_sampling_cap=1.5, importance_sampling_floor=floor
    )
    mismatch = np.where(case["mask"], case["old"] - case["behaviour"], 0)
    ratio = np.exp(mismatch if mode.startswith("token") else mismatch.sum(1, keepdims=True))
    assert (ratio < 0.8).any() and (ratio > 1.5).any() and ((ratio > 0.8) & (ratio < 1.5)).any()
    value, gradient, values = ours(case, settings)
    for oracle in (torch_grpo.loss, torch_grpo.trl_loss):
        expected, expected_gradient, _ = theirs(case, settings, oracle)
        assert value == pytest.approx(expected, abs=1e-6)
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    reported = np.asarray(values["sampling/importance"])[case["mask"]]
    np.testing.assert_allclose(reported, np.broadcast_to(ratio, case["mask"].shape)[case["mask"]], rtol=1e-5)


@pytest.mark.parametrize(("cap", "floor"), [(1.0, None), (1.5, 1.0)])
def test_an_importance_ratio_at_a_bound_is_kept(case, cap, floor):
    """As by TRL's own lines: 1 is that of a sampler which agrees with the trainer to the bit."""
    equal = case | {"behaviour": case["old"]}
    bounds = {"importance_sampling_cap": cap, "importance_sampling_floor": floor}
    settings = make_settings(importance_sampling_mode="token_mask", **bounds)
    value, gradient, _ = ours(equal, settings)
    expected, expected_gradient, _ = theirs(equal, settings, torch_grpo.trl_loss)
    assert value == pytest.approx(expected, abs=1e-6) and np.abs(gradient).max() > 0.01
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)


def loss_of_my_own(logp, old_logp, behaviour_logp, reference_logp, advantages, mask):
    """Reads everything, so that a wrong order shows."""
    losses = -advantages[:, None] * jnp.exp(logp - old_logp) + 0.1 * behaviour_logp * logp + 0.2 * reference_logp * logp
    return jnp.where(mask, losses, jnp.nan), {"mine": logp - old_logp, "mine/max": logp}


def test_a_loss_of_ones_own_is_weighted_and_penalized_like_the_others(case):
    settings = make_settings("grpo", beta=0.3, importance_sampling_cap=1.5)
    mask, (reference, behaviour) = case["mask"], (case["reference"], case["behaviour"])
    arrays = {k: jnp.asarray(v) for k, v in case.items()}

    def total(logp):
        others = arrays["old"], arrays["behaviour"], arrays["reference"], arrays["advantages"], arrays["mask"]
        losses, values = token_losses(logp, *others, LossSettings.of(settings, loss_of_my_own))
        return losses.sum(), values

    (value, values), gradient = jax.value_and_grad(total, has_aux=True)(arrays["logp"])
    x, old = case["logp"].astype(np.float64), case["old"]
    ratio, advantages = np.exp(x - old), case["advantages"][:, None]
    weight = np.minimum(np.exp(old - behaviour), 1.5)
    d = reference - x
    losses = weight * (-advantages * ratio + 0.1 * behaviour * x + 0.2 * reference * x) + 0.3 * (np.exp(d) - d - 1)
    slopes = weight * (-advantages * ratio + 0.1 * behaviour + 0.2 * reference) + 0.3 * (1 - np.exp(d))
    assert float(value) == pytest.approx(losses[mask].sum(), rel=1e-5)
    np.testing.assert_allclose(gradient, np.where(mask, slopes, 0), atol=1e-5)
    np.testing.assert_allclose(values["mine"], np.where(mask, x - old, 0), atol=1e-6)
    others = (arrays[name] for name in ("logp", "old", "behaviour", "reference", "advantages", "mask"))
    _, values = token_losses(*others, LossSettings.of(make_settings("grpo", beta=0.0), loss_of_my_own))
    assert "mine" in values and "kl" not in values  # it reads the reference, nothing is penalized


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda logp: (logp.sum(1), {}), r"losses of shape \(5,\), expected \(5, 6\)"),
        (lambda logp: (logp, {"mine": logp.sum()}), r"mine of shape \(\), expected \(5, 6\)"),
        (lambda logp: (logp, {"entropy": logp}), "metric 'entropy', which grpo_step reports itself"),
        (lambda logp: (logp, {"sampling/kl": logp}), "metric 'sampling/kl'"),
    ],
)
def test_results_of_a_loss_that_are_not_one_a_token_are_refused(case, returned, words):
    arrays = [jnp.asarray(case[name]) for name in ("logp", "old", "behaviour", "reference", "advantages", "mask")]
    with pytest.raises(ValueError, match=words):
        token_losses(*arrays, LossSettings.of(make_settings(), lambda logp, *_: returned(logp)))


def test_a_loss_without_a_hash_is_named():
    """A dataclass that is not frozen has none."""
    own = dataclasses.make_dataclass("Own", [("tau", float, 1.0)], namespace={"__call__": lambda *arrays: arrays})
    with pytest.raises(ValueError, match=r"token_loss Own\(tau=1.0\) has no hash, .* frozen dataclass"):
        LossSettings.of(make_settings(), own())
