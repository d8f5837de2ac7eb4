"""The products of an fp32 model ask for fp32 in every program: a GPU's default is tf32, three digits, and on the CPU
nobody would notice.

Nor would anybody on a GPU if tests set a default precision for what they test: they may for what it is held against.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.config import Config
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.formats import WEIGHT_FORMATS
from qerl_jax.programs import record, shapes_of
from qerl_jax.rl.advantages import make_batch
from qerl_jax.rl.step import grpo_step
from qerl_jax.rollout import decode
from qerl_jax.rollout.prefill import prefill
from qerl_jax.rollout.shapes import RolloutShapes
from qerl_jax.run.abstract import abstract_trees
from qerl_jax.types import Rollout, Sampling

MODEL = ModelConfig(64, 128, 128, 2, 4, 2, 32, 1e4, 1e-6, True, 64, (0,), 0)
ROWS, WIDTH = 4, 8


def products(program: jax.stages.Lowered) -> list[str]:
    """The lines of its matrix products of fp32 numbers."""
    lines = [line for line in program.as_text().splitlines() if "dot_general" in line]
    return [line for line in lines if "xf32>" in line.rsplit(" : ", 1)[1].split("->")[0]]


@pytest.mark.parametrize(
    "stored", [pytest.param(name, marks=[] if name == "nvfp4" else pytest.mark.nightly) for name in WEIGHT_FORMATS]
)
def test_no_product_of_an_fp32_model_is_left_to_the_default(stored):
    """Prefill, decode, batch-invariant or not, and the update with its backward pass. The products of other formats:
    `models/test_linear.py`.
    """
    sizes = {"batch_size": ROWS, "num_generations": 2, "max_prompt_length": WIDTH, "max_completion_length": WIDTH}
    config = Config(model="x", weight_format=stored, dtype="float32", lora_rank=8, train_norms=True, beta=0.1, **sizes)
    policy, state = abstract_trees(MODEL, stored, config)
    flat, tokens = jnp.zeros(ROWS, jnp.int32), jnp.zeros((ROWS, 2 * WIDTH), jnp.int32)
    rollout = Rollout(tokens, tokens.astype(jnp.float32), flat, flat, flat.astype(jnp.int8), flat)
    step = record(grpo_step, state, policy.frozen, shapes_of(make_batch(rollout, jnp.zeros(ROWS))))
    texts, programs = [[line for each in step for line in products(each.traced.lower())]], []
    shapes = RolloutShapes(ROWS, ROWS, WIDTH, WIDTH, ROWS, 1, 0)
    prompt_cache, slots = jax.eval_shape(lambda: decode.allocate(jax.random.key(0), MODEL, policy.dtype, shapes))
    policy = policy.replace(lora=jax.eval_shape(decode.cast_lora, policy))
    for invariant in (False, True):
        arrays = np.zeros(16, np.int32), *2 * (np.zeros(ROWS, np.int32),)
        prefills = record(prefill, policy, prompt_cache, *arrays, WIDTH, invariant)
        programs += [each.traced.lower() for each in prefills if each.function.__name__ == "prefill_layer"]
        programs.append(
            decode.decode_chunk.lower(policy, prompt_cache, slots, Sampling(WIDTH).distribution, 2, invariant)
        )
    for found in [*texts, *map(products, programs)]:
        assert len(found) >= 20  # a layer: four weights, seven adapters, scores and values
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in found), found
