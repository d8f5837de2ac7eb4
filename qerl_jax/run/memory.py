"""Memory estimate of a run from shapes alone: no weights are read (with `kv_cache_dtype` fp8_e4m3, only the q, k and v
biases), no array of the model's size is allocated.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from qerl_kernels import dispatch
from qerl_kernels.formats import MXFP4_BLOCK, NVFP4_BLOCK, Mxfp4, Nvfp4
from qerl_kernels.nvfp4_matmul.packing import pack

from qerl_jax.config import Config, ConfigError
from qerl_jax.io import hf_config
from qerl_jax.io.assets import model_path
from qerl_jax.io.load import build_policy, load_biases
from qerl_jax.io.safetensors import INDEX_FILE, SINGLE_FILE, open_checkpoint
from qerl_jax.models.config import FUSED_PROJECTIONS, LAYER_NORMS, ModelConfig
from qerl_jax.models.formats import Dense, Nf4, PackedNvfp4, Weight
from qerl_jax.models.formats.nf4 import NF4_BLOCK
from qerl_jax.rl.plan import UpdatePlan, device_bytes, free_for_activations, make_update_plan
from qerl_jax.rl.state import init_state
from qerl_jax.rollout.shapes import cache_note, choose_shapes
from qerl_jax.types import Policy, TrainState


@dataclasses.dataclass(frozen=True)
class Part:
    """A line of the parameter table.

    Attributes:
      name: what it is.
      parameters: numbers it stands for.
      stored: in which format.
      bytes: what it takes on the device.
    """

    name: str
    parameters: int
    stored: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on the device, by `estimate_memory`.

    Attributes:
      weights: the frozen base.
      state: adapters, norms, optimizer state.
      sequences: decoded together in a rollout; not bytes.
      cache: their keys and values.
      eval_sequences: decoded together in an evaluation; not bytes; 0 without one.
      eval_cache: their keys and values.
      eval_logits: logits and sampling of an evaluation's decode step.
      logits: logits and sampling of a rollout's decode step.
      gradient: gradient of the trained trees.
      update_state: gradient, and the next state beside the last, when no activation is left.
      update_plan: shape of a micro-batch and the layers that are recomputed; not bytes.
      activations: kept by the layers for their backward pass.
      working: temporary memory of the update's largest program: a layer's backward pass, or the head.
    """

    weights: int
    state: int
    sequences: int
    cache: int
    eval_sequences: int
    eval_cache: int
    eval_logits: int
    logits: int
    gradient: int
    update_state: int
    update_plan: UpdatePlan
    activations: int
    working: int

    @property
    def rollout(self) -> int:
        """Most at one time during the rollout."""
        return self.weights + self.state + self.cache + self.logits

    @property
    def evaluation(self) -> int:
        """Most at one time during an evaluation; 0 without one."""
        return self.weights + self.state + self.eval_cache + self.eval_logits if self.eval_sequences else 0

    @property
    def update(self) -> int:
        """Most at one time during the update."""
        return self.weights + self.state + max(self.gradient + self.activations + self.working, self.update_state)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a config asks for: its model's shape, what is trained, where the bytes go.

    Attributes:
      model: shape.
      stored: format of the projections on the device.
      files: bytes of the weight files; None where the directory has none yet.
      parts: the parameter table.
      memory: the estimate.
      cache_note: what `kv_cache_dtype` does not reach (`rollout.shapes.cache_note`).
    """

    model: ModelConfig
    stored: str
    files: int | None
    parts: list[Part]
    memory: Memory
    cache_note: str | None


def plan(config: Config) -> Plan:
    """The plan of a config. Reads config.json, and of weight files that are there the headers; for FP8 keys and values
    their biases, too (without files no layer counts as an exception).

    Raises FileNotFoundError or CheckpointError for a model directory that cannot be read.
    """
    directory = model_path(config.model)
    model = hf_config.model_config(directory)
    where = directory / "config.json"
    scheme = hf_config.quantization_format(hf_config.read_json(where), str(where))
    stored = "nvfp4" if scheme else config.weight_format or "bf16"
    policy, state = abstract_trees(model, stored, config)
    files = _file_bytes(directory)
    if config.kv_cache_dtype != "auto" and files is not None:
        policy = _with_biases(policy, directory)
    return Plan(
        model,
        stored,
        files,
        parameter_table(policy, state),
        estimate_memory(policy, state, config),
        cache_note(policy, config.kv_cache_dtype),
    )


def _with_biases(policy: Policy, directory: Path) -> Policy:
    """An abstract policy with the real biases, which decide where keys and values may be FP8; a few KB to read."""
    biases = load_biases(directory, policy.config, policy.dtype)

    def layer(i: int, frozen: dict[str, Any]) -> dict[str, Any]:
        attention = frozen["self_attn"]
        return {**frozen, "self_attn": {**attention, "qkv_proj": {**attention["qkv_proj"], "bias": biases[int(i)]}}}

    layers = {i: layer(i, frozen) for i, frozen in policy.frozen["layers"].items()}
    return policy.replace(frozen={**policy.frozen, "layers": layers})


def _file_bytes(directory: Path) -> int | None:
    if not any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    tensors = open_checkpoint(directory)
    return sum(path.stat().st_size for path in {tensors.file_of(name) for name in tensors})


def abstract_trees(model: ModelConfig, stored: str, config: Config) -> tuple[Policy, TrainState]:
    """Policy and first state of a run with `ShapeDtypeStruct` for arrays, by tracing the code that makes the real ones.

    Args:
      stored: format of the projections.
    """

    def build() -> tuple[Policy, TrainState]:
        weights = _zero_weights(model, stored, jnp.dtype(config.dtype), config.matmul_kernel)
        policy = build_policy(model, weights, config.lora, config.seed)
        return policy, init_state(policy, config)

    return jax.eval_shape(build)


def _zero_weights(model: ModelConfig, stored: str, dtype: DTypeLike, matmul_kernel: str) -> dict[str, Any]:
    shapes, d = model.projection_shapes(), model.hidden_size

    def fused(*parts: str) -> Weight:
        weight = _zeros(stored, sum(shapes[part][0] for part in parts), shapes[parts[0]][1], dtype)
        runs = matmul_kernel == "mosaic_gpu" or (
            matmul_kernel == "auto" and dispatch.missing_for_mosaic_gpu(dtype) is None
        )
        return pack(weight) if runs and isinstance(weight, Nvfp4 | Mxfp4) else weight

    def layer() -> dict[str, Any]:
        return {
            "qkv_proj": fused(*FUSED_PROJECTIONS["qkv_proj"]),
            "qkv_bias": jnp.zeros(sum(shapes[part][0] for part in FUSED_PROJECTIONS["qkv_proj"]), dtype),
            "o_proj": fused("o_proj"),
            "gate_up_proj": fused(*FUSED_PROJECTIONS["gate_up_proj"]),
            "down_proj": fused("down_proj"),
            **{norm: jnp.zeros(d, jnp.float32) for norm in LAYER_NORMS},
        }

    table = jnp.zeros((model.vocab_size, d), dtype)
    return {
        "embed_tokens": table,
        "norm": jnp.zeros(d, jnp.float32),
        "lm_head": None if model.tie_word_embeddings else table,
        "layers": [layer() for _ in range(model.num_layers)],
    }


def _zeros(stored: str, n: int, k: int, dtype: DTypeLike) -> Weight:
    match stored:
        case "nvfp4":
            scales = jnp.zeros((n, k // NVFP4_BLOCK), jnp.float8_e4m3fn)
            return Nvfp4(jnp.zeros((n, k // 2), jnp.uint8), scales, jnp.ones(n, jnp.float32), True)
        case "mxfp4":
            return Mxfp4(jnp.zeros((n, k // 2), jnp.uint8), jnp.zeros((n, k // MXFP4_BLOCK), jnp.uint8))
        case "nf4":
            return Nf4(jnp.zeros((n, k // 2), jnp.uint8), jnp.zeros((n, k // NF4_BLOCK), jnp.float32))
        case _:
            return Dense(jnp.zeros((n, k), dtype))


def tree_bytes(tree: Any) -> int:
    """Bytes of every array of a tree, abstract or real."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def tree_size(tree: Any) -> int:
    """Numbers in a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def parameter_table(policy: Policy, state: TrainState) -> list[Part]:
    """Where the parameters of a policy are, and what they take: frozen by format, norms, adapters, optimizer state."""
    model: ModelConfig = policy.config
    projections: list[Weight] = jax.tree.leaves(policy.frozen, is_leaf=lambda node: isinstance(node, Weight))
    projections = [leaf for leaf in projections if isinstance(leaf, Weight)]
    dense = policy.dtype.name
    parts = [
        Part(
            f"{len(projections)} projections",
            model.num_layers * sum(n * k for n, k in model.projection_shapes().values()),
            dense if isinstance(projections[0], Dense) else type(projections[0]).__name__,
            tree_bytes(projections),
        )
    ]
    tables = [policy.frozen["embed_tokens"], policy.frozen.get("lm_head")]
    name = "embedding (also the head)" if model.tie_word_embeddings else "embedding and head"
    parts.append(Part(name, tree_size(tables), dense, tree_bytes(tables)))
    rest = tree_bytes(policy.frozen) - sum(part.bytes for part in parts)
    biases = model.parameter_count() - sum(part.parameters for part in parts) - tree_size(policy.norms)
    parts.append(Part("biases, final norm", biases, dense, rest))
    trained = "trained" if state.config.train_norms else "frozen, noise is added"
    parts.append(Part(f"layer norms ({trained})", tree_size(policy.norms), "float32", tree_bytes(policy.norms)))
    if state.config.lora_rank:
        rank = state.config.lora_rank
        parts.append(
            Part(f"adapters, rank {rank} (trained)", tree_size(policy.lora), "float32", tree_bytes(policy.lora))
        )
    parts.append(Part("AdamW's moments", tree_size(state.opt_state), "float32", tree_bytes(state.opt_state)))
    return parts


def refuse_what_cannot_fit(config: Config) -> None:
    """Raise ConfigError, with the numbers, if the update of a config cannot run in the memory of this device."""
    if device_bytes() is None:
        return
    memory = plan(config).memory
    update = memory.update_plan
    if update.lacking_bytes:
        held, activations = memory.weights + memory.state + memory.gradient, memory.activations + memory.working
        held, activations, lacking, limit = (
            f"{count / 1e9:.1f} GB" for count in (held, activations, update.lacking_bytes, device_bytes())
        )
        raise ConfigError(
            f"the update does not fit: beside {held} of weights, state and gradient, one sequence of "
            f"{update.pack.longest} tokens takes {activations} with every layer recomputed, {lacking} more than is "
            f"left of {limit}; lower max_completion_length, max_prompt_length or logprob_chunk_size"
        )


def estimate_memory(policy: Policy, state: TrainState, config: Config, device_limit: float | None = None) -> Memory:
    """Bytes on a GPU, from shapes (`policy` and `state` may be abstract). Raises ValueError if no rollout fits.

    With e bytes of the compute dtype and the model's L, D, F, V, N query, K key heads of H:

    - weights, state: the arrays themselves. The update makes the next state beside the last, and a gradient.
    - cache: `2 L K H e` (1 for e in layers whose keys and values are FP8) for each token of the prompts and completions
      that the rollout holds at one time (`rollout.shapes.choose_shapes`), at most `rollout_memory_gb`; so do the
      `eval_batch_size` of an evaluation.
    - logits of a decode step: `3 · 4 V` for each sequence decoded together (logits, noise, scores).
    - update: what `rl.plan.make_update_plan` decides from the memory that the rest leaves: activations that the layers
      keep, and the largest program's own (a layer's backward pass, or the logits of `logprob_chunk_size` tokens and
      what is made of them).

    Args:
      policy, state, config: of the run.
      device_limit: bytes of the device that the update is planned for; None: of this one.
    """
    model: ModelConfig = policy.config
    e = policy.dtype.itemsize
    width = config.max_prompt_length + config.max_completion_length
    lengths = config.max_prompt_length, config.max_completion_length
    rollout = choose_shapes(policy, config.num_prompts, config.num_generations, *lengths, config.engine)
    evaluation = None
    if config.eval_dataset:
        evaluation = choose_shapes(
            policy, config.eval_samples, config.eval_num_generations, *lengths, config.eval_engine
        )
    trained = tree_bytes(state.lora) + (tree_bytes(state.norms) if config.train_norms else 0)
    held = tree_bytes(policy.frozen) + tree_bytes(state) + trained
    update = make_update_plan(model, e, config, config.batch_size, width, free_for_activations(held, device_limit))
    return Memory(
        weights=tree_bytes(policy.frozen),
        state=tree_bytes(state),
        sequences=rollout.slots,
        cache=rollout.cache_bytes,
        eval_sequences=evaluation.slots if evaluation else 0,
        eval_cache=evaluation.cache_bytes if evaluation else 0,
        eval_logits=12 * model.vocab_size * evaluation.slots if evaluation else 0,
        logits=12 * model.vocab_size * rollout.slots,
        gradient=trained,
        update_state=2 * trained + tree_bytes(state.opt_state),
        update_plan=update,
        activations=update.kept_bytes,
        working=update.working_bytes + _xla_matmul_bytes(policy, update),
    )


def _xla_matmul_bytes(policy: Policy, update: UpdatePlan) -> int:
    """Bytes that a layer takes more where XLA multiplies in place of a kernel: the largest projection, dequantized to
    the compute dtype, and the fp32 results of a forward pass that runs again.
    """
    weights = jax.tree.leaves(policy.frozen["layers"], is_leaf=lambda node: isinstance(node, Weight))
    by_xla = [leaf for leaf in weights if isinstance(leaf, Weight) and not isinstance(leaf, PackedNvfp4)]
    quantized = [leaf.shape for leaf in by_xla if not isinstance(leaf, Dense)]
    model, found = policy.config, policy.dtype.itemsize * max((n * k for n, k in quantized), default=0)
    if by_xla and update.recomputed:
        found += 8 * update.pack.tokens * (2 * model.intermediate_size + model.hidden_size)
    return found
