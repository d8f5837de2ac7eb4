"""`batch_invariant`: a completion's bits, whatever runs beside it; and that without it they do change."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers import fp32_policy, randomized

from qerl_jax.io.assets import model_path
from qerl_jax.rollout import decode
from qerl_jax.rollout.engine import generate
from qerl_jax.rollout.plan import Engine
from qerl_jax.types import Policy, Prompts, Sampling

LENGTHS, WIDTH, KEY = [3, 200, 40, 1, 90, 8], 200, jax.random.key(5)  # long enough for XLA to cut sums otherwise


def rollout(policy: Policy, chosen: list[int], group: int, engine: Engine) -> dict[tuple[int, int], tuple]:
    """(prompt, place in the group) -> its tokens and log-probabilities."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 500, length).tolist() for length in LENGTHS]
    some = Prompts.from_lists([prompts[p] for p in chosen], ids=chosen, length=WIDTH)
    out = generate(policy, some, Sampling(12, num_generations=group), KEY, engine)
    rows = [(p, g) for p in chosen for g in range(group)]
    return {row: (np.asarray(out.tokens[i]), np.asarray(out.logprobs[i])) for i, row in enumerate(rows)}


@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
def test_rows_are_the_same_bits_whatever_runs_beside_them(weight_format):
    """The bundled policy in fp32: 18 rows at once, against four in three slots and other chunks."""
    policy = randomized(fp32_policy(model_path("tiny"), weight_format=weight_format), 0)
    equal = {}
    for invariant in (True, False):
        many = rollout(policy, [0, 1, 2, 3, 4, 5], 3, Engine(batch_invariant=invariant))
        few = rollout(policy, [4, 0], 2, Engine(slots=3, chunk=5, batch_invariant=invariant))
        equal[invariant] = [np.array_equal(a, b) for row in few for a, b in zip(few[row], many[row], strict=True)]
    assert all(equal[True])
    assert not all(equal[False]), "this machine would not show a difference"


def test_each_prompt_is_prefilled_alone(monkeypatch):
    """In a call whose shape its own length decides; without the mode they go together."""
    policy = randomized(fp32_policy(model_path("tiny")), 0)
    prefill, seen = decode.prefill, []

    def watched(policy, held, tokens, lengths, places, width, batch_invariant):
        seen.append((len(tokens), len(lengths), width, batch_invariant))
        return prefill(policy, held, tokens, lengths, places, width, batch_invariant)

    monkeypatch.setattr(decode, "prefill", watched)
    rollout(policy, [0, 2, 4], 1, Engine(batch_invariant=True))
    assert seen == [(16, 1, 16, True), (48, 1, 48, True), (96, 1, 96, True)]
    rollout(policy, [0, 2, 4], 1, Engine())
    assert len(seen) == 4 and seen[3][0] == 256
