"""State of a run before its first step, and the parts of it that train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from qerl_jax.config import Config
from qerl_jax.models.formats import Dense, Weight
from qerl_jax.models.lora import LoraConfig
from qerl_jax.programs import program
from qerl_jax.rl.adamw import AdamW
from qerl_jax.types import Policy, TrainState


def init_state(
    policy: Policy, config: Config, optimizer: optax.GradientTransformation | AdamW | None = None
) -> TrainState:
    """The state before the first step.

    Args:
      policy: with the adapters that `config` describes.
      config: settings of the updates; the state's has `max_prompt_length` filled in.
      optimizer: any optax transformation in place of the config's AdamW and its learning rate (`learning_rate` makes
        that schedule). It sees one tree over all layers, `{"lora": …}`, with `"norms"` under `train_norms`, and
        `{"norms": …, "weights": …}` under full fine-tuning, fp32, and gradients that are clipped to `max_grad_norm`
        already. Make it once: programs are compiled for it, and again for another, even of equal settings. Its step is
        computed twice, once to see whether everything stays finite.

    Raises ValueError where the adapters of policy and config differ, naming both values; for an imported adapter with
    dropout: rollout and trainer would no longer be the same policy, and the importance ratio would measure the dropout
    mask; and for full fine-tuning of quantized weights, or with tensor parallelism.
    """
    _check_adapters(policy.lora_config, config)
    config = config.with_max_prompt_length(policy.config.max_position_embeddings)
    weights = None
    if config.is_full:
        refuse_divided(policy.config.tensor_parallel)
        _refuse_quantized(policy.frozen)
        weights = _masters(policy.frozen)
    optimizer = AdamW.of(config) if optimizer is None else optimizer
    base = policy.norms if policy.base_norms is None else policy.base_norms
    keep_reference = config.trains_norms or policy.base_norms is not None
    return TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        norms=policy.norms,
        lora=policy.lora,
        opt_state=_initial(
            optimizer, trained_trees(policy.lora, policy.norms, weights, config), policy.config.num_layers
        ),
        reference_norms=base if keep_reference else None,
        model=policy.config,
        config=config,
        optimizer=optimizer,
        weights=weights,
    )


def _initial(optimizer: optax.GradientTransformation | AdamW, trained: dict[str, Any], layers: int) -> Any:
    """The optimizer's state before the first update. The config's AdamW treats every array by itself, so one program
    makes the part of each layer, in place of two dispatches for each of hundreds of arrays. Where it is
    traced, as for a memory estimate, which starts no device, it is the plain function: a program asks the devices.
    """
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trained))
    if is_traced or not isinstance(optimizer, AdamW):
        return optimizer.init(trained)
    parts = [at_layer(trained, layer) for layer in range(layers)]
    parts += [outside_layers(trained)] if "weights" in trained else []
    return from_layers([_initial_part(optimizer, part) for part in parts])


# Arguments whose values do not matter are kept, so that the results are committed to a device where the arguments are.
@program(keep_unused=True)
def _initial_part(optimizer: AdamW, trained: dict[str, Any]) -> Any:
    return optimizer.init(trained)


@jax.jit
def _masters(frozen: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), frozen)


@program
def compute_copy(weights: Any, frozen: Any) -> Any:
    """The trained weights of full fine-tuning as the model computes with them: in the dtypes of `frozen`, the policy's
    own, whose values are not read.
    """
    return jax.tree.map(lambda weight, leaf: weight.astype(leaf.dtype), weights, frozen)


def current_policy(policy: Policy, state: TrainState) -> Policy:
    """The policy in a run's `state`, noise-free and in the compute dtype, to sample from or to evaluate.

    Args:
      policy: the policy with which the run began.
      state: state of the run.
    """
    frozen = policy.frozen if state.weights is None else compute_copy(state.weights, policy.frozen)
    return policy.replace(frozen=frozen, norms=state.norms, lora=state.lora)


def refuse_divided(tensor_parallel: int) -> None:
    """Raise ValueError for full fine-tuning with tensor parallelism: a checkpoint would hold the weights in the order
    in which devices have them.
    """
    if tensor_parallel > 1:
        raise ValueError(
            f"weight_format 'full' trains all weights of a model on one GPU, not with tensor_parallel_size "
            f"{tensor_parallel}: train adapters, with another weight_format"
        )


def _refuse_quantized(frozen: Any) -> None:
    for weight in jax.tree.leaves(frozen, is_leaf=lambda node: isinstance(node, Weight)):
        if isinstance(weight, Weight) and not isinstance(weight, Dense):
            raise ValueError(
                f"weight_format 'full' trains unquantized weights, the policy's are {type(weight).__name__}: load it "
                "with weight_format 'bf16'"
            )


def _check_adapters(found: LoraConfig, config: Config) -> None:
    wanted = config.lora
    if found.dropout > 0:
        raise ValueError(
            f"the adapter has lora_dropout {found.dropout}: with dropout the trainer's policy differs from the one "
            "that sampled, so the ratio would measure the dropout mask; set lora_dropout to 0 in adapter_config.json"
        )
    if config.is_full and found.rank:
        raise ValueError(
            f"weight_format 'full' trains all weights and no adapters, the policy's have rank {found.rank}: load it "
            "with LoraConfig(rank=0)"
        )
    if found.rank != wanted.rank:
        raise ValueError(f"the policy's adapters have rank {found.rank}, the config has lora_rank {wanted.rank}")
    if found.rank == 0:
        return
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


def trained_trees(lora: Any, norms: Any, weights: Any, config: Config) -> dict[str, Any]:
    """What the optimizer changes: the adapters, and the layer norms under `train_norms`; or all weights."""
    if config.is_full:
        return {"norms": norms, "weights": weights}
    return {"lora": lora, "norms": norms} if config.train_norms else {"lora": lora}


def at_layer(tree: Any, layer: int) -> Any:
    """One layer's part of a tree of parameters, gradients or optimizer state: each `{"layers": {i: …}, …}` in it
    becomes `{"layers": {0: …}}` with this layer's entry, so that the parts of all layers have the same structure.
    """

    def one(node: Any) -> Any:
        return {"layers": {0: node["layers"][layer]}} if _has_layers(node) else node

    return jax.tree.map(one, tree, is_leaf=_has_layers)


def outside_layers(tree: Any) -> Any:
    """The part of such a tree that belongs to no layer: each `{"layers": {i: …}, …}` in it without the layers."""
    return jax.tree.map(lambda node: node | {"layers": {}} if _has_layers(node) else node, tree, is_leaf=_has_layers)


def from_layers(trees: Sequence[Any]) -> Any:
    """The inverse of `at_layer` over all layers, in their order, followed by `outside_layers` where it holds anything;
    what is the same in every part comes from the first.
    """

    def join(*nodes: Any) -> Any:
        if not _has_layers(nodes[0]):
            return nodes[0]
        layers = [node["layers"][0] for node in nodes if node["layers"]]
        outside = {name: value for node in nodes for name, value in node.items() if name != "layers"}
        return {"layers": dict(enumerate(layers)), **outside}

    return jax.tree.map(join, *trees, is_leaf=_has_layers)


def _has_layers(node: Any) -> bool:
    return isinstance(node, dict) and "layers" in node
