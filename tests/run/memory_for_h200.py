"""Compiles updates for an H200, and for an RTX 4090, on a machine without a GPU and prints as JSON what XLA reserves
beside the estimate, and what the optimizer launches and reserves. `test_memory.py` runs it.

    python memory_for_h200.py {few,all}
"""

import collections
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import h200
import jax
import jax.numpy as jnp
import moments
from jax.stages import Compiled
from qerl_kernels.gpu import Gpu, gpu_of

from qerl_jax.config import Config
from qerl_jax.models.config import ModelConfig
from qerl_jax.partition import bytes_on_device
from qerl_jax.programs import Recorded, record
from qerl_jax.rl import flash_attention, segment_attention
from qerl_jax.rl.activations import Keeps
from qerl_jax.rl.advantages import make_batch
from qerl_jax.rl.plan import make_update_plan, recomputation
from qerl_jax.rl.step import grpo_step
from qerl_jax.run import memory
from qerl_jax.run.abstract import abstract_trees
from qerl_jax.run.rehearsal import rollout_shape
from qerl_jax.types import Batch, Policy, TrainState

SMALL = ModelConfig(512, 256, 512, 3, 4, 2, 64, 1e6, 1e-6, True, 4096, (0,), 0)
FEW = [(SMALL, {}), (dataclasses.replace(SMALL, vocab_size=64000), {"logprob_chunk_size": 512})]
OTHERS = [
    (SMALL, {"update_memory_gb": 0.017, "max_completion_length": 1984}),
    (SMALL, {"update_memory_gb": 1e-9, "max_completion_length": 1984}),
    (SMALL, {"max_completion_length": 192, "tokens_per_micro_batch": 1024}),
    (dataclasses.replace(SMALL, num_layers=6, intermediate_size=1024), {"max_completion_length": 448}),
]

ADA = gpu_of("NVIDIA GeForce RTX 4090", 89, 128)
FEW_OF_ADA = [  # the tier that multiplies many rows by XLA
    (dataclasses.replace(SMALL, hidden_size=512, intermediate_size=2048), {"update_memory_gb": 1e-9})
]
OTHERS_OF_ADA = [(SMALL, {})]


def abstract_update(config: Config, model: ModelConfig) -> tuple[Policy, TrainState, Batch]:
    """Arguments of `grpo_step` as shapes."""
    policy, state = abstract_trees(model, config.weight_format, config)
    rollout = rollout_shape(config.batch_size, config.max_prompt_length + config.max_completion_length)
    return policy, state, jax.eval_shape(make_batch, rollout, jax.ShapeDtypeStruct((config.batch_size,), jnp.float32))


def estimate(policy: Policy, state: TrainState, config: Config) -> int:
    """What the dry run says the update takes besides its arguments and the gradient."""
    planned = memory.estimate_memory(policy, state, config)
    return planned.update_plan.kept_bytes + planned.update_plan.working_bytes


def kept_bytes(state: TrainState, frozen: Any, batch: Batch) -> int:
    """Bytes that a layer keeps for its backward pass, besides its input."""
    [keep] = [each for each in record(grpo_step, state, frozen, batch) if each.function.__name__ == "forward_and_keep"]
    return bytes_on_device(keep.results[1])


def kind_of(each: Recorded) -> str | Keeps:
    """The function of a program; for a layer's backward pass, what the layer keeps."""
    if each.function.__name__ != "backward":
        return each.function.__name__
    kept = each.args[5]
    return Keeps.INPUT if kept is None else Keeps.ALL if kept.gate_up is not None else Keeps.ALL_BUT_GATE_UP


def reserved(state: TrainState, frozen: Any, batch: Batch, compiled: Callable[[Recorded], Compiled]) -> int:
    """Most bytes at a time of what the layers of a micro-batch keep and what XLA reserves for a program besides."""
    plan, temporary = make_update_plan(state, frozen, longest=batch.tokens.shape[1]), collections.Counter()
    for each in record(grpo_step, state, frozen, batch):
        if each.function.__name__ in ("forward", "forward_and_keep", "head_loss", "backward"):
            size = compiled(each).memory_analysis().temp_size_in_bytes
            temporary[kind_of(each)] = max(temporary[kind_of(each)], size)
    layers = plan.layers(state.model.num_layers)
    gate_up = frozen["embed_tokens"].dtype.itemsize * plan.pack.tokens * 2 * state.model.intermediate_size
    kept = kept_bytes(state, frozen, batch) if plan.recomputed < len(layers) else gate_up
    sizes = {"input": 4 * plan.pack.tokens * state.model.hidden_size, "gate_up": gate_up, "rest": kept - gate_up}
    programs = moments.Programs(
        lambda keeps: temporary["forward" if keeps is Keeps.INPUT else "forward_and_keep"],
        lambda keeps: temporary[keeps],
        temporary["head_loss"],
    )
    return moments.peak(layers, sizes, programs)


def of_optimizer(state: TrainState, frozen: Any, batch: Batch, compiled: Callable[[Recorded], Compiled]) -> dict:
    """Kernels that the optimizer's step launches for each layer of a model of one part (`rl.state.in_parts`), and the
    most memory that XLA reserves for one of its programs.
    """
    names = ("add_squares", "stays_finite", "apply")
    programs = [compiled(each) for each in record(grpo_step, state, frozen, batch) if each.function.__name__ in names]
    assert len(programs) == len(names)
    texts = (program.as_text() for program in programs)
    kernels = sum(len(re.findall(r" (?:fusion|copy)\(", text[text.index("ENTRY") :])) for text in texts)
    return {
        "optimizer_kernels": kernels / state.model.num_layers,
        "optimizer_bytes": max(program.memory_analysis().temp_size_in_bytes for program in programs),
    }


def without_cudnn() -> None:
    """Stand-ins for cuDNN's attention, which this machine lacks, of the same shapes and with its memory in the backward
    pass: 8 bytes for each dim of each query head at each place of each segment, as read from programs compiled on an
    H100 (14B: 0.57, 4.36 GB of 2304 tokens in 10 segments of 1152 and 4608 in 22 of 4608; 32B: 1.04 of 2304 in 10).
    """

    def forward(q, k, v, segments, parameters):
        slots = segments[0].size
        statistics = jnp.zeros((slots, q.shape[2], q.shape[1]), jnp.float32)
        return q * k[0, 0, 0, 0] * v[0, 0, 0, 0], statistics + q[0, 0, 0, 0]

    def backward(q, k, v, statistics, out, d_out, segments, parameters):
        kv_heads, (_, width, heads, head_dim) = k.shape[2], q.shape
        work = jnp.full((segments[0].size, width, heads, head_dim, 2), d_out[0, 0, 0, 0], jnp.float32)
        mean = (statistics.mean() + jax.lax.optimization_barrier(work).mean()).astype(q.dtype)
        return [d_out * mean, k * d_out[:, :, :kv_heads], v * (out * q)[:, :, :kv_heads]]

    segment_attention.is_flash = lambda dtype: dtype == jnp.bfloat16
    flash_attention._cudnn_forward, flash_attention._cudnn_backward = forward, backward


def for_gpu(each: Recorded, gpu: Gpu | None = None) -> Compiled:
    """A program compiled for a GPU, None: for an H200."""

    def is_array(argument: Any) -> bool:
        leaves = jax.tree.leaves(argument)
        return not leaves or hasattr(leaves[0], "shape")

    static = [argument for argument in each.args if not is_array(argument)]

    def function(*arguments: Any) -> Any:
        return each.function.__wrapped__(*static, *arguments)

    return h200.lower(jax.jit(function), each.args[len(static) :], gpu=gpu).compile()


def row(model: ModelConfig, change: dict, compiled: Callable[[Recorded], Compiled], with_optimizer: bool) -> dict:
    """What XLA reserves for a config's update, and the estimate."""
    fixed = {"model": "x", "weight_format": "nvfp4", "num_iterations": 1, "lora_rank": 8, "logprob_chunk_size": 128}
    sizes = {"batch_size": 8, "num_generations": 4, "max_prompt_length": 64, "max_completion_length": 64}
    config = Config(**fixed | sizes | change)
    policy, state, batch = abstract_update(config, model)
    real = reserved(state, policy.frozen, batch, compiled)
    about = recomputation(make_update_plan(state, policy.frozen, longest=batch.tokens.shape[1]))
    found = {"change": change, "plan": about, "real": real, "estimate": estimate(policy, state, config)}
    return found | (of_optimizer(state, policy.frozen, batch, compiled) if with_optimizer else {})


def main() -> None:
    without_cudnn()
    of_hopper, of_ada = (FEW, FEW_OF_ADA) if sys.argv[1] == "few" else (FEW + OTHERS, FEW_OF_ADA + OTHERS_OF_ADA)
    rows = [row(model, change, for_gpu, not change) for model, change in of_hopper]
    h200.assume(ADA)
    compiled = functools.partial(for_gpu, gpu=ADA)
    rows += [row(model, change, compiled, False) for model, change in of_ada]
    print(json.dumps(rows))


if __name__ == "__main__":
    h200.use_compilers_to_ptx()
    main()
