"""State of a run before its first step, and the parts of it that train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from qerl_jax.compilation import committed
from qerl_jax.config import Config
from qerl_jax.models.lora import LoraConfig
from qerl_jax.programs import program
from qerl_jax.rl.adamw import AdamW
from qerl_jax.types import Policy, TrainState

_TOGETHER = 4
"""Layers of a part. To dispatch the step of 24 layers took a host with an H200 13 ms in parts of one layer, 9 in parts
of four, and 6 as one program, which took 5.1 s to compile, not 0.9."""


def init_state(
    policy: Policy, config: Config, optimizer: optax.GradientTransformation | AdamW | None = None
) -> TrainState:
    """The state before the first step.

    Args:
      policy: with the adapters that `config` describes.
      config: settings of the updates; the state's has `max_prompt_length` filled in.
      optimizer: any optax transformation in place of the config's AdamW and its learning rate (`learning_rate` makes
        that schedule). It sees one tree over all layers, `{"lora": …}`, with `"norms"` under `train_norms`, fp32, and
        gradients that are clipped to `max_grad_norm` already. Make it once: programs are compiled for it, and again for
        another, even of equal settings. Its step is computed twice, once to see whether everything stays finite.

    Raises ValueError where the adapters of policy and config differ, naming both values, and for an imported adapter
    with dropout: rollout and trainer would no longer be the same policy, and the importance ratio would measure the
    dropout mask.
    """
    _check_adapters(policy.lora_config, config)
    config = config.with_max_prompt_length(policy.config.max_position_embeddings)
    optimizer = AdamW.of(config) if optimizer is None else optimizer
    base = policy.norms if policy.base_norms is None else policy.base_norms
    keep_reference = config.train_norms or policy.base_norms is not None
    state = TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        norms=policy.norms,
        lora=policy.lora,
        opt_state=_initial(optimizer, trained_trees(policy.lora, policy.norms, config), policy.config.num_layers),
        reference_norms=base if keep_reference else None,
        model=policy.config,
        config=config,
        optimizer=optimizer,
    )
    divided = policy.config.tensor_parallel > 1 and not _is_traced(state)
    return committed(state, policy.config.tensor_parallel) if divided else state  # where a checkpoint's arrays will lie


def _initial(optimizer: optax.GradientTransformation | AdamW, trained: dict[str, Any], layers: int) -> Any:
    """The optimizer's state before the first update. The config's AdamW treats every array by itself, so one program
    makes each part, in place of two dispatches for each of hundreds of arrays. Where it is
    traced, as for a memory estimate, which starts no device, it is the plain function: a program asks the devices.
    """
    if _is_traced(trained) or not isinstance(optimizer, AdamW):
        return optimizer.init(trained)
    return from_parts([_initial_part(optimizer, part) for part in in_parts(trained, layers)])


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


# Arguments whose values do not matter are kept, so that the results are committed to a device where the arguments are.
@program(keep_unused=True)
def _initial_part(optimizer: AdamW, trained: dict[str, Any]) -> Any:
    return optimizer.init(trained)


def _check_adapters(found: LoraConfig, config: Config) -> None:
    wanted = config.lora
    if found.dropout > 0:
        raise ValueError(
            f"the adapter has lora_dropout {found.dropout}: with dropout the trainer's policy differs from the one "
            "that sampled, so the ratio would measure the dropout mask; set lora_dropout to 0 in adapter_config.json"
        )
    if found.rank != wanted.rank:
        raise ValueError(f"the policy's adapters have rank {found.rank}, the config has lora_rank {wanted.rank}")
    if found.scale != wanted.scale:
        raise ValueError(
            f"the policy's adapters have the scale {found.scale:g}, the config's lora_alpha and use_rslora give "
            f"{wanted.scale:g}"
        )
    if set(found.target_modules) != set(wanted.target_modules):
        raise ValueError(
            f"the policy's adapters are on {sorted(found.target_modules)}, the config's lora_target_modules are "
            f"{sorted(wanted.target_modules)}"
        )


def trained_trees(lora: Any, norms: Any, config: Config) -> dict[str, Any]:
    """What the optimizer changes: the adapters, and the layer norms under `train_norms`."""
    return {"lora": lora, "norms": norms} if config.train_norms else {"lora": lora}


def in_parts(tree: Any, layers: int) -> list[Any]:
    """A tree of parameters, gradients or optimizer state in parts of a few layers each: each `{"layers": {i: …}, …}` in
    it becomes `{"layers": {0: …, 1: …}}` with the entries of a part's layers, so that nearly all parts have the same
    structure.
    """
    return [_at(tree, range(first, min(first + _TOGETHER, layers))) for first in range(0, layers, _TOGETHER)]


def _at(tree: Any, layers: range) -> Any:
    def one(node: Any) -> Any:
        return {"layers": {i: node["layers"][layer] for i, layer in enumerate(layers)}} if _has_layers(node) else node

    return jax.tree.map(one, tree, is_leaf=_has_layers)


def from_parts(parts: Sequence[Any]) -> Any:
    """The inverse of `in_parts`; what is the same in every part comes from the first."""

    def join(*nodes: Any) -> Any:
        if not _has_layers(nodes[0]):
            return nodes[0]
        return {"layers": dict(enumerate(node["layers"][i] for node in nodes for i in sorted(node["layers"])))}

    return jax.tree.map(join, *parts, is_leaf=_has_layers)


def _has_layers(node: Any) -> bool:
    return isinstance(node, dict) and isinstance(node.get("layers"), dict)
