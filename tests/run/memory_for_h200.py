"""Compiles updates for an H200 on a machine without a GPU and prints what XLA reserves beside the estimate, as JSON.
`test_plan.py` runs it.
"""

from __future__ import annotations

import dataclasses
import json

import h200
import jax
import jax.numpy as jnp

from qerl_jax.config import Config
from qerl_jax.models.config import ModelConfig
from qerl_jax.rl.advantages import make_batch
from qerl_jax.rl.step import grpo_step
from qerl_jax.run.memory import abstract_trees, estimate_memory
from qerl_jax.types import Batch, Policy, Rollout, TrainState

SMALL = ModelConfig(512, 256, 512, 3, 4, 2, 64, 1e6, 1e-6, True, 4096, (0,), 0)
CASES = [
    (SMALL, {}),
    (SMALL, {"gradient_checkpointing": False}),
    (SMALL, {"dtype": "float32", "max_completion_length": 192}),
    (dataclasses.replace(SMALL, num_layers=6, intermediate_size=1024), {"max_completion_length": 448}),
    (dataclasses.replace(SMALL, vocab_size=64000), {"logprob_chunk_size": 512}),
]


def abstract_update(config: Config, model: ModelConfig) -> tuple[Policy, TrainState, Batch]:
    """Arguments of `grpo_step` as shapes."""
    policy, state = abstract_trees(model, config.weight_format, config)
    rows, width = config.batch_size, config.max_prompt_length + config.max_completion_length

    def batch() -> Batch:
        flat = jnp.zeros(rows, jnp.int32)
        tokens, finish = jnp.zeros((rows, width), jnp.int32), jnp.zeros(rows, jnp.int8)
        rollout = Rollout(tokens, tokens.astype(jnp.float32), flat, flat, finish, flat)
        return make_batch(rollout, jnp.zeros(rows))

    return policy, state, jax.eval_shape(batch)


def estimate(policy: Policy, state: TrainState, config: Config) -> int:
    """What the dry run says the update takes besides its arguments."""
    memory = estimate_memory(policy, state, config)
    return memory.update_state + memory.activations + memory.logits_chunk


def main() -> None:
    fixed = {"model": "x", "weight_format": "nvfp4", "num_iterations": 1, "lora_rank": 8, "logprob_chunk_size": 128}
    sizes = {"batch_size": 8, "num_generations": 4, "max_prompt_length": 64, "max_completion_length": 64}
    rows = []
    for model, change in CASES:
        config = Config(**fixed | sizes | change)
        policy, state, batch = abstract_update(config, model)
        compiled = h200.lower(grpo_step, (state, policy.frozen, batch)).compile()
        found = compiled.memory_analysis()
        real = found.temp_size_in_bytes + found.output_size_in_bytes
        rows.append({"change": change, "real": real, "estimate": estimate(policy, state, config)})
    print(json.dumps(rows))


if __name__ == "__main__":
    h200.use_compilers(None, *h200.BY_PTXAS, "--xla_gpu_autotune_level=0")
    main()
