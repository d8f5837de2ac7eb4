"""Rollouts against the policy's own log-probabilities, against prefixes of an unconstrained rollout, and under changes
of slots, chunks, order and neighbours that must not change the samples.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fp32_policy, logits_of, noted_programs, plain_rollout, randomized
from qerl_kernels import dispatch
from qerl_kernels.gpu import H200, Gpu

from qerl_jax import aqn
from qerl_jax.buckets import bucket
from qerl_jax.checkpoint.hf_config import parse_config
from qerl_jax.compilation import CompilationCounter
from qerl_jax.config import FREE_ON_RESUME
from qerl_jax.programs import calling
from qerl_jax.rollout import decode
from qerl_jax.rollout.engine import _Decoder, check_positions, generate
from qerl_jax.rollout.shapes import RolloutShapes, choose_shapes, prefill_bytes
from qerl_jax.types import Engine, FinishReason, Policy, Prompts, Rollout, Sampling, completion_ids

PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 60], [40, 41]]
NEW, GROUP, PAD = 8, 2, 63
FREE = Sampling(NEW, temperature=0.9, num_generations=GROUP)
KEY = jax.random.key(11)
SMALL = Engine(slots=3, chunk=2)  # the engine of every test that needs refills: what it compiles is the same
OF_FOUR = dataclasses.replace(SMALL, prompts=4)  # its programs, also for fewer prompts


def with_eos(policy: Policy, *ids: int) -> Policy:
    return policy.replace(config=dataclasses.replace(policy.config, eos_token_ids=ids, pad_token_id=PAD))


@pytest.fixture(scope="module")
def policy(micro_dir) -> Policy:
    """Adapters of rank 2, no EOS."""
    return with_eos(randomized(fp32_policy(micro_dir, rank=2), 1, 0.3))


def test_buckets_are_the_smallest_that_hold_a_size():
    sizes = sorted({times * 2**k for k in range(1, 12) for times in (1, 1.5)} | {1})
    assert [bucket(n) for n in range(1, 2049)] == [next(size for size in sizes if size >= n) for n in range(1, 2049)]


@pytest.fixture(scope="module")
def free(policy) -> Rollout:
    """A rollout whose sequences all run to the limit."""
    return generate(policy, PROMPTS, FREE, KEY)


@pytest.fixture(scope="module")
def ended(policy, free) -> Policy:
    """The policy with three EOS ids, one of them the first token of a row."""
    completions = completion_ids(free)
    return with_eos(policy, completions[0][0], completions[3][4], completions[5][6])


def assert_same_rows(a: Rollout, rows_a, b: Rollout, rows_b) -> None:
    """The same tokens and, within 1e-5, log-probabilities; widths may differ."""
    width = min(a.tokens.shape[1], b.tokens.shape[1])
    for i, j in zip(rows_a, rows_b, strict=True):
        for name in ("prompt_lengths", "lengths", "finish"):
            assert int(getattr(a, name)[i]) == int(getattr(b, name)[j])
        np.testing.assert_array_equal(a.tokens[i, :width], b.tokens[j, :width])
        np.testing.assert_allclose(a.logprobs[i, :width], b.logprobs[j, :width], atol=1e-5)


def test_shape_of_a_rollout(free):
    lengths = [len(p) for p in PROMPTS for _ in range(GROUP)]
    assert free.tokens.shape == (len(PROMPTS) * GROUP, 5 + NEW)
    assert free.prompt_lengths.tolist() == lengths and free.lengths.tolist() == [n + NEW for n in lengths]
    assert free.prompt_index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (np.asarray(free.finish) == FinishReason.LENGTH).all()
    completion = np.asarray(free.completion_mask)
    assert completion.sum(1).tolist() == [NEW] * 8
    assert (np.asarray(free.logprobs)[~completion] == 0).all() and (np.asarray(free.logprobs)[completion] < 0).all()
    for row, (prompt, ids) in enumerate(
        zip([p for p in PROMPTS for _ in range(GROUP)], completion_ids(free), strict=True)
    ):
        tokens = np.asarray(free.tokens[row])
        assert tokens[: len(prompt)].tolist() == prompt
        assert tokens[len(prompt) : len(prompt) + NEW].tolist() == ids
        assert (tokens[len(prompt) + NEW :] == PAD).all()
    assert len({tuple(ids) for ids in completion_ids(free)}) == 8, "samples of a group differ"


def test_entropies_are_those_of_the_noisy_policy(policy, free):
    """Softmax of the policy's logits over the temperature, in float64; the clean policy's differ."""
    noisy = policy.replace(norms=aqn.perturb(policy.norms, 0.2, jax.random.key(2)))

    def entropies(actor: Policy, rollout: Rollout) -> np.ndarray:
        logits = np.asarray(logits_of(actor, rollout.tokens, rollout.attention_mask), np.float64)[:, :-1] / 0.9
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        return np.where(np.asarray(rollout.completion_mask)[:, 1:], -(p * np.log(p)).sum(-1), 0)

    for actor, rollout in ((policy, free), (noisy, generate(noisy, PROMPTS, FREE, KEY))):
        assert (np.asarray(rollout.entropies)[:, 0] == 0).all()
        np.testing.assert_allclose(rollout.entropies[:, 1:], entropies(actor, rollout), atol=1e-4)
    assert np.abs(entropies(policy, rollout) - rollout.entropies[:, 1:]).max() > 0.01


def test_samples_do_not_depend_on_the_batch(policy, free):
    """Order of the prompts, absence of neighbours, and group size."""
    order = [2, 0, 3, 1]
    shuffled = generate(policy, Prompts.from_lists([PROMPTS[p] for p in order], ids=order), FREE, KEY)
    for place, p in enumerate(order):
        assert_same_rows(shuffled, [2 * place, 2 * place + 1], free, [2 * p, 2 * p + 1])
    alone = generate(policy, Prompts.from_lists([PROMPTS[3]], ids=[3], length=5), FREE, KEY, OF_FOUR)
    assert_same_rows(alone, [0, 1], free, [6, 7])
    larger = generate(policy, PROMPTS, FREE.replace(num_generations=3), KEY, SMALL)
    assert_same_rows(larger, [0, 1, 9, 10], free, [0, 1, 6, 7])


def test_samples_are_the_plain_samplers(ended):
    """Against one whole forward pass for each token of each row."""
    for sampling in (FREE, FREE.replace(temperature=0), FREE.replace(top_k=9, top_p=0.8, min_p=0.02)):
        rollout = generate(ended, PROMPTS, sampling, KEY, SMALL)
        for row, (ids, logprobs, finish) in enumerate(plain_rollout(ended, PROMPTS, sampling, KEY)):
            assert completion_ids(rollout)[row] == ids and int(rollout.finish[row]) == finish
            start = int(rollout.prompt_lengths[row])
            np.testing.assert_allclose(rollout.logprobs[row, start : start + len(ids)], logprobs, atol=1e-5)


def test_fewer_prompts_run_in_the_programs_of_more(ended):
    """Nothing is compiled for one or three of four prompts, and their samples are those of the rollout of four; of five
    the programs are their own.
    """
    whole = generate(ended, PROMPTS, FREE, KEY, OF_FOUR)
    for few in (1, 3):
        with CompilationCounter() as counter:
            prompts, seen = Prompts.from_lists(PROMPTS[:few], length=5), []
            found = generate(ended, prompts, FREE, KEY, OF_FOUR, on_progress=seen.append)
            assert counter.take() == []
        assert {progress.rows for progress in seen} == {seen[-1].ended} == {GROUP * few}
        assert found.tokens.shape == found.entropies.shape == (GROUP * few, 5 + NEW)
        assert_same_rows(found, range(GROUP * few), whole, range(GROUP * few))
    more = generate(ended, [*PROMPTS, [4]], FREE, KEY, OF_FOUR)
    assert more.tokens.shape[0] == 10
    assert_same_rows(more, range(8), whole, range(8))


def test_prompts_in_many_prefills(policy):
    """Seven prompts in prefills of 512 tokens, against one prompt at a time, in the same place of the cache and in a
    prefill that holds no more than its own tokens in multiples of 16.
    """
    prompts = [[*range(1, 61), *range(p, 32 + 3 * p)] for p in range(7)]
    sizes, sampling = [], Sampling(2)

    def note(name, args, _):
        if name == "store_hidden":
            sizes.append(int((args[4] > 0).sum()))

    with noted_programs(note):
        together = generate(policy, prompts, sampling, KEY)
    assert sizes == [5, 2]
    alone = generate(policy, prompts, sampling, KEY, Engine(slots=1, batch_invariant=True))
    assert_same_rows(together, range(7), alone, range(7))


def test_prompts_of_other_arrays_are_the_same_prompts():
    """Of lists, or on a device, as research code may have them."""
    plain = Prompts.from_lists(PROMPTS, ids=[4, 7, 4, 4])
    for kind in (list, jnp.asarray):
        other = object.__new__(Prompts)  # without the check of types, which tests alone have
        values = {"tokens": plain.tokens, "lengths": plain.lengths, "ids": plain.ids, "occurrences": [0, 5, 1, 2]}
        for name, value in values.items():
            object.__setattr__(other, name, kind(value))
        part = other.part(np.int32([0, 1, 3]))
        assert part.ids.tolist() == [4, 7, 4] and part.earlier().tolist() == [0, 5, 2]
        assert np.array_equal(part.tokens, plain.tokens[[0, 1, 3]])
        object.__setattr__(other, "occurrences", None)
        assert isinstance(other.earlier(), np.ndarray) and other.earlier().tolist() == [0, 0, 1, 2]


def test_room_for_more_changes_no_sample(policy):
    """Caches in buckets against those as small as they may be, under a limit of memory."""
    prompts, sampling = [list(range(1, 34)), [7, 9]], Sampling(33, temperature=0.9, num_generations=GROUP)
    in_bucket = choose_shapes(policy, 2, GROUP, 33, 33, Engine())
    engine = Engine(memory_gb=(in_bucket.cache_bytes - 1) / 1e9)
    exact = choose_shapes(policy, 2, GROUP, 33, 33, engine)
    sizes = [(each.prompt_width, each.completion_width, each.prompt_slots) for each in (in_bucket, exact)]
    assert sizes == [(48, 48, 32), (40, 40, 2)]
    assert choose_shapes(policy, 2, GROUP, 33, 33, Engine(batch_invariant=True)) == exact
    roomy, tight = (generate(policy, prompts, sampling, KEY, each) for each in (Engine(), engine))
    assert roomy.tokens.shape == tight.tokens.shape == (2 * GROUP, 66)
    assert_same_rows(roomy, range(2 * GROUP), tight, range(2 * GROUP))


def test_caches_have_the_width_of_their_own_tokens(policy):
    """Prompts of up to 16 tokens, completions of up to 24; two key/value heads of 8 features, in the compute dtype."""
    shapes = RolloutShapes(3, 2, prompt_width=16, completion_width=24, rows=5, moved_together=1, cache_bytes=0)
    prompts, slots = decode.allocate(KEY, policy.config, policy.dtype, shapes)
    assert {array.shape for array in jax.tree.leaves(prompts.cache)} == {(2, 2, 16, 8)}
    assert {array.shape for array in jax.tree.leaves(slots.cache)} == {(3, 2, 24, 8)}
    done = slots.completions
    assert {array.shape for array in (done.tokens, done.logprobs, done.entropies)} == {(5, 24)}
    prompts, slots = jax.eval_shape(lambda: decode.allocate(KEY, policy.config, jnp.dtype("bfloat16"), shapes))
    rounded = prompts.cache, prompts.hidden, slots.cache, slots.hidden
    assert {array.dtype for array in jax.tree.leaves(rounded)} == {jnp.dtype("bfloat16")}
    assert slots.completions.logprobs.dtype == slots.completions.entropies.dtype == jnp.float32


def test_small_models_have_room_for_other_limits(tool, monkeypatch):
    """By the kernels 0.5B has the caches of 1024 tokens for every shorter limit, and those of 64 prompts, unless a
    limit of memory holds buckets alone; 1.5B and whoever reads whole caches have buckets.
    """
    monkeypatch.setattr(dispatch, "missing_for_mosaic_gpu", lambda dtype, gpu: None if gpu else "a GPU")

    def shapes_of(size: str, gpu: Gpu | None, limit: int, batch: int, **memory: float) -> tuple:
        model = parse_config(tool("make_checkpoint").hf_config(size), {}, size)
        policy = Policy({"embed_tokens": jnp.zeros(0, jnp.bfloat16), "layers": {}}, {}, {}, model, None)
        shapes = choose_shapes(policy, batch // 8, 8, 256, limit, Engine(**memory), gpu=gpu)
        return shapes.completion_width, shapes.prompt_slots, shapes.rows

    mine = shapes_of("0.5B", H200, 512, 256)
    assert mine == (1024, 64, 1024)
    assert {shapes_of("0.5B", H200, limit, batch) for limit in (50, 640, 1024) for batch in (128, 512)} == {mine}
    assert shapes_of("0.5B", H200, 1100, 256) == (1536, 64, 1024)
    # 24 layers x 2 x 2 heads x 64 x 2 bytes: 256 completions of 512 tokens and 32 prompts of 256 are 1.71 GB
    assert shapes_of("0.5B", H200, 512, 256, memory_gb=1.8) == (512, 32, 1024)
    # Those of 1024 tokens and 64 prompts are 3.42 GB, and 50.3 MB while an array of 192 survivors moves, of which four
    # move at a time where there is room; logits 12 bytes each.
    wide = 24 * 512 * (256 * 1024 + 64 * 256) + 192 * 1024 * 256
    free = (wide + 12 * 151_936 * 256) / 0.94
    assert shapes_of("0.5B", H200, 512, 256, free_bytes=free + 9) == mine
    assert shapes_of("0.5B", H200, 512, 256, free_bytes=free - 9) == (512, 32, 1024)
    assert shapes_of("0.5B", H200, 512, 1024) == (512, 128, 1024)  # 12.9 GB
    assert shapes_of("0.5B", H200, 512, 1096) == (512, 256, 1536)  # results of 137 prompts times 8 have their bucket
    assert shapes_of("1.5B", H200, 512, 256) == shapes_of("0.5B", None, 512, 256) == (512, 32, 1024)


def test_survivors_move_into_fewer_slots(policy, free):
    """32 rows, of which all but a few end with their first tokens, or at limits of two: 32 slots become 8."""
    ended = with_eos(policy, *range(14))
    sampling = FREE.replace(num_generations=8, max_new_tokens=24)
    for slots, counts in {
        31: [31], 32: [32, 8], 39: [39, 8], 40: [40, 32, 8], 79: [79, 32, 8], 80: [80, 64, 32, 8],
        128: [128, 64, 32, 8], 160: [160, 128, 64, 32, 8], 239: [239, 128, 64, 32, 8],
        240: [240, 192, 128, 64, 32, 8], 512: [512, 384, 256, 192, 128, 64, 32, 8],
    }.items():  # fmt: skip
        assert choose_shapes(ended, slots, 1, 5, 24, Engine()).slot_counts() == counts
    limits = [2, 2, 24, 24]
    slow = generate(ended, PROMPTS, sampling, KEY, Engine(slots=2), limits)
    fast = generate(ended, PROMPTS, sampling, KEY, Engine(chunk=2), limits)
    longest = np.sort(np.asarray(fast.lengths - fast.prompt_lengths))
    assert longest[-9] < longest[-1] - 4, "the longest outlives the rest by chunks"
    assert_same_rows(slow, range(32), fast, range(32))


@pytest.mark.parametrize(("live", "moves"), [(9, []), (8, [8]), (3, [8])])
def test_survivors_move_once_they_fit_fewer_slots(live, moves):
    made = []
    schedule = types.SimpleNamespace(live=list(range(live)), sequences=[None] * 32)
    shapes = types.SimpleNamespace(slot_counts=lambda: [64, 32, 8])
    _Decoder._compact(types.SimpleNamespace(schedule=schedule, shapes=shapes, _move=made.append))
    assert made == moves


def test_an_eighth_of_the_cache_moves_at_a_time(policy):
    """Of 2 L arrays the largest divisor of their number up to an eighth, and 256 MB at most: of 0.5B (24 layers) and of
    28 and 34 layers. What moved is every array's rows `kept`.
    """
    for layers, slots, together in ((24, 256, 6), (28, 32, 7), (34, 32, 4), (2, 32, 1), (24, 1024, 2)):
        model = dataclasses.replace(policy.config, num_layers=layers, num_kv_heads=2, head_dim=64)
        deep = Policy({"embed_tokens": jnp.zeros(0, jnp.bfloat16)}, {}, {}, model, None)
        shapes = choose_shapes(deep, slots, 1, 8, 512, Engine())
        assert shapes.moved_together == together
        array = 2 * 64 * 512 * shapes.slot_counts()[1] * 2
        least = Engine(memory_gb=(shapes.cache_bytes - (together - 1) * array) / 1e9)
        tight = choose_shapes(deep, slots, 1, 8, 512, least)  # one by one, before there are fewer slots
        assert tight == dataclasses.replace(shapes, moved_together=1, cache_bytes=tight.cache_bytes)
        assert (
            shapes.cache_bytes == 2 * layers * 2 * 64 * 2 * (512 * slots + 8 * shapes.prompt_slots) + together * array
        )

    shapes = RolloutShapes(4, 1, 8, 8, 4, 2, 0)
    _, slots = decode.allocate(KEY, policy.config, policy.dtype, shapes)
    leaves, structure = jax.tree.flatten(slots.cache)
    filled = [leaf + i + jnp.arange(4.0).reshape(4, 1, 1, 1) for i, leaf in enumerate(leaves)]
    before, moves = [np.asarray(array) for array in filled], []
    with noted_programs(lambda name, args, _: moves.append(args[0]) if name == "gather" else None):
        after = decode.compact(
            dataclasses.replace(slots, cache=structure.unflatten(filled)), np.array([2, 0], np.int32), 2
        )
    assert [len(jax.tree.leaves(some)) for some in moves[:-1]] == [2, 2] and all(array.is_deleted() for array in filled)
    for new, old in zip(jax.tree.leaves(after.cache), before, strict=True):
        np.testing.assert_array_equal(new, old[[2, 0]])


def test_invalid_limits(policy):
    for wrong in ([1, 2, 3], [0, 1, 1, 1], [1, 1, 1, 9]):
        with pytest.raises(
            ValueError, match=r"4 numbers \(one a prompt\) or 8 \(one a row\) from 1 to max_new_tokens 8"
        ):
            generate(policy, PROMPTS, FREE, KEY, limits=wrong)


def test_progress_is_reported(policy, free):
    """After each of twelve chunks of two tokens, four for every three of the rows: rows that end within the next chunk,
    which has been sent, have ended.
    """
    seen = []
    rollout = generate(policy, PROMPTS, FREE, KEY, SMALL, on_progress=seen.append)
    assert_same_rows(rollout, range(8), free, range(8))
    ended = [0, 0, 3, 3, 3, 3, 6, 6, 6, 6, 8, 8]
    tokens = [*range(6, 49, 6), 52, 56, 60, 64]
    assert [(p.ended, p.rows, p.tokens) for p in seen] == [(e, 8, t) for e, t in zip(ended, tokens, strict=True)]


def test_progress_hands_out_each_completion_once(ended):
    """With all its tokens, 0 among them, whatever ends it: EOS, the limit, a failure."""
    key = jax.random.key(6)
    token = int(completion_ids(generate(ended, PROMPTS, FREE, key))[7][2])
    table = ended.frozen["embed_tokens"].at[token].set(jnp.nan)
    for actor in (ended, ended.replace(frozen=ended.frozen | {"embed_tokens": table})):
        seen = []
        rollout = generate(actor, PROMPTS, FREE, key, SMALL, [8, 3, 8, 8], seen.append)
        given = [item for progress in seen for item in progress.completions.items()]
        assert sorted(given) == list(enumerate(completion_ids(rollout))) and any(0 in ids for _, ids in given)
    assert FinishReason.FAILED in rollout.finish


def test_random_rollouts_are_prefixes_of_the_free_one(policy, ended, free):
    """Property: whatever ends rows and in whatever order slots come free, a row is the free row up to its own end. The
    limits are those of prompts or of rows; an EOS on the last allowed token is an end."""
    rng, seen = np.random.default_rng(0), set()
    completions = completion_ids(free)
    for actor in (policy, ended):
        eos = actor.config.eos_token_ids
        for count in (4, 8) * 4:
            limits = rng.integers(1, NEW + 1, count).tolist()
            rollout = generate(actor, PROMPTS, FREE, KEY, SMALL, limits)
            for row, ids in enumerate(completion_ids(rollout)):
                ends = [i + 1 for i, token in enumerate(completions[row]) if token in eos]
                kept = min([*ends, limits[row * count // 8]])
                assert ids == completions[row][:kept]
                assert int(rollout.finish[row]) == (FinishReason.EOS if kept in ends else FinishReason.LENGTH)
                stop = int(free.prompt_lengths[row]) + kept
                assert int(rollout.lengths[row]) == stop and np.asarray(rollout.completion_mask[row]).sum() == kept
                np.testing.assert_array_equal(rollout.tokens[row, :stop], free.tokens[row, :stop])
                np.testing.assert_allclose(rollout.logprobs[row, :stop], free.logprobs[row, :stop], atol=1e-5)
                assert (np.asarray(rollout.tokens[row, stop:]) == PAD).all()
                assert not np.asarray(rollout.logprobs[row, stop:]).any()
                assert not np.asarray(rollout.entropies[row, stop:]).any()
            seen |= {ids[-1] for ids in completion_ids(rollout)}
    assert seen >= set(ended.config.eos_token_ids)


def test_slots_that_fit_a_memory_limit(policy):
    """2 (K, V) x 2 layers x 2 heads x 8 x 4 bytes = 256 bytes a token; a slot has 8 tokens, and so has a prompt of 5;
    the prompt cache holds enough prompts to fill the slots twice, and 32 where there is room.
    """
    for slots, prompts in ((1, 1), (2, 2), (5, 4), (8, 4)):
        need = 256 * (8 * slots + 8 * prompts)
        for extra in (0, 1):
            shapes = choose_shapes(policy, 4, 2, 5, 8, Engine(memory_gb=(need + extra) / 1e9))
            assert (shapes.slots, shapes.prompt_slots, shapes.cache_bytes) == (slots, prompts, need)
    for fitting, slots in ((7, 7), (8, 8), (13, 8)):  # beyond 8 a multiple of 8
        fits = Engine(memory_gb=256 * (8 * fitting + 8 * min(fitting, 8)) / 1e9)
        assert choose_shapes(policy, 8, 2, 5, 8, fits).slots == slots
    roomy = choose_shapes(policy, 4, 2, 5, 8, Engine(memory_gb=256 * 8 * (8 + 32) / 1e9))
    assert (roomy.slots, roomy.prompt_slots, roomy.cache_bytes) == (8, 32, 256 * 8 * (8 + 32))
    assert choose_shapes(policy, 4, 2, 5, 8, Engine(slots=3)).slots == 3
    assert (
        choose_shapes(policy, 8, 8, 5, 8, Engine(slots=12, batch_invariant=True)).prompt_slots == 4
    )  # twice two groups
    with pytest.raises(
        ValueError, match=r"rollout_memory_gb 3.84e-06 cannot hold 1 completions of 8 tokens .* need 4.1e-06 GB"
    ):
        choose_shapes(policy, 4, 2, 5, 8, Engine(memory_gb=256 * 15 / 1e9))


def test_small_prefills_are_compiled_where_prompts_wait_for_slots(policy):
    prompts, limits = Prompts.from_lists([[1]] * 16, length=512), np.full(32, NEW)
    shapes = [_Decoder(policy, prompts, FREE, KEY, Engine(slots=slots), limits).prefill_shapes for slots in (32, 31)]
    assert [[shape.tokens for shape in some] for some in shapes] == [[2048, 4096], [512, 2048, 8192]]
    few = Prompts.from_lists([[1]] * 8, length=512)  # a part, in the programs of all
    part = _Decoder(policy, few, FREE, KEY, Engine(slots=31, prompts=16), limits[:16])
    assert part.prefill_shapes == shapes[1]
    assert part.shapes.prompt_width == 512  # of the array, whatever its prompts have


def test_without_memory_gb_the_devices_free_memory_is_the_limit(policy):
    """94 % of what is free holds the cache, of 256 bytes a token 8 completions of 8 tokens and as many prompts, 4 at
    least and 32 where there is room, and a prefill of 512 tokens: residual stream and attention's addition; q, k and
    v, in 32 rows of 64 too with the result.
    """
    roomy, need = (256 * (8 * 8 + 8 * prompts) for prompts in (32, 4))
    beside = 512 * 2 * 4 * 32 + 4 * (512 * (32 + 16 + 16) + 2048 * 2 * (32 + 16))

    def shapes_of(cache: int, **settings: int) -> RolloutShapes:
        return choose_shapes(policy, 4, 2, 5, 8, Engine(free_bytes=(cache + beside) / 0.94, **settings))

    assert shapes_of(roomy + 2).cache_bytes == roomy
    assert shapes_of(roomy - 2).cache_bytes == shapes_of(need + 2).cache_bytes == need
    expected = (
        r"94% of the free device memory less 0\.00105 GB of activations, in GB, 2\.46e-05 cannot hold 8 completions of "
        r"8 tokens and 4 prompts of 5: they need 2\.46e-05 GB; lower max_completion_length, or set rollout_memory_gb"
    )
    with pytest.raises(ValueError, match=expected):
        shapes_of(need - 2)
    assert shapes_of(need - 2, slots=4).slots == 4

    # Of 8192 tokens, prompts of up to 1024 take four times as many places in rows, longer ones as many as there are.
    longer = 8192 * 2 * 4 * 32 + 4 * (8192 * (32 + 16 + 16) + 4 * 8192 * 2 * (32 + 16))
    assert prefill_bytes(policy, 8, 2048, batch_invariant=False) == longer


def test_keys_make_the_samples(policy, free):
    """An id that comes twice continues its samples; another id, key or step draws differently."""
    twice = generate(policy, Prompts.from_lists([PROMPTS[0]] * 4, ids=[0, 1, 0, 9]), FREE, KEY)
    larger = FREE.replace(num_generations=2 * GROUP)
    alone = generate(policy, Prompts.from_lists(PROMPTS[:1], length=5), larger, KEY, OF_FOUR)
    assert_same_rows(twice, [0, 1, 4, 5], alone, range(4))
    assert_same_rows(twice, [0, 1], free, [0, 1])
    ids = completion_ids(twice)
    assert len({tuple(i) for i in ids}) == 8
    other = generate(policy, PROMPTS, FREE, jax.random.fold_in(KEY, 1))
    assert all(a != b for a, b in zip(completion_ids(other), completion_ids(free), strict=True))


def test_a_key_of_words_makes_the_same_samples(policy, free):
    """That of `jax.random.PRNGKey`, in as many slots as it has words and in more."""
    for slots in (2, 3):
        prompts = Prompts.from_lists(PROMPTS[:1], length=5)
        rollout = generate(policy, prompts, FREE, jax.random.PRNGKey(11), dataclasses.replace(OF_FOUR, slots=slots))
        assert_same_rows(rollout, range(2), free, range(2))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_a_row_with_a_broken_logit_fails_alone(policy, free, value):
    """NaN or infinity in the embedding of a token that only prompt 3 contains. Greedy decoding fails it, too."""
    used = {token for ids in [*PROMPTS, *completion_ids(free)] for token in ids}
    token = next(t for t in range(64) if t not in used)
    poisoned = policy.replace(
        frozen={**policy.frozen, "embed_tokens": policy.frozen["embed_tokens"].at[token].set(value)}
    )
    rollout = generate(poisoned, [*PROMPTS[:3], [40, token]], FREE, KEY)
    assert_same_rows(rollout, range(6), free, range(6))
    for row in (6, 7):
        assert int(rollout.finish[row]) == FinishReason.FAILED and int(rollout.lengths[row]) == 2
        assert (np.asarray(rollout.tokens[row, 2:]) == PAD).all() and (np.asarray(rollout.logprobs[row]) == 0).all()
    greedy = generate(poisoned, [*PROMPTS[:3], [40, token]], FREE.replace(temperature=0), KEY)
    assert [finish == FinishReason.FAILED for finish in greedy.finish.tolist()] == [False] * 6 + [True] * 2


def test_errors_name_the_numbers(policy):
    for changes in ({"slots": 0}, {"chunk": -1}, {"memory_gb": 0.0}):
        ((name, value),) = changes.items()
        with pytest.raises(ValueError, match=f"{name} must be above 0, got {value}"):
            Engine(**changes)
    with pytest.raises(ValueError, match=r"5 tokens and 124 new ones exceed.*max_position_embeddings 128"):
        generate(policy, PROMPTS, Sampling(124), KEY)
    check_positions(policy.config, 5, 123)  # which fill them all
    for prompts, message in (([], "no prompts"), ([[1], []], "prompt 1 is empty")):
        with pytest.raises(ValueError, match=message):
            generate(policy, prompts, FREE, KEY)
    one = Prompts.from_lists([[1, 2]])
    for lengths, message in (([0], "prompts of 0 to 0 tokens in an array of width 2"), ([3], "of 3 to 3 tokens")):
        with pytest.raises(ValueError, match=message):
            generate(policy, one.replace(lengths=np.array(lengths, np.int32)), FREE, KEY)
    for token in (-1, 64):
        with pytest.raises(ValueError, match=rf"token ids from .*{token}.* vocab_size is 64"):
            generate(policy, [[1, token]], FREE, KEY)
    padded = Prompts.from_lists([[1, 2], [3]])
    padded.tokens[1, 1] = 64  # behind the prompt's own
    assert generate(policy, padded, Sampling(1), KEY).lengths.tolist() == [3, 2]
    with pytest.raises(ValueError, match="prompt 1 has 3 tokens, more than the 2 allowed"):
        Prompts.from_lists([[1], [1, 2, 3]], length=2)
    for ids in ([7], [7, 8, 9]):
        with pytest.raises(ValueError, match=f"2 prompts have {len(ids)} ids"):
            Prompts.from_lists([[1], [2]], ids)


def test_a_rollout_without_memory_says_what_to_lower(policy):
    """With its numbers; a setting that a resumed run may change comes first. Other errors stay what they are."""

    def fail(*_):
        raise jax.errors.JaxRuntimeError(message)

    message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes."
    words = r"with 8 slots of 8 tokens, .* of keys and values; lower rollout_memory_gb, with which a run can be resumed"
    with pytest.raises(ValueError, match=words), calling(fail):
        generate(policy, PROMPTS, FREE, KEY)
    assert "rollout_memory_gb" in FREE_ON_RESUME
    message = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"), calling(fail):
        generate(policy, PROMPTS, FREE, KEY)
