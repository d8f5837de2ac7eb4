"""`batch_invariant`: a completion's bits, whatever runs beside it; and that without it they do change."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers import fp32_policy, randomized

from qerl_jax.io.assets import model_path
from qerl_jax.rollout.engine import generate
from qerl_jax.rollout.plan import Engine
from qerl_jax.types import Policy, Prompts, Sampling

LENGTHS, WIDTH, KEY = [3, 17, 40, 1, 33, 8], 40, jax.random.key(5)


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
        few = rollout(policy, [4, 1], 2, Engine(slots=3, chunk=5, batch_invariant=invariant))
        equal[invariant] = [np.array_equal(a, b) for row in few for a, b in zip(few[row], many[row], strict=True)]
    assert all(equal[True])
    assert not all(equal[False]), "this machine would not show a difference"
