"""Layers divided over two devices, of a CPU simulated ones, against whole ones. `test_tensor_parallel.py` runs it.

    python divided.py MODEL CASE …

Prints a line of JSON for each case: its name, and what it found.
"""

import dataclasses
import functools
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import typecheck

typecheck.install()  # before the package is imported

import jax
import jax.numpy as jnp
import numpy as np
import runs
from helpers import randomized, with_norm_offsets
from qerl_kernels.formats import PackedNvfp4
from qerl_kernels.nvfp4_matmul.packing import pack, unpack
from rich.console import Console
from updates import LENGTH, make_batch, make_config

from qerl_jax import Engine, Policy, Sampling, generate, grpo_step, init_state, keys, make_update_plan, token_logprobs
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.orbax import Checkpointer
from qerl_jax.checkpoint.reader import on_devices
from qerl_jax.compilation import committed
from qerl_jax.models.config import LAYER_NORMS, TensorSpec, tensors_of
from qerl_jax.models.formats import Weight
from qerl_jax.models.lora import LoraConfig
from qerl_jax.models.trees import weight_trees
from qerl_jax.parallel import Replicas
from qerl_jax.partition import bytes_on_device, division_of
from qerl_jax.programs import record
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.rl.optimizer import whole_of
from qerl_jax.rollout.engine import rehearse
from qerl_jax.run.hooks import Hooks
from qerl_jax.run.memory import memory_report
from qerl_jax.run.prepare import load as load_run
from qerl_jax.run.rehearsal import rehearse_run, rehearse_step
from qerl_jax.train import train

DEVICES, RANK, ROWS = 2, 4, 22
PROMPTS, SAMPLING = [[5, 6, 7, 8], [9, 10, 11], [3]], Sampling(10, num_generations=3)
ENGINE = Engine(slots=4, chunk=4)  # so that some slots are filled again
KEY = keys.for_step(0, keys.Purpose.SAMPLE, 0)
MODEL = Path(sys.argv[1])
COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-[a-z]+)(?:-start)?\(")


@functools.cache
def policies() -> list[Policy]:
    """A policy of packed NVFP4 on one device and the same on two, with random adapters and norms."""
    whole, found = load(1), []
    for count in (1, DEVICES):
        policy = load(count)

        def tensor(spec: TensorSpec, layer: int | None, count: int = count) -> Any:
            return on_devices(at(whole, spec, layer), spec, count, packed)

        policy = policy.replace(frozen=weight_trees(policy.config, tensor)[0])
        policy = with_norm_offsets(randomized(policy, 1), 2)
        found.append(committed(policy, count).replace(tokenizer=None))
    return found


def load(count: int) -> Policy:
    return load_policy(MODEL, "nvfp4", LoraConfig(RANK), jnp.float32, tensor_parallel=count)


def at(policy: Policy, spec: TensorSpec, layer: int | None) -> Any:
    tree = policy.norms if spec.path[0] in LAYER_NORMS else policy.frozen
    return functools.reduce(
        lambda node, name: node[name], (*([] if layer is None else ["layers", layer]), *spec.path), tree
    )


def slices() -> dict[str, Any]:
    """Parts of layer 1's tensors, packed on each device, that are not the bytes of its heads or features."""
    model, wrong = load(1), []
    specs = [spec for spec in tensors_of(model.config) if division_of(spec.path)]
    for spec in specs:
        whole = at(model, spec, 1)
        divided = on_devices(whole, spec, DEVICES, packed)
        for device in range(DEVICES):
            own = jax.tree.map(lambda leaf, device=device: leaf.addressable_shards[device].data, divided)
            own = unpack(own) if isinstance(own, PackedNvfp4) else own
            pairs = zip(jax.tree.leaves(own), jax.tree.leaves(whole), strict=True)
            if not all(np.array_equal(part, expected(np.asarray(leaf), spec, device)) for part, leaf in pairs):
                wrong.append(f"{spec.path} on device {device}")
    gate_up = next(spec for spec in specs if "gate_up_proj" in spec.path)
    several = at(model, gate_up, 1)
    scales = several.global_scale.at[-1].multiply(2)  # of the second device's last row
    several = on_devices(dataclasses.replace(several, global_scale=scales), gate_up, DEVICES, packed)
    tensors = ["/".join(spec.path[1:]) for spec in specs]
    return {"tensors": tensors, "wrong": wrong, "uniform": [divided.uniform, several.uniform]}


def expected(array: np.ndarray, spec: TensorSpec, device: int) -> np.ndarray:
    """A device's part of a tensor's array."""
    if spec.path[1] in ("o_proj", "down_proj"):
        return array if array.ndim == 1 else np.split(array, DEVICES, axis=1)[device]
    ends = np.cumsum(list(spec.part_rows().values()))
    return np.concatenate([np.split(part, DEVICES)[device] for part in np.split(array, ends[:-1])])


def packed(part: Any) -> Any:
    return pack(part) if isinstance(part, Weight) else part


def completions() -> dict[str, Any]:
    one, two = policies()
    rollouts = [generate(policy, PROMPTS, SAMPLING, KEY, ENGINE) for policy in (one, two)]
    logprobs = [
        token_logprobs(policy, rollout.tokens, rollout.attention_mask)
        for policy, rollout in zip((one, two), rollouts, strict=True)
    ]
    drawn = np.asarray(rollouts[0].completion_mask)[:, 1:]
    return {
        "sampled": np.array_equal(rollouts[0].tokens, rollouts[1].tokens),
        "distinct": len({tuple(row) for row in np.asarray(rollouts[0].tokens).tolist()}),
        "logprobs": difference(rollouts[0].logprobs, rollouts[1].logprobs),
        "token_logprobs": difference(*(np.where(drawn, x, 0) for x in logprobs)),
    }


def update() -> dict[str, Any]:
    """Two updates of several micro-batches with KL, capped weights and trained norms; the first layer recomputes,
    where it is divided."""
    config = make_config(
        batch_size=ROWS, num_iterations=2, importance_sampling_cap=1.2, beta=0.1, train_norms=True, max_grad_norm=0.3,
        lora_rank=RANK,
    )  # fmt: skip
    one, two = policies()
    batch = jax.device_put(make_batch(one.config.vocab_size, 0, ROWS), jax.devices()[0])  # as a gathered one
    after = []
    for policy, recomputed in ((one, 0), (two, 1)):
        state = init_state(policy, config)
        plan = make_update_plan(state, policy.frozen, longest=LENGTH)
        pack = dataclasses.replace(plan.pack, suffixes=5, prefixes=5)
        plan = dataclasses.replace(plan, pack=pack, recomputed=recomputed)
        after.append(grpo_step(state, policy.frozen, batch, plan))
    (first, metrics), (second, own) = after
    divided = whole_of(second)
    return {
        "on": jax.default_backend(),
        "state": difference(whole_of(first), divided),
        "moved": difference(one.lora, first.lora),
        "metrics": max(abs(float(own[name]) / float(value) - 1) for name, value in metrics.items() if value),
        "bytes": sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(divided)),
        "wanted_bytes": bytes_on_device(divided, DEVICES),
        "whole_bytes": bytes_on_device(divided),
        "collectives": collectives(two, state, batch, plan),
        "devices": sorted({len(leaf.sharding.device_set) for leaf in jax.tree.leaves(init_state(two, config))}),
        "restored": restored(second, init_state(one, config), init_state(two, config)),
    }


def restored(state: Any, *others: Any) -> float:
    """How far a state is from what states on one device and on two read of its checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Checkpointer(directory, 1)
        checkpoints.save(state)
        return max(difference(whole_of(Checkpointer(directory, None).restore(own)), whole_of(state)) for own in others)


def collectives(policy: Policy, state: Any, batch: Any, plan: Any) -> dict[str, list[str]]:
    """Program of a rollout or an update -> the kinds of its collectives."""
    recorded = record(rehearse, policy, len(PROMPTS), 4, SAMPLING, KEY, ENGINE)
    recorded += record(grpo_step, state, policy.frozen, batch, plan)
    found = {}
    for each in recorded:
        text = each.traced.lower().compile().as_text()
        found.setdefault(each.function.__name__, set()).update(COLLECTIVE.findall(text))
    return {name: sorted(kinds) for name, kinds in found.items()}


def run() -> dict[str, Any]:
    """A step of training on two devices, another one from its checkpoint, and the last one read by one device."""
    with tempfile.TemporaryDirectory() as directory:
        return _run(Path(directory))


def _run(directory: Path) -> dict[str, Any]:
    (directory / "reward.py").write_text("def reward(completions, **_):\n    return list(map(len, completions))\n")
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(8)]
    (directory / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = {"model": str(MODEL), "dataset": str(directory / "problems.jsonl"), "max_prompt_length": 120}
    changes |= {"reward_funcs": (f"{directory / 'reward.py'}:reward",), "reward_weights": None}
    changes |= {"weight_format": "bf16", "num_iterations": 1, "train_norms": False, "beta": 0.0}
    changes |= {"dynamic_sampling": False}
    place = directory / "run"
    for steps in (1, 2):
        config = runs.config(place, **changes, max_steps=steps, resume="auto")
        state = train(config, Console(quiet=True), replicas=Replicas(tensor_parallel=DEVICES))
    whole, policy = runs.final_arrays(place), load_run(config, tensor_parallel=DEVICES)
    ahead, known, replicas = {}, {}, Replicas(tensor_parallel=DEVICES)
    record(rehearse_run, config, Hooks(), None, replicas, known=ahead)
    trained = committed(policy, DEVICES), state, make_update_plan(state, policy.frozen)
    record(rehearse_step, config, Hooks(), *trained, replicas, known=known)
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(policy.frozen))
    return {
        "steps": [row["step"] for row in read_metrics(place)],
        "rewards": [row["reward"] for row in read_metrics(place)],
        "weights": [own, memory_report(config, tensor_parallel=DEVICES).memory.weights],
        "restored": difference(list(whole.values()), state),
        "unforeseen": sorted({function.__name__ for function, *_ in ahead.keys() ^ known.keys()}),
        "moved": max(float(np.abs(array).max()) for name, array in whole.items() if name.endswith(".b")),
    }


def difference(a: Any, b: Any) -> float:
    """The largest of two trees' arrays."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max()) for x, y in pairs)


def main(cases: list[str]) -> None:
    for case in cases:
        print(json.dumps({case: {"slices": slices, "completions": completions, "update": update, "run": run}[case]()}))


if __name__ == "__main__":
    main(sys.argv[2:])
