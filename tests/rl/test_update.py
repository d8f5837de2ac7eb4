"""The packed update against the plain one on padded rows, and what it compiles."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal, fp32_policy, logprobs_of, randomized, with_norm_offsets
from oracles.plain_step import plain_grpo_step
from timing import compile_calls
from updates import COMPLETION, LENGTH, PROMPT, make_batch, make_config

from qerl_jax.checkpoint.hf_config import parse_config
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.compilation import CompilationCounter
from qerl_jax.config import Config
from qerl_jax.models.linear import XlaMatmuls
from qerl_jax.models.lora import without_adapter
from qerl_jax.programs import calling, record, shapes_of
from qerl_jax.rl import plan as update_plan
from qerl_jax.rl.activations import layer_bytes, peak_bytes
from qerl_jax.rl.checks import checked
from qerl_jax.rl.head import inputs_of
from qerl_jax.rl.micro_batches import PackShape, assign
from qerl_jax.rl.plan import UpdatePlan, _Limits, _micro_batches, _pack, choose_plan, make_update_plan
from qerl_jax.rl.state import init_state
from qerl_jax.rl.step import assigned, grpo_step
from qerl_jax.types import Batch, Policy, TrainState

ROWS = 24


@pytest.fixture(scope="module")
def micro(micro_dir) -> Policy:
    return with_norm_offsets(randomized(fp32_policy(micro_dir, rank=2), 1, 0.3), 2)


def awkward_batch(seed: int = 0) -> Batch:
    """24 sequences: prompts and completions of one token, completions that end at the limit, an empty one, one whose
    tokens are all masked, one whose first token is, one of the longest prompt and completion; three groups of a common
    prompt.
    """
    batch = make_batch(64, seed, ROWS)
    tokens, prompts, lengths = np.array(batch.tokens), np.array(batch.prompt_lengths), np.array(batch.lengths)
    for first, count in ((6, 2), (8, 5), (14, 8)):
        group = slice(first, first + count)
        lengths[group] += prompts[first] - prompts[group]
        prompts[group] = prompts[first]
        tokens[group, : prompts[first]] = tokens[first, : prompts[first]]
    prompts[0], lengths[0] = 1, 2
    lengths[1] = prompts[1] + COMPLETION
    lengths[2] = prompts[2]
    prompts[3], lengths[3] = PROMPT, LENGTH
    lengths[4] = prompts[4] + 1
    lengths[9] = prompts[9] + COMPLETION
    columns = np.arange(LENGTH)
    mask = (columns >= prompts[:, None]) & (columns < lengths[:, None])
    mask[5] = False
    mask[9, prompts[9]] = False
    logprobs = np.where(mask, np.minimum(batch.logprobs, -0.1), 0)
    return batch.replace(
        tokens=jnp.asarray(tokens), prompt_lengths=jnp.asarray(prompts), lengths=jnp.asarray(lengths),
        loss_mask=jnp.asarray(mask), logprobs=jnp.asarray(logprobs),
    )  # fmt: skip


SGD = optax.sgd(1.0)


def several(**changes) -> Config:
    """In several micro-batches, of one shape in this file: what one test compiles, the others find."""
    return make_config(**{"batch_size": ROWS, "tokens_per_micro_batch": 128, **changes})


def descent(policy: Policy, config) -> TrainState:
    """A state whose update is the gradient itself."""
    return init_state(policy, config, SGD)


def close(found: tuple, wanted: tuple, tolerance: float = 1e-5) -> None:
    """Trained trees and metrics of two updates; gradients relative to the largest entry of each."""
    for name in ("lora", "norms"):
        trees = (jax.tree.leaves(getattr(state, name)) for state, _ in (found, wanted))
        for a, b in zip(*trees, strict=True):
            np.testing.assert_allclose(a, b, atol=tolerance * max(1, np.abs(b).max()), err_msg=name)
    assert set(found[1]) == set(wanted[1])
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=10 * tolerance, atol=tolerance, err_msg=name)


SEQUENCE = {"loss_type": "grpo", "beta": 0.2, "train_norms": True, "importance_sampling_level": "sequence"}
CASES = {
    "dapo": {},
    "grpo-kl-norms-sequence": SEQUENCE,
    "cispo-truncated": {"loss_type": "cispo", "epsilon_high": 1.1, "top_k": 9, "temperature": 0.8},
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if CASES[name] is SEQUENCE else pytest.mark.nightly) for name in CASES]
)
def test_loss_and_gradient_are_those_of_the_padded_rows(micro, case):
    """In one and in any other number of micro-batches the update is the same (below)."""
    config = several(importance_sampling_cap=2.0, **CASES[case])
    state, batch = descent(micro, config), awkward_batch()
    close(grpo_step(state, micro.frozen, batch), plain_grpo_step(state, micro.frozen, batch))


def entropy_and_more(logp, old_logp, behaviour_logp, reference_logp, advantages, mask, *, entropy):
    """A loss that reads every argument, and the entropy with and without the log-probability."""
    losses = -advantages[:, None] * jnp.exp(logp - old_logp) - 0.3 * entropy + 0.1 * entropy * logp
    losses += 0.05 * jnp.where(mask, reference_logp - logp, 0) ** 2 + 0.01 * behaviour_logp * logp
    return losses, {"mine": entropy - logp, "importance": entropy, "mismatch": 2 * entropy}


def test_a_loss_of_ones_own_with_entropy_has_the_gradient_of_the_padded_rows(micro):
    """Truncated sampling, against autodiff through log-probabilities and entropy of all rows."""
    config = several(importance_sampling_cap=2.0, beta=0.1, top_k=9, temperature=0.8)
    state, batch = descent(micro, config), awkward_batch()
    wanted = plain_grpo_step(state, micro.frozen, batch, entropy_and_more)
    found = grpo_step(state, micro.frozen, batch, token_loss=entropy_and_more)
    close(found, wanted)
    assert float(found[1]["mine"]) > float(found[1]["entropy"]) > 0 and "clip_ratio/low_mean" not in found[1]
    own = float(found[1]["importance"]), float(found[1]["mismatch"]) / 2
    assert own == pytest.approx([float(found[1]["entropy"])] * 2), "names that the weight's own metrics do not take"


def test_the_reference_can_be_asked_for_without_a_penalty(micro):
    """The loss is then the mean of the reference's log-probabilities: those of the policy with B = 0."""

    def reference_alone(logp, old_logp, behaviour_logp, reference_logp, advantages, mask):
        return reference_logp + 0 * logp, {}

    state, batch = descent(micro, several()), awkward_batch()
    _, metrics = grpo_step(state, micro.frozen, batch, token_loss=reference_alone, with_reference=True)
    base = micro.replace(lora=without_adapter(micro.lora))
    logp = jnp.pad(logprobs_of(base, batch.tokens, batch.attention_mask), ((0, 0), (1, 0)))
    assert float(metrics["loss"]) == pytest.approx(float(logp[batch.loss_mask].mean()), abs=1e-5)
    assert "kl" not in metrics


def test_an_optimizer_of_ones_own_is_plain_optax_on_the_whole_tree(micro):
    """Two steps with statistics of all layers together; the gradients are differences of steps of plain descent."""
    config = several(train_norms=True)
    optimizer = optax.chain(optax.scale_by_adam(), optax.normalize_by_update_norm(), optax.scale(-0.1))
    batch = awkward_batch()
    state = init_state(micro, config, optimizer)
    params = {"lora": micro.lora, "norms": micro.norms}

    @jax.jit
    def plain(params, opt_state, after):
        gradient = jax.tree.map(jnp.subtract, params, after)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = optimizer.init(params)
    for _ in range(2):
        policy = micro.replace(**params)
        after, _ = grpo_step(descent(policy, config), policy.frozen, batch)
        params, opt_state = plain(params, opt_state, {"lora": after.lora, "norms": after.norms})
        state, metrics = grpo_step(state, micro.frozen, batch)
        assert float(metrics["skipped"]) == 0
    found, start = {"lora": state.lora, "norms": state.norms}, {"lora": micro.lora, "norms": micro.norms}
    for ours, wanted, first in zip(*map(jax.tree.leaves, (found, params, start)), strict=True):
        assert np.abs(wanted - first).max() > 1e-3
        # A sign of a gradient that is nearly 0 may differ: few do.
        assert np.mean(np.abs(ours - wanted) > 1e-4) < 0.01


def test_a_new_state_of_the_same_shapes_compiles_nothing(micro_dir):
    """Policy, config, state, batch, all made anew, the config with other values where they are no part of a program;
    also with a loss of one's own. Equal tree structures are what a jitted function looks its programs up by."""
    structures = []

    def own(logp, old_logp, behaviour_logp, reference_logp, advantages, mask):
        return -logp * advantages[:, None], {}

    def steps(**changes) -> None:
        config = several(beta=0.1, **changes)
        policy = fp32_policy(micro_dir, rank=2)
        for loss in (None, own):
            state = init_state(policy, config)
            grpo_step(state, policy.frozen, awkward_batch(), token_loss=loss)
        structures.append(jax.tree.structure(state))

    with CompilationCounter() as counter:
        steps()
        assert "jit(head_loss)" in counter.take()
        steps()
        steps(output_dir="elsewhere", seed=3, save_steps=7)
        assert counter.take() == []
    assert structures[0] == structures[1] and hash(structures[0]) == hash(structures[1])


def unchecked(batch: Batch, **changes) -> Batch:
    """`batch.replace` past the annotations that the tests check."""
    changed = object.__new__(Batch)
    for field in dataclasses.fields(Batch):
        object.__setattr__(changed, field.name, changes.get(field.name, getattr(batch, field.name)))
    return changed


def test_what_config_policy_and_batch_disagree_on_is_an_error_with_both_values(micro):
    config, batch = make_config(batch_size=ROWS, importance_sampling_cap=2.0), awkward_batch()
    adapters = [
        ({"lora_rank": 8}, "rank 2, the config has lora_rank 8"),
        ({"lora_alpha": 6.0}, r"scale 1, .* give 3$"),
        ({"use_rslora": True}, r"scale 1, .* give 1\.41421$"),
        ({"lora_target_modules": ("q_proj",)}, r"'v_proj'\], the config's lora_target_modules are \['q_proj'\]"),
    ]
    for changes, words in adapters:
        with pytest.raises(ValueError, match=words):
            init_state(micro, dataclasses.replace(config, **changes))
    fewer = dataclasses.replace(micro.lora_config, target_modules=("q_proj",))
    with pytest.raises(ValueError, match=r"are on \['q_proj'\], the config's .* 'up_proj', 'v_proj'\]"):
        init_state(micro.replace(lora_config=fewer), config)
    longest = int((batch.lengths - batch.prompt_lengths).max())
    batches = [
        ({"batch_size": 48}, r"not one of batch_size 48 .*has shape \(24, \d+\) but expected \(48, \d+\)"),
        ({"num_generations": 4}, "2 completions of prompt 0, the config has num_generations 4"),
        ({"max_completion_length": 3}, f"has {longest} tokens, the config has max_completion_length 3"),
    ]
    for changes, words in batches:
        with pytest.raises(ValueError, match=words):
            grpo_step(init_state(micro, dataclasses.replace(config, **changes)), micro.frozen, batch)
    for other in ({"advantages": jnp.zeros(4)}, {"finish": jnp.zeros(4, jnp.int8)}):
        with pytest.raises(ValueError, match=r"not one of batch_size 24 .*has shape \(4,\) but expected \(24\)"):
            grpo_step(init_state(micro, config), micro.frozen, unchecked(batch, **other))
    with pytest.raises(ValueError, match=r"not one of batch_size 24 .*has shape \(24, 1\) but expected"):
        grpo_step(init_state(micro, config), micro.frozen, unchecked(batch, loss_mask=batch.loss_mask[:, :1]))
    for column in (int(batch.prompt_lengths[7]) - 1, int(batch.lengths[7])):
        other = batch.replace(loss_mask=batch.loss_mask.at[7, column].set(True))
        words = f"column {column} of row 7, .* columns {batch.prompt_lengths[7]} to {batch.lengths[7]} "
        with pytest.raises(ValueError, match=words):
            grpo_step(init_state(micro, config), micro.frozen, other)


@pytest.mark.parametrize("missing", ["none", "nan", "zeros"])
def test_a_batch_without_behaviour_logprobs_is_refused_or_trained_without_a_weight(micro, missing):
    """With the weight it would count for a tenth and less, or be skipped. Without it the update is that of a batch that
    has them, and the metrics of the mismatch say that there are none."""
    config, batch = several(), awkward_batch()
    absent = {"none": None, "nan": jnp.full_like(batch.logprobs, jnp.nan), "zeros": jnp.zeros_like(batch.logprobs)}
    bare = unchecked(batch, logprobs=absent[missing])
    weighted = dataclasses.replace(config, importance_sampling_cap=2.0)
    with pytest.raises(ValueError, match=r"importance_sampling_cap 2\.0 weighs by them"):
        grpo_step(init_state(micro, weighted), micro.frozen, bare)
    found, metrics = grpo_step(init_state(micro, config), micro.frozen, bare)
    wanted, usual = grpo_step(init_state(micro, config), micro.frozen, batch)
    assert_trees_equal(found.lora, wanted.lora)
    assert all(np.isnan(value) == name.startswith("sampling/") for name, value in metrics.items())
    assert all(np.isfinite(value) for value in usual.values())


def test_a_policy_that_always_says_the_same_is_trained_on():
    """Its log-probabilities are all 0; so are its advantages, as a group's completions are equal."""
    config, batch = make_config(batch_size=ROWS, importance_sampling_cap=2.0), awkward_batch()
    certain = batch.replace(logprobs=jnp.zeros_like(batch.logprobs))
    none = jnp.zeros_like(batch.advantages)
    some = none.at[int(batch.loss_mask.any(1).argmax())].set(1.0)
    greedy = dataclasses.replace(config, top_k=1)
    assert checked(certain.replace(advantages=some), greedy).logprobs is certain.logprobs
    assert checked(certain.replace(advantages=none), config).logprobs is certain.logprobs
    with pytest.raises(ValueError, match="no behaviour log-probabilities"):
        checked(certain.replace(advantages=some), config)


@pytest.mark.parametrize(("tokens", "again"), [(1, 0), (128, 1)])
def test_any_budget_gives_the_same_update(micro, tokens, again):
    """Below one row; and of two layers one that computes all again, one gate and up. All at once, and memory for no
    layer: `test_step.py`.
    """
    batch, usual = awkward_batch(), several(importance_sampling_cap=2.0)
    state = descent(micro, dataclasses.replace(usual, tokens_per_micro_batch=tokens))
    plan = make_update_plan(state, micro.frozen, longest=LENGTH)
    plan = dataclasses.replace(plan, recomputed=again, recomputed_gate_up=again)  # no budget of small layers has both
    found = grpo_step(state, micro.frozen, batch, plan)
    close(found, grpo_step(descent(micro, usual), micro.frozen, batch), 2e-6)


def test_few_sequences_beside_a_long_segment_give_the_same_update(micro):
    """Segments of up to 4 tokens are short; beside a longer one there are three sequences at most. A micro-batch
    holds a prompt once.
    """
    config, batch = make_config(batch_size=ROWS, importance_sampling_cap=2.0), awkward_batch()
    state = descent(micro, config)
    wanted = grpo_step(state, micro.frozen, batch)
    usual = make_update_plan(state, micro.frozen, longest=LENGTH)
    few = dataclasses.replace(usual, pack=dataclasses.replace(usual.pack, short=4, suffixes_beside_long=3))
    found, idle = assigned(few, batch, needs_advantage=False), batch.replace(advantages=batch.advantages.at[7].set(0))
    trained, has_advantage = np.asarray(batch.loss_mask).any(1), np.asarray(idle.advantages) != 0
    for own, wanted_rows in ((found, trained), (assigned(few, idle, True), trained & has_advantage)):
        rows = [row for some, _ in own for row in some.rows.tolist() if row >= 0]
        assert sorted(rows) == np.flatnonzero(wanted_rows).tolist()
    sequences = collections.defaultdict(list)
    prompts = [tuple(row[:length]) for row, length in zip(batch.tokens.tolist(), batch.prompt_lengths, strict=True)]
    for some, kind in found:
        held = {(prompts[row], prefix) for row, prefix in zip(*map(np.ndarray.tolist, some), strict=True) if row >= 0}
        assert len(held) == len({prompt for prompt, _ in held}) == len({prefix for _, prefix in held})
        sequences[kind.longest_suffix].append(int((some.rows >= 0).sum()))
    assert max(sequences[usual.pack.longest_suffix]) == 3 < max(sequences[4]), sequences
    close(grpo_step(state, micro.frozen, batch, few), wanted, 2e-6)


def test_dr_grpo_divides_by_the_limit_where_a_batch_is_narrower():
    batch = make_batch(64, 0, 2)
    sequences, inputs = inputs_of("dr_grpo", 100, (PROMPT, 1100), batch)
    assert sequences["tokens"].shape == (1024, 1024 + 1536) and inputs["targets"].shape == (1024, 1536)  # buckets
    mask = np.asarray(batch.loss_mask)
    assert inputs["weights"].sum() == pytest.approx(mask.sum() / (2 * 100)) and mask.any()


@pytest.mark.parametrize(("prompts", "lengths"), [([4, 2], [6, 4]), ([2, 1], [5, 5])])
def test_a_long_segment_has_a_shape_that_holds_it(prompts, lengths):
    """4 tokens, those of the first prompt, or of the last completion, beside short segments; 3 are short."""
    batch, plan = make_batch(64, 0, 2), UpdatePlan(PackShape(64, 2, 4, LENGTH, PROMPT, COMPLETION, 3, 2), 0, 0, 0, 0)
    batch = batch.replace(prompt_lengths=jnp.asarray(prompts, jnp.int32), lengths=jnp.asarray(lengths, jnp.int32))
    batch = batch.replace(loss_mask=batch.completion_mask)
    [(some, kind)] = assigned(plan, batch, needs_advantage=False)
    assert [row for row in some.rows if row >= 0] == [0, 1] and kind == plan.pack.holding(4) != plan.pack.holding(3)


def test_rows_that_are_wider_than_the_limits_have_a_plan_that_holds_them(micro):
    """A caller's batch, with prompts longer than `max_prompt_length`, comes as far as the first program."""

    def stop(*_):
        raise InterruptedError

    state = init_state(micro, make_config(batch_size=ROWS, max_prompt_length=PROMPT - 1))
    pack = make_update_plan(state, micro.frozen, longest=64).pack
    assert pack.longest >= 64 and pack.longest_prefix >= 64 - COMPLETION
    with pytest.raises(InterruptedError), calling(stop):
        grpo_step(state, micro.frozen, awkward_batch())


def test_bf16_is_as_exact_as_the_padded_rows(micro_dir, micro):
    """Distance of the gradient from that of the same weights computed in fp32: both round as often, at places of which
    few differ, so neither is more than a quarter farther away.
    """

    config, batch = several(importance_sampling_cap=2.0), awkward_batch()
    rounded = load_policy(micro_dir, lora=micro.lora_config, dtype=jnp.bfloat16).replace(
        norms=micro.norms, lora=micro.lora
    )
    exact = micro.replace(frozen=jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded.frozen))
    gradients = []
    for policy, function in ((exact, grpo_step), (rounded, plain_grpo_step), (rounded, grpo_step)):
        state = descent(policy, config)
        after, metrics = function(state, policy.frozen, batch)
        assert float(metrics["tokens"]) == np.asarray(batch.loss_mask).sum()
        leaves = zip(jax.tree.leaves(state.lora), jax.tree.leaves(after.lora), strict=True)
        gradients.append(np.concatenate([np.ravel(before - after) for before, after in leaves]))
    exact, plain, packed = gradients
    distance = np.linalg.norm(plain - exact)
    assert 0 < np.linalg.norm(packed - exact) < 1.25 * distance < 0.1 * np.linalg.norm(exact)


@pytest.mark.parametrize("committed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_all_is_compiled_ahead_and_other_lengths_compile_nothing(micro, committed):
    """Sizes that no other test has; where they are committed, two kinds of micro-batches and a half. With a reference:
    `test_full.py`.
    """
    config = several(num_iterations=2, train_norms=True, tokens_per_micro_batch=145)
    policy, batches = micro, [awkward_batch(seed) for seed in range(4)]
    if committed:
        policy = jax.device_put(policy, jax.devices()[0])
        batches = jax.device_put(batches, jax.devices()[0])
    state = init_state(policy, config)
    plan = make_update_plan(state, policy.frozen, longest=LENGTH)
    if committed:
        kinds = {"short": 4, "suffixes_beside_long": 3, "has_half": True}
        plan = dataclasses.replace(plan, pack=dataclasses.replace(plan.pack, **kinds))
        of_short = batches[1].lengths <= batches[1].prompt_lengths + 4
        batches[1] = batches[1].replace(loss_mask=batches[1].loss_mask & of_short[:, None])
    shapes = state, policy.frozen, shapes_of(batches[0]), plan
    names = [each.function.__name__ for each in record(grpo_step, *shapes)]
    assert names.count("backward") == 1 + 2 * committed  # for segments of 4 tokens, of 11, and a half
    assert names.count("head_loss") == 1 + committed and names.count("apply") == 1
    assert {some.kind for batch in batches for some in assigned(plan, batch, False)} == set(plan.pack.kinds())
    assert compile_calls(grpo_step, *shapes) == len(names)
    with CompilationCounter() as counter:
        for batch in batches:
            state, _ = jax.block_until_ready(grpo_step(state, policy.frozen, batch, plan))
        assert counter.take() == []
    jax.tree.map(np.asarray, (state.lora, policy.frozen))  # nothing that stays was donated


@pytest.mark.parametrize(("size", "tokens"), [("0.5B", 17408), ("1.5B", 4352), ("7B", 4352)])
def test_micro_batches_are_large_where_a_layer_is_small(tool, size, tokens):
    """256 completions of 256 + 512 tokens: four groups of eight at a time at 0.5B, whose layers would wait for the
    host, and one from 1.5B on. Less memory, here for 5 GB of activations at 0.5B, takes precedence. Limits in the same
    buckets and other batches have the same plan, all limits and groups of large batches one size and layout, and limits
    beyond 512 the same rows of attention; unless it held one sequence in the place of two.
    """
    model = parse_config(tool("make_checkpoint").hf_config(size), {}, size)

    def plan_of(
        prompt: int = 256, completion: int = 512, rows: int = 256, free: float | None = None, group: int = 8
    ) -> UpdatePlan:
        sizes = {"batch_size": rows, "num_generations": group}
        config = Config(max_prompt_length=prompt, max_completion_length=completion, **sizes)
        return choose_plan(model, 2, config, rows, prompt + completion, free)

    assert plan_of().pack.tokens == tokens == 2 * plan_of().pack.half().tokens
    assert plan_of(free=5e9).pack.tokens <= 4352
    assert plan_of(230) == plan_of(256, 490) == plan_of(rows=128) == plan_of(rows=512) == plan_of()
    plans = {limit: plan_of(completion=limit) for limit in (640, 768, 1024)} | {"group": plan_of(group=16)}
    layouts = {(pack.tokens, pack.prefixes, pack.suffixes) for pack in (p.pack.roomy() for p in plans.values())}
    assert layouts == {(tokens, 32, 128)}
    assert plans[640] == plans[768] == plans[1024] and plans["group"].pack.prefixes < plan_of().pack.prefixes
    small = [plan_of(rows=8 * count).pack for count in (1, 2)]  # half of one would wait for the host at 0.5B
    assert [pack.half() is not None for pack in small] == [size != "0.5B", True]
    assert tokens > 4352 or plan_of(completion=2300).pack.tokens >= 4608 + 256


@pytest.mark.parametrize(("layers", "free"), [(28, 7e9), (1, None)])
def test_a_half_takes_no_memory_from_wholes(tool, monkeypatch, layers, free):
    """7B, groups of 32 completions of 64 tokens: a half has room for as many as a whole, whose empty segments take more
    of attention, but it keeps half as much. Only with one layer does it need more than wholes.
    """
    model = parse_config(tool("make_checkpoint").hf_config("7B"), {}, "7B")
    model = dataclasses.replace(model, num_layers=layers)
    config = Config(batch_size=2048, num_generations=32, max_prompt_length=1024, max_completion_length=64)
    plan = choose_plan(model, 2, config, 2048, 1024 + 64, free)
    need = layer_bytes(model, 2, plan.pack.half(), config, XlaMatmuls())
    of_half, planned = peak_bytes(plan.layers(layers), need), plan.kept_bytes + plan.working_bytes
    monkeypatch.setattr(update_plan, "_has_half", lambda model, pack: False)
    wholes = choose_plan(model, 2, config, 2048, 1024 + 64, free)
    assert plan.pack == dataclasses.replace(wholes.pack, has_half=True)
    assert plan.layers(layers) == wholes.layers(layers)
    assert planned == max(of_half, wholes.kept_bytes + wholes.working_bytes)
    assert (of_half == planned) == (layers == 1)


@pytest.mark.parametrize(
    ("limit", "longest", "tokens"), [(4000, 4352, 4352), (4060, 384 + 4096, 4480), (5000, 300 + 5000, 5376)]
)
def test_micro_batches_of_one_sequence_are_little_larger_than_it(tool, limit, longest, tokens):
    """7B: 300 + 4000 tokens fit the common size; the bucket of 300 + 4060 costs nothing, of 300 + 5000 a quarter. Half
    of 4480 tokens are no whole number of tiles."""
    model = parse_config(tool("make_checkpoint").hf_config("7B"), {}, "7B")
    config = Config(batch_size=64, num_generations=8, max_prompt_length=300, max_completion_length=limit)
    pack = choose_plan(model, 2, config, 64, 300 + limit, None).pack
    assert (pack.longest, pack.tokens, pack.has_half) == (longest, tokens, tokens != 4480)


def test_micro_batches_of_the_longest_sequences_are_counted():
    """At least as many as `assign` makes, at most twice as many: it also puts parts of groups beside others."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        group, groups, prefix, suffix = (int(rng.integers(low, 9)) for low in (2, 1, 1, 1))
        rows, limits = group * groups, _Limits(prefix + suffix, prefix, suffix, group)
        for sequences in range(1, rows + 1):
            pack = _pack(limits, max(limits.longest, limits.tokens(sequences)), rows)
            lengths, prompts = np.full(rows, limits.longest), np.repeat(np.arange(groups), group)
            needed = len(assign(lengths, np.full(rows, prefix), prompts, pack).rows)
            assert needed <= _micro_batches(limits, rows, pack) <= 2 * needed


@pytest.mark.parametrize(("prefixes", "suffixes", "count"), [(4, 16, 1), (2, 16, 2), (4, 8, 2), (4, 4, 4)])
def test_room_for_prefixes_and_suffixes_bounds_a_micro_batch(prefixes, suffixes, count):
    """Four groups of four sequences, for which there are tokens."""
    pack = PackShape(100, prefixes, suffixes, 8, 4, 4)
    assert _micro_batches(_Limits(8, 4, 4, 4), 16, pack) == count


def test_the_plan_of_a_run_leaves_room_for_what_is_held(micro):
    """94 % of the device less weights, state and gradient; of the config's limits, without rows to look at."""
    config = make_config(batch_size=ROWS, max_prompt_length=PROMPT)
    state = init_state(micro, config)
    bytes_of = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    held = bytes_of((micro.frozen, state.norms, state.lora, state.opt_state)) + 8 + bytes_of(state.lora)
    for free in (100_000, 200_000, 400_000, None):
        memory = None if free is None else (held + free) / 0.94
        wanted = choose_plan(micro.config, 4, config, ROWS, PROMPT + COMPLETION, free, XlaMatmuls(wide_bytes=8))
        assert make_update_plan(state, micro.frozen, memory) == wanted
        assert make_update_plan(*jax.eval_shape(lambda: (state, micro.frozen)), memory) == wanted
    shared = choose_plan(micro.config, 4, config, ROWS, PROMPT + COMPLETION, None, XlaMatmuls(wide_bytes=8), replicas=2)
    assert make_update_plan(state, micro.frozen, replicas=2) == shared and shared.pack.tokens < wanted.pack.tokens


def test_an_update_that_does_not_fit_says_what_to_lower(micro):
    """The state of before is untouched; other errors stay what they are."""
    config = make_config(batch_size=ROWS)
    state = init_state(micro, config)

    def fail(*_):
        raise jax.errors.JaxRuntimeError(message)

    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes."
    plan = make_update_plan(state, micro.frozen, 8e9)
    plan = dataclasses.replace(plan, kept_bytes=3 * 10**9, working_bytes=10**9)
    words = (
        r"3\.0 GB of activations and 1\.0 GB for one program, of the device's 8\.0 GB; lower update_memory_gb below "
    )
    with pytest.raises(MemoryError, match=words + r"3\.0 .* tokens_per_micro_batch"), calling(fail):
        grpo_step(state, micro.frozen, awkward_batch(), plan)
    message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"), calling(fail):
        grpo_step(state, micro.frozen, awkward_batch())


def test_every_token_behind_a_prompt_is_read_of_a_batch():
    """Rows of 4 tokens: a completion of 3 behind a prompt of 1, and one of 1 behind 3. In place of columns beyond the
    rows there is nothing."""
    tokens = jnp.array([[5, 6, 7, 8], [1, 2, 3, 4]], jnp.int32)
    prompts, lengths = jnp.array([1, 3], jnp.int32), jnp.array([4, 4], jnp.int32)
    mask = jnp.arange(4) >= prompts[:, None]
    finish, index = jnp.zeros(2, jnp.int8), jnp.arange(2, dtype=jnp.int32)
    batch = Batch(tokens, tokens / 8, prompts, lengths, finish, index, advantages=jnp.ones(2), loss_mask=mask)
    sequences, completions = inputs_of("dapo", 9, (1, 3), batch)
    own = np.asarray(completions["mask"])
    assert own[:2, :3].tolist() == [[True] * 3, [True, False, False]] and own.sum() == 4
    assert completions["targets"][:2, :3].tolist()[0] == [6, 7, 8] and completions["targets"][1, 0] == 4
    assert completions["behaviour"][0, :3].tolist() == [6 / 8, 7 / 8, 1] and not completions["weights"][~own].any()
    assert sequences["tokens"][:2, :4].tolist() == tokens.tolist() and sequences["lengths"].sum() == 8
