"""The whole update against PyTorch: transformers' Qwen2 with plain LoRA, the loss from the formulas, torch's AdamW; and
its invariants.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from helpers import assert_trees_equal, fp32_policy, noted_programs, randomized, with_norm_offsets
from oracles import torch_qwen2
from oracles.torch_updates import TorchUpdates
from updates import make_batch, make_config

from qerl_jax.checkpoint.adapter import map_layers
from qerl_jax.compilation import committed
from qerl_jax.config import Config
from qerl_jax.lowered import LoweredPrograms
from qerl_jax.parallel import Replicas
from qerl_jax.programs import calling, record
from qerl_jax.rl import optimizer
from qerl_jax.rl import state as rl_state
from qerl_jax.rl.adamw import learning_rate, make_optimizer
from qerl_jax.rl.metrics import add_sums, empty_sums, mean_metrics, over_updates, token_sums
from qerl_jax.rl.reduction import checksums, flat_parts, in_one_vector
from qerl_jax.rl.state import init_state, trained_trees
from qerl_jax.rl.step import grpo_step
from qerl_jax.types import Batch, Policy, TrainState

pytestmark = pytest.mark.usefixtures("kept_programs_forgotten")


@pytest.fixture(scope="module")
def micro(micro_dir) -> Policy:
    return randomized(fp32_policy(micro_dir, rank=2), 1, 0.3)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(64)


class TorchTrainer(TorchUpdates):
    """The update of adapters, and of layer norms, in float64 PyTorch."""

    def __init__(self, directory, policy: Policy, config: Config):
        self.config, self.scale = config, policy.lora_config.scale
        adapters = {}

        def collect(layer, part, lora):
            adapters[layer, part] = (np.asarray(lora.a).T, np.asarray(lora.b).T, lora.scale)

        map_layers(collect, policy.lora)
        self.base = torch_qwen2.load(directory).double()
        self.model = torch_qwen2.load(directory)
        torch_qwen2.attach_lora(self.model, adapters)
        self.model.double()
        for model in (self.base, self.model):
            self._set_norms(model, policy)
        self.parameters = {
            (i, part, kind): getattr(getattr(getattr(self.model.model.layers[i], torch_qwen2.PARENT[part]), part), kind)
            for i, part in adapters
            for kind in "ab"
        }
        if config.train_norms:
            for i, layer in enumerate(self.model.model.layers):
                for name in ("input_layernorm", "post_attention_layernorm"):
                    self.parameters[i, name, "w"] = getattr(layer, name).weight.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=config.learning_rate, betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon, weight_decay=config.weight_decay,
        )  # fmt: skip

    @staticmethod
    def _set_norms(model, policy):
        def put(layer, name, weight):
            getattr(model.model.layers[layer], name).weight.data = torch.tensor(np.asarray(weight)).double()

        map_layers(put, policy.norms)


def parameters(state: TrainState, config: Config) -> dict:
    found = {}

    def adapter(layer, part, lora):
        found[layer, part, "a"], found[layer, part, "b"] = np.asarray(lora.a).T, np.asarray(lora.b).T

    def norm(layer, name, weight):
        found[layer, name, "w"] = np.asarray(weight)

    map_layers(adapter, state.lora)
    if config.train_norms:
        map_layers(norm, state.norms)
    return found


ORACLE = {
    "everything-dapo": {
        "num_iterations": 3, "tokens_per_micro_batch": 128, "temperature": 0.7, "importance_sampling_cap": 1.5,
        "weight_decay": 0.1, "max_grad_norm": 0.05, "learning_rate": 3e-2, "delta": 1.4, "loss_type": "dapo",
    },
    "norms-and-kl": {
        "train_norms": True, "beta": 0.3, "loss_type": "grpo", "importance_sampling_level": "sequence",
        "num_iterations": 2, "update_memory_gb": 1e-9,
    },
    "kl-without-norms-dr_grpo": {"beta": 0.5, "loss_type": "dr_grpo"},
    "cispo-truncated": {
        "loss_type": "cispo", "epsilon_high": 1.1, "num_iterations": 2, "top_k": 24,
        "importance_sampling_mode": "token_mask", "importance_sampling_cap": 2.0, "importance_sampling_floor": 0.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ORACLE)
def test_two_steps_equal_pytorch(micro_dir, micro, case):
    """Two whole steps on different batches: losses, gradient norm and every trained parameter."""
    config = make_config(**ORACLE[case])
    policy = with_norm_offsets(micro, 2) if config.train_norms else micro
    torch_trainer = TorchTrainer(micro_dir, policy, config)
    state = init_state(policy, config)
    for step in range(2):
        scored = make_batch(64, seed=step)
        losses, norms = torch_trainer.step(scored)
        state, metrics = grpo_step(state, policy.frozen, scored)
        assert float(metrics["loss"]) == pytest.approx(np.mean(losses), abs=1e-5)
        if config.num_iterations == 1:
            assert float(metrics["grad_norm"]) == pytest.approx(norms[0], rel=1e-4)
        assert int(state.step) == step + 1 and float(metrics["skipped"]) == 0
    ours, before = parameters(state, config), parameters(init_state(policy, config), config)
    assert set(ours) == set(torch_trainer.parameters)
    for name, theirs in torch_trainer.parameters.items():
        theirs = theirs.detach().numpy()
        assert np.abs(theirs - before[name]).max() > 1e-4, name
        np.testing.assert_allclose(ours[name], theirs, atol=2e-5, err_msg=str(name))


def _same(first, second) -> None:
    for a, b in zip(jax.tree.leaves(first[0].lora), jax.tree.leaves(second[0].lora), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name in first[1]:
        np.testing.assert_allclose(first[1][name], second[1][name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_masked_rows_are_absent_ones_and_groups_have_no_order(micro):
    """Under dapo, whose mean is over tokens."""
    config = make_config(importance_sampling_cap=2.0, batch_size=6)
    state, four = init_state(micro, config), init_state(micro, dataclasses.replace(config, batch_size=4))
    six = make_batch(64, seed=5, rows=6)
    keep = np.array([0, 1, 4, 5])
    masked = six.replace(loss_mask=six.loss_mask.at[np.array([2, 3])].set(False))
    dropped = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[keep]), six)
    _same(grpo_step(state, micro.frozen, masked), grpo_step(four, micro.frozen, dropped))
    order = np.array([4, 5, 0, 1, 2, 3])
    shuffled = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)[order]), masked)
    _same(grpo_step(state, micro.frozen, masked), grpo_step(state, micro.frozen, shuffled))


@pytest.mark.parametrize(
    "changes", [{}, {"loss_type": "grpo", "beta": 0.3, "importance_sampling_level": "sequence"}], ids=["dapo", "kl"]
)
def test_a_batch_without_any_token_is_zero_and_no_nan(micro, batch, changes):
    config = make_config(**changes, importance_sampling_cap=2.0)
    state = init_state(micro, config)
    after, metrics = grpo_step(state, micro.frozen, batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask)))
    assert {float(metrics[name]) for name in ("loss", "grad_norm", "skipped", "tokens", "trained_tokens")} == {0.0}
    assert np.isnan(metrics["entropy"])  # of no token
    assert_trees_equal(after.lora, state.lora)


@pytest.mark.parametrize(("field", "value"), [("advantages", np.nan), ("logprobs", np.nan), ("logprobs", -np.inf)])
def test_an_update_that_is_not_finite_changes_nothing_and_is_counted(micro, batch, field, value):
    config = make_config(num_iterations=2, importance_sampling_cap=2.0)
    state, _ = grpo_step(init_state(micro, config), micro.frozen, batch)
    place = (0,) if field == "advantages" else (0, int(batch.prompt_lengths[0]))
    bad = batch.replace(**{field: getattr(batch, field).at[place].set(value)})
    after, metrics = grpo_step(state, micro.frozen, bad, drawn=11)
    if (field, value) == ("logprobs", -np.inf):  # an infinite importance weight, which the cap makes 2
        assert float(metrics["skipped"]) == 0
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.lora))
        return
    assert float(metrics["skipped"]) == 2
    for name in ("lora", "norms", "opt_state"):
        assert_trees_equal(getattr(after, name), getattr(state, name))
    assert [int(s.step) for s in (state, after)] == [1, 2]
    prompts = len(batch.tokens) // config.num_generations
    assert [int(s.cursor) for s in (state, after)] == [prompts, prompts + 11]
    again, metrics = grpo_step(after, micro.frozen, batch)
    assert float(metrics["skipped"]) == 0
    expected, _ = grpo_step(state, micro.frozen, batch)
    assert_trees_equal(again.lora, expected.lora)


def test_an_infinite_loss_is_skipped_though_its_gradient_is_finite(micro, batch):
    def infinite(logp, old_logp, behaviour_logp, reference_logp, advantages, mask):
        return logp + jnp.inf, {}

    state = init_state(micro, make_config())
    after, metrics = grpo_step(state, micro.frozen, batch, token_loss=infinite)
    assert np.isinf(metrics["loss"]) and 0 < float(metrics["grad_norm"]) < np.inf and float(metrics["skipped"]) == 1
    assert_trees_equal((after.lora, after.opt_state), (state.lora, state.opt_state))


@pytest.fixture(params=[1, 4], ids=["several_parts", "one_part"])
def together(request, monkeypatch) -> None:
    """Layers of a part of the optimizer's step, of a model of two layers."""
    monkeypatch.setattr(rl_state, "_TOGETHER", request.param)


def test_parts_have_four_layers_each_and_make_the_whole_again():
    """Under every name; what belongs to no layer is in each part."""
    tree = {"lora": {"layers": {i: {"a": 10 * i, "b": 10 * i + 1} for i in range(6)}}, "count": 7}
    parts = rl_state.in_parts(tree | {"norms": {"layers": {i: -i for i in range(6)}}}, 6)
    assert [part["norms"]["layers"] for part in parts] == [{0: 0, 1: -1, 2: -2, 3: -3}, {0: -4, 1: -5}]
    assert parts[1]["lora"]["layers"] == {0: {"a": 40, "b": 41}, 1: {"a": 50, "b": 51}} and parts[1]["count"] == 7
    assert rl_state.from_parts(parts) == tree | {"norms": {"layers": {i: -i for i in range(6)}}}


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("own", [None, optax.sgd(1e38)], ids=["adamw", "own"])
@pytest.mark.parametrize("largest", [1.0, 3e38])
def test_parameters_that_overflow_under_a_finite_gradient_are_not_applied(micro, own, largest):
    """A step of 1e38 on ones; where an adapter of layer 1 is 3e38, the sum exceeds fp32. Then nothing changes, in layer
    0 neither, moments included, and the update counts as skipped.
    """
    config = make_config(learning_rate=1e38, warmup_ratio=0.0, lr_scheduler_type="constant", max_grad_norm=1e4)
    lora = jax.tree.map(jnp.ones_like, micro.lora)
    lora["layers"][1] = jax.tree.map(lambda leaf: leaf.at[0, 0].set(largest), lora["layers"][1])
    state = init_state(micro.replace(lora=lora), config, own)
    gradients = [{"lora": jax.tree.map(lambda leaf: -jnp.ones_like(leaf), lora["layers"][i])} for i in (0, 1)]
    parts = optimizer.parts_of(gradients)
    after, metrics = optimizer.apply_gradients(state, parts, empty_sums(["loss", "tokens", "trained_tokens"]))
    assert np.isfinite(metrics["grad_norm"]) and float(metrics["skipped"]) == float(largest > 1)
    if largest > 1:
        assert_trees_equal((after.lora, after.opt_state), (state.lora, state.opt_state))
    else:
        assert all((leaf > 9e37).all() and np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.lora))


@pytest.mark.parametrize("first", [jnp.ones((), jnp.float32), jnp.ones(3, jnp.bfloat16)], ids=["scalar", "bf16"])
def test_an_optimizers_state_that_overflows_is_not_kept(micro, first):
    def grow(gradient, grown, params=None):
        return jax.tree.map(jnp.zeros_like, gradient), grown * jnp.asarray(jnp.inf, grown.dtype)

    state = init_state(micro, make_config(), optax.GradientTransformation(lambda params: first, grow))
    parts = optimizer.parts_of([{"lora": micro.lora["layers"][i]} for i in (0, 1)])
    after, metrics = optimizer.apply_gradients(state, parts, empty_sums(["loss", "tokens", "trained_tokens"]))
    assert float(metrics["skipped"]) == 1 and np.isfinite(metrics["grad_norm"])
    assert_trees_equal((after.lora, after.opt_state), (state.lora, state.opt_state))


def test_a_single_parameter_that_becomes_nan_is_not_applied(micro):
    """One entry of layer 1, of a shape that other adapters have as well."""
    own = optax.stateless(lambda gradient, params: jax.tree.map(lambda p: jnp.where(p == 7, jnp.nan, -p), params))
    lora = jax.tree.map(jnp.ones_like, micro.lora)
    lora["layers"][1]["mlp"] = jax.tree.map(lambda leaf: leaf.at[0, 0].set(7), lora["layers"][1]["mlp"])
    gradients = [{"lora": jax.tree.map(jnp.ones_like, lora["layers"][i])} for i in (0, 1)]
    for adapters, is_skipped in ((lora, True), (jax.tree.map(jnp.ones_like, lora), False)):
        state = init_state(micro.replace(lora=adapters), make_config(), own)
        parts = optimizer.parts_of(gradients)
        after, metrics = optimizer.apply_gradients(state, parts, empty_sums(["loss", "tokens", "trained_tokens"]))
        assert float(metrics["skipped"]) == is_skipped
        assert_trees_equal(after.lora, adapters if is_skipped else jax.tree.map(jnp.zeros_like, lora))


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("changes", [{}, {"train_norms": True}])
def test_the_optimizer_begins_as_optax_begins_over_the_whole_tree(micro, changes):
    """Committed to a device where what it trains is."""
    config = make_config(**changes)
    for placed in (micro, committed(micro)):
        state = init_state(placed, config)
        whole = make_optimizer(config).init(trained_trees(state.lora, state.norms, config))
        assert_trees_equal(state.opt_state, whole)
        assert {leaf.committed for leaf in jax.tree.leaves(state.opt_state)} == {placed is not micro}


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("own", [None, optax.sgd(0.1)], ids=["adamw", "own"])
def test_arrays_and_one_vector_make_the_step_of_optax_over_the_whole_tree(micro, own):
    state, rng = init_state(micro, make_config(max_grad_norm=0.5), own), np.random.default_rng(0)
    layers = [micro.lora["layers"][i] for i in (0, 1)]
    gradients = [{"lora": jax.tree.map(lambda leaf: jnp.float32(rng.normal(size=leaf.shape)), one)} for one in layers]
    parts, sums = optimizer.parts_of(gradients), empty_sums(["loss", "tokens", "trained_tokens"])
    vectors = flat_parts(parts, in_one_vector(Replicas(1, 2), parts, sums))
    assert_trees_equal([vector.tree() for vector in vectors], parts)
    whole, norm = {"lora": {"layers": {i: gradients[i]["lora"] for i in (0, 1)}}}, optax.tree.norm(gradients)
    clipped = jax.tree.map(lambda leaf: leaf * 0.5 / norm, whole)
    updates, opt_state = (own or make_optimizer(state.config)).update(clipped, state.opt_state, {"lora": state.lora})
    wanted = optax.apply_updates(state.lora, updates["lora"]), opt_state
    for each in (parts, vectors):
        after, metrics = optimizer.apply_gradients(state, each, sums)
        for a, b in zip(*map(jax.tree.leaves, ((after.lora, after.opt_state), wanted)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)


def test_the_optimizers_programs_are_kept_as_lowered(micro, tmp_path):
    """Those of the config's AdamW. Another one's functions have no name that says them."""
    gradients = [{"lora": micro.lora["layers"][i]} for i in (0, 1)]
    parts, sums = optimizer.parts_of(gradients), empty_sums(["loss", "tokens", "trained_tokens"])
    config = make_config(adam_epsilon=1.25e-8)  # of no other test: what was traced is not traced again
    for own, names in ((None, {"stays_finite", "apply"}), (optax.sgd(0.1), set())):
        kept = LoweredPrograms(tmp_path / str(len(names)), b"")
        record(optimizer.apply_gradients, init_state(micro, config, own), parts, sums, kept=kept)
        assert {file.name.split("-")[0] for file in kept.directory.glob("*")} & {"stays_finite", "apply"} == names


def test_the_next_state_is_made_once_all_layers_are_checked(micro, batch, monkeypatch):
    """The host waits for none of them: it waits once, for the whole step."""
    monkeypatch.setattr(rl_state, "_TOGETHER", 1)
    calls, waits, wait = [], [], jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: waits.append(len(calls)) or wait(tree))

    def call(program, arguments, more):
        result = program(*arguments, **more)
        if program.__name__ in ("add_squares", "stays_finite", "apply"):
            calls.append((program.__name__, arguments, result))
        return result

    with calling(call):
        grpo_step(init_state(micro, make_config()), micro.frozen, batch)
    assert [name for name, *_ in calls] == [*["add_squares"] * 2, *["stays_finite"] * 2, *["apply"] * 2]
    assert calls[1][1][-1] is calls[0][2]  # the sum over all layers
    assert waits == [6]
    checked = calls[3][2]  # the last layer's, which takes the result of the one before
    assert calls[3][1][-1] is calls[2][2] and all(arguments[-1] is checked for _, arguments, _ in calls[4:])


def test_gradients_are_made_before_any_activation(micro, batch):
    """Those of the layers, a part at a time, and both log-probabilities, once for all micro-batches; the last zero is
    the norm's.
    """
    calls = []
    with noted_programs(lambda name, *_: calls.append(name)):
        grpo_step(init_state(micro, make_config(tokens_per_micro_batch=16)), micro.frozen, batch)
    calls = [name for name in calls if name in ("zeros_like", "embed", "backward")]
    assert calls[:4] == ["zeros_like"] * 3 + ["embed"] and calls.count("embed") > 1
    assert calls.count("zeros_like") == 4 and calls.count("backward") == 2 * calls.count("embed")


class Noisy(NamedTuple):
    rng_key: jax.Array
    count: jax.Array


def noisy() -> optax.GradientTransformation:
    """`optax.add_noise` with one number for all parameters, which compiles in a tenth of the time."""

    def update(gradient, state, params=None):
        key, drawn = jax.random.split(state.rng_key)
        noise = jax.random.normal(drawn) / state.count
        return jax.tree.map(lambda leaf: leaf + noise, gradient), Noisy(key, state.count + 1)

    return optax.GradientTransformation(lambda params: Noisy(jax.random.key(3), jnp.int32(1)), update)


def test_an_optimizer_may_have_a_random_key_and_counts_in_its_state(micro, batch):
    """Its step is that of the key before it, and the key after it is kept. A dropped step changes neither."""
    own = optax.chain(noisy(), optax.sgd(0.1))
    config = make_config()
    state = init_state(micro, config, own)
    after, _ = grpo_step(state, micro.frozen, batch)
    still = init_state(micro, config, optax.sgd(0.1))
    without, _ = grpo_step(still, micro.frozen, batch)
    zeros = jax.tree.map(jnp.zeros_like, micro.lora)
    noise, expected = own.update({"lora": zeros}, state.opt_state, {"lora": micro.lora})
    assert after.opt_state[0].rng_key == expected[0].rng_key != state.opt_state[0].rng_key
    for ours, plain, added in zip(*map(jax.tree.leaves, (after.lora, without.lora, noise["lora"])), strict=True):
        np.testing.assert_allclose(ours - plain, added, atol=1e-6)
    bad = batch.replace(advantages=batch.advantages.at[0].set(np.nan))
    dropped, metrics = grpo_step(after, micro.frozen, bad)
    assert float(metrics["skipped"]) == 1 and int(dropped.opt_state[0].count) == int(after.opt_state[0].count) == 2
    assert dropped.opt_state[0].rng_key == after.opt_state[0].rng_key
    assert_trees_equal(dropped.lora, after.lora)
    assert checksums(after)[0] != checksums(after.replace(opt_state=state.opt_state))[0]  # a key has words, too


def test_an_optimizer_may_have_labels_in_place_of_layers(micro, batch):
    """`optax.multi_transform` takes one label for all that is below it."""
    labels = {"lora": {"layers": "a"}}
    own = optax.multi_transform({"a": optax.sgd(0.1)}, labels)
    after, _ = grpo_step(init_state(micro, make_config(), own), micro.frozen, batch)
    wanted, _ = grpo_step(init_state(micro, make_config(), optax.sgd(0.1)), micro.frozen, batch)
    assert_trees_equal(after.lora, wanted.lora)
    assert len(checksums(after)) == 1


def test_dropout_is_refused_with_the_reason(micro):
    policy = micro.replace(lora_config=dataclasses.replace(micro.lora_config, dropout=0.1))
    with pytest.raises(ValueError, match=r"lora_dropout 0\.1.*dropout mask"):
        init_state(policy, make_config())


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_learning_rate_in_closed_form(kind):
    """38 are 10 rollouts of 4 updates, a tenth warm-up: 0, ¼, ½, ¾ of the peak, then the decay over 36 to zero."""
    schedule = learning_rate(
        make_config(lr_scheduler_type=kind, warmup_ratio=0.1, max_steps=38, num_iterations=4, learning_rate=2.0)
    )
    for count in range(41):
        if count < 4:
            expected = 2 * count / 4
        else:
            u = (count - 4) / 36
            expected = {"cosine": 1 + math.cos(math.pi * u), "linear": 2 * (1 - u), "constant": 2.0}[kind]
        assert float(schedule(count)) == pytest.approx(expected, abs=1e-6), count


def test_metrics_of_micro_batches_and_updates_by_hand():
    """Two micro-batches, of two tokens and of one. Nothing outside of their masks counts, NaN included; clip ratios are
    over all six tokens in the loss.
    """
    masks = [[True, True, False]], [[False, True, False]]
    mismatch, importance = ([[-1, 2, 9]], [[9, 0.5, np.nan]]), ([[0.5, 2, np.nan]], [[0.1, 4, 9]])
    entropy, clipped = ([[1, 2, 9]], [[9, 6, 9]]), ([[1, 0, 1]], [[1, 1, 1]])
    own = []
    for mask, *arrays in zip(masks, mismatch, importance, entropy, clipped, strict=True):
        gap, ratio, spread, clip = (jnp.asarray(array, jnp.float32) for array in arrays)
        values = {"sampling/mismatch": gap, "sampling/importance": ratio, "clip_ratio/low_mean": clip}
        own.append(token_sums(jnp.float32(0.25), jnp.asarray(mask), spread, values))
    sums = empty_sums(own[0]) | {"tokens": jnp.float32(6)}
    found = mean_metrics(add_sums(add_sums(sums, own[0]), own[1]))
    gaps = np.array([-1, 2, 0.5])
    of_sampling = {
        "sampling_logp_difference/mean": 3.5 / 3,
        "sampling_logp_difference/max": 2,
        "kl": np.mean(np.exp(gaps) - 1 - gaps),
        "token_mult_prob_error": np.mean(np.exp(np.abs(gaps))),
        "importance_sampling_ratio/mean": 6.5 / 3,
        "importance_sampling_ratio/min": 0.5,
        "importance_sampling_ratio/max": 4,
    }
    wanted = {"loss": 0.5, "tokens": 6, "trained_tokens": 3, "entropy": 3, "clip_ratio/low_mean": 2 / 6}
    wanted |= {f"sampling/{name}": value for name, value in of_sampling.items()}
    assert found == pytest.approx(wanted, rel=1e-6)

    twice = over_updates([dict.fromkeys(("a/min", "a/max", "a", "skipped"), jnp.float32(i)) for i in (1, 4)])
    assert twice == {"a/min": 1, "a/max": 4, "a": 2.5, "skipped": 5}


def test_extremes_over_many_tokens_are_nan_where_one_of_them_is():
    """Of 8,192 numbers XLA's maximum and minimum on a CPU are not."""
    shape = 2, 4096
    gap = jnp.ones(shape).at[1, 4095].set(jnp.nan)
    values = {"sampling/mismatch": gap, "sampling/importance": gap}
    names = "sampling_logp_difference/max", "importance_sampling_ratio/min", "importance_sampling_ratio/max"
    for row, is_nan in ((1, True), (0, False)):
        mask = jnp.arange(2)[:, None] == jnp.full(shape, row)
        found = token_sums(jnp.float32(0), mask, jnp.zeros(shape), values)
        assert [bool(jnp.isnan(found[f"sampling/{name}"])) for name in names] == [is_nan] * 3
