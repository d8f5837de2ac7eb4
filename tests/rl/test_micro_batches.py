"""Packing of sequences into micro-batches, prompts once, and attention of what is packed."""

import collections
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import dense, visible

from qerl_jax.models.config import ModelConfig
from qerl_jax.rl.flash_attention import views
from qerl_jax.rl.head import HeadShape, _to_places, head_logprobs
from qerl_jax.rl.micro_batches import (
    Assignment,
    PackShape,
    assign,
    divide,
    pack,
    packed_tokens,
    predictors,
    prompts_of,
)
from qerl_jax.rl.segment_attention import segment_attention, segment_attention_backward
from qerl_jax.types import Sampling


def members(rows: np.ndarray) -> list[int]:
    return sorted(rows[rows >= 0].tolist())


@pytest.mark.parametrize("seed", range(6))
def test_every_sequence_lies_in_one_micro_batch_that_holds_it(seed):
    rng = np.random.default_rng(seed)
    few = {"short": 14, "suffixes_beside_long": 2} if seed % 2 else {}
    shape = PackShape(64, int(rng.integers(1, 5)), 5, 40, 15, 25, **few)
    prompts = rng.integers(0, 9, 30)
    prompt_lengths = rng.integers(1, 16, 9)[prompts]
    lengths = np.where(rng.random(30) < 0.2, 0, prompt_lengths + rng.integers(0, 25, 30))
    found = assign(lengths, prompt_lengths, prompts, shape)
    assert members(found.rows) == np.flatnonzero(lengths).tolist()
    assert found.rows.shape == found.prefix_of.shape == (len(found.rows), 5)
    for rows, prefix_of in found.micro_batches():
        used = rows >= 0
        assert used.tolist() == sorted(used, reverse=True)
        rows, prefix_of = rows[used], prefix_of[used]
        assert prefix_of.tolist() == sorted(prefix_of), "the sequences of a prefix are neighbours"
        pairs = set(zip(prompts[rows].tolist(), prefix_of.tolist(), strict=True))
        assert len(pairs) == len({prompt for prompt, _ in pairs}) == len({prefix for _, prefix in pairs})
        segments = np.concatenate([prompt_lengths[rows], (lengths - prompt_lengths)[rows]])
        assert len(pairs) <= shape.prefixes and len(rows) <= (2 if few and segments.max() > 14 else 5)
        first = np.unique(prompts[rows], return_index=True)[1]
        tokens = (lengths - prompt_lengths)[rows].sum() + prompt_lengths[rows][first].sum()
        assert tokens <= shape.tokens


def test_assignment_by_hand():
    """Prompts of 4 tokens: prompt 0 with completions of 2, 5, 1, prompt 1 with 4 and 1."""
    lengths, prompts = np.array([6, 8, 9, 5, 5]), np.array([0, 1, 0, 0, 1])
    of_prompts = np.full(5, 4)
    found = assign(lengths, of_prompts, prompts, PackShape(12, 2, 3, 9, 4, 5))
    # 4 + 5 + 2 + 1 = 12 tokens, then prompt 1: 4 + 4 + 1.
    assert found.rows.tolist() == [[2, 0, 3], [1, 4, -1]] and found.prefix_of.tolist() == [[0, 0, 0], [0, 0, 0]]
    # The sequence of prompt 1 with 4 + 4 tokens fits beside it in 20, the next 1 no longer.
    found = assign(lengths, of_prompts, prompts, PackShape(20, 2, 4, 9, 4, 5))
    assert found.rows.tolist() == [[2, 0, 3, 1], [4, -1, -1, -1]] and found.prefix_of[0].tolist() == [0, 0, 0, 1]
    nothing = assign(np.zeros(2, int), np.ones(2, int), np.zeros(2, int), PackShape(20, 2, 4, 9, 4, 5))
    assert nothing.rows.tolist() == [[-1, -1, -1, -1]]
    long_first = assign(np.array([3, 3, 3, 10]), np.ones(4, int), np.array([0, 0, 0, 1]), PackShape(20, 2, 4, 10, 1, 9))
    assert long_first.rows.tolist() == [[3, 0, 1, 2]]  # ten tokens are more than nine


def test_few_sequences_lie_beside_a_long_segment():
    """Prompts of 2 tokens; completions of 9, 3, 3, 3 of one prompt, then 3 of another. 4 tokens are short."""
    lengths, prompts = np.array([11, 5, 5, 5, 5]), np.array([0, 0, 0, 0, 1])
    shape = PackShape(40, 2, 4, 11, 2, 9, short=4, suffixes_beside_long=2)
    assert assign(lengths, np.full(5, 2), prompts, shape).rows.tolist() == [[0, 1, -1, -1], [2, 3, 4, -1]]
    # A long prompt counts as well as a long completion; and with a short first sequence, no long one joins the two.
    long_prompt = assign(np.array([8, 8, 8]), np.full(3, 5), np.zeros(3, int), replace(shape, longest_prefix=5))
    assert long_prompt.rows.tolist() == [[0, 1, -1, -1], [2, -1, -1, -1]]
    late = assign(np.array([5, 5, 5, 8]), np.full(4, 2), np.array([0, 0, 0, 1]), shape)
    assert late.rows.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1]]


def test_kinds_of_micro_batches():
    shape = PackShape(40, 2, 8, 10, 2, 9, short=4, suffixes_beside_long=3)
    few, many = PackShape(40, 2, 3, 10, 2, 9), PackShape(40, 2, 8, 6, 2, 4)
    assert [shape.holding(n) for n in (1, 4, 5, 9)] == [many, many, few, few]
    assert set(shape.kinds()) == {few, many} and [shape.most_suffixes(n) for n in (4, 5)] == [8, 3]
    assert few.holding(1) == few.holding(9) == few and few.kinds() == [few] and few.most_suffixes(9) == 3
    own, half = replace(shape, has_half=True), PackShape(20, 2, 8, 6, 2, 4)
    assert own.kinds() == [many, few, half] and half.kinds() == [half] and not shape.half()
    assert replace(few, prefixes=7, has_half=True).kinds()[1:] == [replace(few, tokens=20, prefixes=4)]


@pytest.mark.parametrize(
    ("last", "replicas", "wanted"),
    [
        ((5, 3), 1, {16: [[0, 1], [2, 3]], 8: [[4, 5]]}),
        ((5, 4), 1, {16: [[0, 1], [2, 3], [4, 5]]}),
        ((5, 3), 2, {16: [[0, 1], [2, 3]], 8: [[4, 5]]}),
        ((5, 4), 2, {16: [[0, 1], [2, 3]], 8: [[4], [5]]}),
        ((5, 4, 4), 2, {16: [[0, 1], [2, 3]], 8: [[4], [5, 6]]}),
        ((5, 5, 4), 2, {16: [[0, 1], [2, 3], [4, 5, 6]]}),
        ((5, 4), 3, {16: [[0, 1], [2, 3], [4, 5]]}),
        ((5, 4), 6, {8: [[0], [1], [2], [3], [4], [5]]}),
        ((), 2, {16: [[0, 1], [2, 3]]}),
        ((), 4, {8: [[0], [1], [2], [3]]}),
    ],
)
def test_a_last_round_of_halves_by_hand(last, replicas, wanted):
    """Four sequences of 8 tokens fill two micro-batches of 16. Prompts of 2 tokens, each another one."""
    lengths = np.array([8, 8, 8, 8, *last])
    arguments = lengths, np.full(len(lengths), 2), np.arange(len(lengths))
    shape = PackShape(16, 4, 4, 8, 2, 6, has_half=True)
    found = divide(*arguments, shape, replicas)
    expected = [(tokens, rows) for tokens, some in wanted.items() for rows in some]
    assert [(some.kind.tokens, members(some.assignment.rows)) for some in found] == expected
    long = divide(*arguments, replace(shape, short=2, suffixes_beside_long=4), replicas)
    assert [some.kind.tokens for some in long] == [16] * len(long), "halves are for short segments"


def test_halves_hold_the_last_round_and_make_no_more_rounds():
    """Of one replica the last micro-batch is a half just where its sequences fit one."""
    halved = collections.Counter()
    for seed, replicas in itertools.product(range(40), (1, 2, 3, 5)):
        rng = np.random.default_rng(seed)
        few = {"short": 14, "suffixes_beside_long": 4} if seed % 2 else {}
        shape = PackShape(128, 5, int(rng.integers(5, 12)), 40, 15, 25, **few, has_half=True)
        prompts = rng.integers(0, 9, 30)
        prompt_lengths = rng.integers(1, 16, 9)[prompts]
        lengths = np.where(rng.random(30) < 0.2, 0, prompt_lengths + rng.integers(0, 25, 30))
        arguments = lengths, prompt_lengths, prompts
        found, wholes = (divide(*arguments, each, replicas) for each in (shape, shape.wholes()))
        found_rows, whole_rows = ([members(some.assignment.rows) for some in each] for each in (found, wholes))
        assert whole_rows == [members(rows) for rows in assign(*arguments, shape).rows]
        assert sorted(itertools.chain(*found_rows)) == np.flatnonzero(lengths).tolist()

        def needs(rows: list[int], lengths=lengths, prompts=prompts, own=prompt_lengths) -> np.ndarray:
            of_prompts = dict(zip(prompts[rows].tolist(), own[rows].tolist(), strict=True))
            suffixes = lengths[rows] - own[rows]
            tokens, longest = suffixes.sum() + sum(of_prompts.values()), max(suffixes.max(), *of_prompts.values())
            return np.array([tokens, len(of_prompts), len(rows), longest])

        def room(kind: PackShape) -> np.ndarray:
            return np.array([kind.tokens, kind.prefixes, kind.suffixes, kind.longest_segment])

        assert all(np.all(needs(rows) <= room(some.kind)) for rows, some in zip(found_rows, found, strict=True))
        assert {some.kind for some in found} <= set(shape.kinds())
        before = (len(wholes) - 1) // replicas * replicas
        assert found_rows[:before] == whole_rows[:before]
        assert 0 < len(found) - before <= replicas
        kinds = {some.kind for some in found[before:]}
        is_half = shape.half() in kinds
        assert len(kinds) == 1 or not is_half
        assert replicas > 1 or is_half == np.all(needs(whole_rows[-1]) <= room(shape.half()))
        halved[replicas, is_half] += 1
    assert len(halved) == 8, halved


def test_a_layout_has_room_for_every_prefix_and_suffix():
    """32 and 128 at least, so that most groups share their programs; beyond, a power of two."""
    for sizes, room in {(2, 8): (32, 128), (33, 128): (64, 128), (32, 129): (32, 256)}.items():
        roomy = PackShape(2048, *sizes, 9, 3, 6).roomy()
        assert (roomy.prefixes, roomy.suffixes) == room


def test_prefixes_and_suffixes_that_are_full_open_a_micro_batch():
    lengths, prompt_lengths = np.full(3, 4), np.full(3, 2)
    one = assign(lengths, prompt_lengths, np.arange(3), PackShape(99, 1, 3, 9, 3, 6))
    assert one.rows.tolist() == [[0, -1, -1], [1, -1, -1], [2, -1, -1]]
    two = assign(lengths, prompt_lengths, np.zeros(3, int), PackShape(99, 1, 2, 9, 3, 6))
    assert two.rows.tolist() == [[0, 1], [2, -1]]


def test_what_is_longer_than_announced_is_refused():
    shape = PackShape(20, 2, 2, 10, 5, 5)
    for length, prompt, error in ((11, 5, "a sequence of 11 tokens, at most 10"), (7, 6, "a prompt of 6 .* at most 5")):
        with pytest.raises(ValueError, match=error):
            assign(np.array([length]), np.array([prompt]), np.array([0]), shape)
    with pytest.raises(ValueError, match="a completion of 6 tokens, at most 5"):
        assign(np.array([9]), np.array([3]), np.array([0]), shape)
    with pytest.raises(ValueError, match=r"8 tokens cannot hold .* 9"):
        PackShape(8, 2, 2, 9, 4, 5)


def test_prompts_are_equal_where_all_their_tokens_are():
    tokens = np.array([[1, 2, 3], [1, 2, 4], [1, 5, 3], [1, 2, 3], [1, 2, 3]])
    assert prompts_of(tokens, np.array([2, 2, 2, 3, 2])).tolist() == [0, 0, 1, 2, 0]


def test_places_of_tokens_by_hand():
    """Rows 2 and 0 share a prompt of three tokens, row 1 has one of its own token. What the head finds there is
    written into these three rows; the empty segment writes none, of a batch without another row either. Gradients go
    to the places that predict.
    """
    tokens = jnp.array([[10, 11, 12, 13, 0], [20, 21, 0, 0, 0], [10, 11, 12, 30, 31]])
    shape = PackShape(12, 3, 4, 5, 4, 5)
    rows = Assignment(np.array([2, 0, 1, -1]), np.array([0, 0, 1, 0]))
    packed = pack(rows, jnp.array([4, 2, 5]), jnp.array([3, 1, 3]), shape.tokens, shape.prefixes)
    assert packed.lengths.tolist() == [3, 1, 0, 2, 1, 1, 0]
    assert packed.starts.tolist()[3:6] == [4, 6, 7] and packed.rows.tolist() == [2, 0, 1, 3]
    assert packed.real.tolist() == [True] * 8 + [False] * 4
    assert packed_tokens(tokens, packed).tolist() == [10, 11, 12, 20, 30, 31, 13, 21, 0, 0, 0, 0]
    assert packed.positions.tolist()[:8] == [0, 1, 2, 0, 3, 4, 3, 1]
    assert predictors(packed, 2)[:3].tolist() == [[2, 4], [2, 6], [3, 7]]

    rng, own = np.random.default_rng(0), np.array([[2, -1], [3, -1], [2, 4]])  # places that predict rows 0, 1, 2
    x, head = rng.normal(size=(12, 8)), rng.normal(size=(40, 8))
    logits = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) @ head.T
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    targets, mask = np.array([[13, 0], [21, 0], [30, 31]], np.int32), own >= 0
    frozen = {"norm": jnp.ones(8), "head": jnp.asarray(head, jnp.float32)}
    shape = HeadShape(ModelConfig(40, 8, 8, 1, 1, 1, 8, 1e6, 1e-6, True, 64, (0,), 0), "float32", 4)
    arguments = frozen, jnp.asarray(x, jnp.float32), packed, {"targets": targets, "mask": mask}, jnp.zeros((3, 2))
    found = head_logprobs(shape, Sampling(1).distribution, *arguments)
    np.testing.assert_allclose(found, np.where(mask, logp[own, targets], 0), atol=1e-5)

    of_suffixes = jnp.array([[True, True], [True, False], [True, False], [False, False]])
    d_states, d_hidden, places = rng.normal(size=(12, 8)).astype(np.float32), np.zeros((12, 8)), [2, 4, 2, 3]
    np.add.at(d_hidden, places, d_states[:4])  # the first tokens of rows 2 and 0 have one predictor
    wanted, places = jnp.array([0, 1, 2, 4, *[8] * 8]), jnp.array([*places, *[12] * 8])
    found = _to_places(jnp.asarray(d_states), wanted, places, of_suffixes, packed)
    np.testing.assert_allclose(found, d_hidden, atol=1e-6)


CASES = {
    "groups": ([9, 6, 7, 12, 10, 4], [4, 4, 4, 7, 7, 2], [0, 0, 0, 1, 1, 2]),
    "no common prompt": ([5, 8, 3], [2, 5, 3], [0, 1, 2]),
    "prompts of a token": ([1, 6, 4], [1, 1, 1], [0, 0, 1]),
    "empty completions": ([4, 4], [4, 4], [0, 0]),
    "nothing": ([0, 0], [3, 3], [0, 0]),
    "full": ([20, 20], [10, 10], [0, 0]),
}
LONG = {  # with a shape of their own
    "long prompt": ([20, 3, 3], [17, 2, 2], [0, 1, 2]),
    "long completion": ([20, 3, 3], [3, 1, 2], [0, 1, 2]),
}
SHAPES = {"long prompt": PackShape(26, 3, 6, 20, 17, 3), "long completion": PackShape(26, 3, 6, 20, 3, 17)}


@pytest.mark.parametrize("case", CASES | LONG)
def test_attention_and_its_gradient_are_those_of_each_sequence(case):
    """On the filler and of it: zero. The filler is NaN."""
    lengths, prompt_lengths, prompts = map(np.array, (CASES | LONG)[case])
    heads, kv_heads, width = 4, 2, 3
    shape = SHAPES.get(case, PackShape(36, 3, 6, 20, 10, 10, short=4, suffixes_beside_long=2))
    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(shape.tokens, n, width)), jnp.float32) for n in (heads, kv_heads, kv_heads, heads)
    )
    for some in assign(lengths, prompt_lengths, prompts, shape).micro_batches():
        packed = pack(some, jnp.asarray(lengths), jnp.asarray(prompt_lengths), shape.tokens, shape.prefixes)
        heads_of = [jnp.where(packed.real[:, None, None], x, jnp.nan) for x in (q, k, v)]
        kind = shape.holding(int(packed.lengths.max()))
        out, statistics = jax.jit(segment_attention, static_argnums=4)(*heads_of, packed, kind)
        backward = jax.jit(segment_attention_backward, static_argnums=7)
        gradients = backward(*heads_of, out, statistics, d_out, packed, kind)
        for found, wanted in zip((out, *gradients), dense(q, k, v, d_out, visible(some, packed)), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_cudnn_sees_rows_that_hold_every_segment():
    """cuDNN reads offsets only where a row has two segments or more."""
    for longest, sequences, suffixes in itertools.product((2, 7, 512, 4608), (1, 2, 3, 16), (1, 2, 15, 16, 31)):
        tokens = -(-sequences * longest // 128) * 128
        few = {"short": longest // 3 + 1, "suffixes_beside_long": suffixes // 2 + 1} if longest > 2 else {}
        shape = PackShape(tokens, suffixes // 2 + 1, suffixes, longest, longest // 2, longest - longest // 2, **few)
        has_half = tokens // 2 >= shape.holding(1).longest
        for kind in replace(shape, has_half=has_half).kinds():
            rows, row_segments = views(kind)
            assert row_segments >= 2 and rows * row_segments >= kind.prefixes + kind.suffixes, (kind, rows)
            assert kind.tokens % rows == 0 and kind.tokens // rows >= kind.longest_segment, (kind, rows)
