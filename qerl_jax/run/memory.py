"""Memory estimate of a run from shapes alone: no weights are read, no array of the model's size is allocated."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import jax
from qerl_kernels.gpu import Gpu

from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.of_run import loaded_format
from qerl_jax.checkpoint.safetensors import CheckpointError, open_checkpoint
from qerl_jax.config import Config, ConfigError
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.formats import Dense, PackedNvfp4, Weight
from qerl_jax.parallel import Replicas
from qerl_jax.partition import bytes_on_device
from qerl_jax.rl.plan import UpdatePlan, make_update_plan, within
from qerl_jax.rl.state import trained_trees
from qerl_jax.rollout.shapes import choose_shapes, decode_bytes, prefill_bytes
from qerl_jax.run.abstract import abstract_run, has_weights, tree_size
from qerl_jax.types import Engine, Policy, TrainState


@dataclasses.dataclass(frozen=True)
class ParameterRow:
    """A row of the parameter table.

    Attributes:
      name: description for people, such as "24 projections".
      parameters: number of parameters.
      stored: storage format, such as "Nvfp4" or "float32".
      bytes: bytes on the device.
    """

    name: str
    parameters: int
    stored: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class RolloutMemory:
    """Bytes of a rollout besides weights and state; all 0 where none samples here.

    Attributes:
      sequences: number of sequences decoded together.
      cache: KV cache.
      prefill: activations of the largest prefill.
      logits: logits and sampling of a decode step.
    """

    sequences: int = 0
    cache: int = 0
    prefill: int = 0
    logits: int = 0

    @property
    def peak(self) -> int:
        """Most of them at one time."""
        return self.cache + max(self.prefill, self.logits)


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device, as `estimate_memory` computes them.

    Attributes:
      weights: the frozen base.
      state: adapters, norms, optimizer state.
      rollout, evaluation: what sampling takes in training and in an evaluation.
      gradient: gradient of the trained trees.
      update_state: gradient and next state, which stand beside the last state once all activations are freed.
      update_plan: shape of a micro-batch, the number of layers that recompute, and the bytes of both.
    """

    weights: int
    state: int
    rollout: RolloutMemory
    evaluation: RolloutMemory
    gradient: int
    update_state: int
    update_plan: UpdatePlan

    @property
    def rollout_peak(self) -> int:
        """Peak during the rollout."""
        return self.weights + self.state + self.rollout.peak

    @property
    def evaluation_peak(self) -> int:
        """Peak during an evaluation; 0 without one."""
        return self.weights + self.state + self.evaluation.peak if self.evaluation.sequences else 0

    @property
    def update_peak(self) -> int:
        """Peak during the update."""
        plan = self.update_plan
        return self.weights + self.state + max(self.gradient + plan.kept_bytes + plan.working_bytes, self.update_state)


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The model of a config, its parameters and the memory of its run.

    Attributes:
      model: shapes of the model.
      stored: format of the projections on the device.
      files: bytes of the weight files; None where the directory has none yet.
      parameters: rows of the parameter table.
      memory: memory estimate.
    """

    model: ModelConfig
    stored: str
    files: int | None
    parameters: list[ParameterRow]
    memory: MemoryEstimate


def memory_report(
    config: Config,
    device_bytes: float | None = None,
    replicas: int = 1,
    tensor_parallel: int = 1,
    gpu: Gpu | None = None,
) -> MemoryReport:
    """Parameters and memory of the run that a config describes, on each device, with so much memory (None: no limit),
    of so many replicas with so many devices each. `gpu`: those devices; None: the default one.

    Reads config.json and, where weight files are present, their headers.

    Raises FileNotFoundError or CheckpointError for a model directory that cannot be read, and ValueError if no rollout
    fits.
    """
    directory = model_path(config.model, weights=False)
    policy, state = abstract_run(config, tensor_parallel=tensor_parallel, gpu=gpu)
    return MemoryReport(
        policy.config,
        loaded_format(directory, config.weight_format),
        _file_bytes(directory),
        parameter_rows(policy, state),
        estimate_memory(policy, state, state.config, device_bytes, replicas, gpu),
    )


def _file_bytes(directory: Path) -> int | None:
    if not has_weights(directory):
        return None
    tensors = open_checkpoint(directory)
    return sum(path.stat().st_size for path in {tensors.file_of(name) for name in tensors})


def parameter_rows(policy: Policy, state: TrainState) -> list[ParameterRow]:
    """Rows of the parameter table: projections, embedding, biases, norms, adapters and optimizer state; bytes are those
    on each device.
    """
    model: ModelConfig = policy.config
    held = functools.partial(bytes_on_device, count=model.tensor_parallel)
    dense = policy.dtype.name
    projections: dict[str, list[int]] = {}
    for path, leaf in jax.tree.leaves_with_path(policy.frozen, is_leaf=lambda node: isinstance(node, Weight)):
        if isinstance(leaf, Weight):
            row = projections.setdefault(dense if isinstance(leaf, Dense) else type(leaf).__name__, [0, 0, 0])
            divided = model.tensor_parallel if isinstance(leaf, PackedNvfp4) else 1  # whose shape is a part's
            size = divided * math.prod(leaf.shape)
            row[:] = row[0] + 1, row[1] + size, row[2] + held({entry.key: leaf for entry in path[-2:-1]})
    rows = [
        ParameterRow(f"{number} projections", size, stored, bytes_held)
        for stored, (number, size, bytes_held) in projections.items()
    ]
    tables = [policy.frozen["embed_tokens"], policy.frozen.get("lm_head")]
    name = "embedding (also the head)" if model.tie_word_embeddings else "embedding and head"
    rows.append(ParameterRow(name, tree_size(tables), dense, held(tables)))
    rest = held(policy.frozen) - sum(row.bytes for row in rows)
    others = model.parameter_count() - sum(row.parameters for row in rows) - tree_size(policy.norms)
    named = [*(["biases"] if model.qkv_bias else []), *(["norms of heads"] if model.qk_norm else []), "final norm"]
    stored = dense if named[1:] else policy.frozen["norm"]["weight"].dtype.name
    rows.append(ParameterRow(", ".join(named), others, stored, rest))
    noise = ", noise is added" if state.config.sigma_start > 0 else ""
    trained = "trained" if state.config.train_norms else f"frozen{noise}"
    rows.append(ParameterRow(f"layer norms ({trained})", tree_size(policy.norms), "float32", held(policy.norms)))
    adapters = f"adapters, rank {state.config.lora_rank} (trained)"
    rows.append(ParameterRow(adapters, tree_size(policy.lora), "float32", held(policy.lora)))
    rows.append(ParameterRow("AdamW's moments", tree_size(state.opt_state), "float32", held(state.opt_state)))
    return rows


def refuse_oversized(config: Config, device_bytes: float | None, replicas: int = 1, tensor_parallel: int = 1) -> None:
    """Raise ConfigError where `examined` finds a fault."""
    if fault := examined(config, device_bytes, replicas, tensor_parallel)[1]:
        raise ConfigError(fault)


def examined(
    config: Config, device_bytes: float | None, replicas: int = 1, tensor_parallel: int = 1
) -> tuple[MemoryReport | None, str | None]:
    """The `memory_report` of a run, None where not even a rollout fits, and why rollout or update cannot run in each
    device's memory (None: it has no limit): the numbers, and the smallest larger `tensor_parallel_size`, up to 8, with
    which both can; None where they fit.
    """
    report, fault = _examined(config, device_bytes, replicas, tensor_parallel)
    if fault is None or device_bytes is None:
        return report, fault
    sizes, devices = [size for size in (2, 4, 8) if size > tensor_parallel], replicas * tensor_parallel
    found = next((size for size in sizes if run_fits(config, device_bytes, devices // size or 1, size)), None)
    more = "" if found is None else f"; or divide the layers over more GPUs: --tensor-parallel-size {found}"
    return report, fault + more


def run_fits(
    config: Config, device_bytes: float, replicas: int = 1, tensor_parallel: int = 1, gpu: Gpu | None = None
) -> bool:
    """Whether a config can be divided over so many devices, and its rollout and update fit each one's memory. Arguments
    as of `memory_report`.
    """
    return _examined(config, device_bytes, replicas, tensor_parallel, gpu)[1] is None


def evaluation_fits(
    config: Config, device_bytes: float, replicas: int = 1, tensor_parallel: int = 1, gpu: Gpu | None = None
) -> bool:
    """As `run_fits`, whether weights and adapters fit beside a completion: an evaluation can sample few at a time."""
    try:
        refuse_division(config, tensor_parallel)
        policy, state = abstract_run(config, tensor_parallel=tensor_parallel, gpu=gpu)
        free = device_bytes - bytes_on_device(policy, tensor_parallel)
        lengths = state.config.max_prompt_length, config.max_completion_length
        choose_shapes(policy, 1, 1, *lengths, config.eval_engine.replace(free_bytes=free), gpu)
    except CheckpointError:
        raise
    except ValueError:
        return False
    return True


def refuse_division(config: Config, tensor_parallel: int) -> None:
    """Raise ValueError for a config that does not go with so many devices a process, whatever its model."""
    if config.batch_invariant and tensor_parallel > 2:
        raise ConfigError(
            f"batch_invariant needs tensor_parallel_size 1 or 2, got {tensor_parallel}: more GPUs add in an order that "
            "depends on the row"
        )


def _examined(
    config: Config, device_bytes: float | None, replicas: int, tensor_parallel: int, gpu: Gpu | None = None
) -> tuple[MemoryReport | None, str | None]:
    """`examined` without larger sizes; no report where the layers cannot be so divided, either."""
    try:
        refuse_division(config, tensor_parallel)
        report = memory_report(config, device_bytes, replicas, tensor_parallel, gpu)
    except CheckpointError:
        raise
    except ValueError as error:
        return None, str(error)
    return report, None if device_bytes is None else _oversized(report.memory, config, device_bytes)


def _oversized(memory: MemoryEstimate, config: Config, device_bytes: float) -> str | None:
    """Why an update cannot run in the memory of a device, with the numbers; None where it fits."""
    update = memory.update_plan
    if memory.weights + memory.state + memory.update_state > device_bytes:
        held, more, limit = memory.weights + memory.state, memory.update_state, device_bytes
        held, more, limit = (f"{count / 1e9:.1f} GB" for count in (held, more, limit))
        return (
            f"the update does not fit: beside {held} of weights and state, gradient and next state take {more}, more "
            f"than is left of {limit}"
        )
    if update.lacking_bytes:
        held, activations = memory.weights + memory.state + memory.gradient, update.kept_bytes + update.working_bytes
        held, activations, lacking, limit = (
            f"{count / 1e9:.1f} GB" for count in (held, activations, update.lacking_bytes, device_bytes)
        )
        return (
            f"the update does not fit: beside {held} of weights, state and gradient, one sequence of "
            f"{update.pack.longest} tokens takes {activations} with every layer recomputed, {lacking} more than is "
            f"left of {limit}; lower max_completion_length, max_prompt_length or logprob_chunk_size"
        )
    return None


def estimate_memory(
    policy: Policy,
    state: TrainState,
    config: Config,
    device_bytes: float | None = None,
    replicas: int = 1,
    gpu: Gpu | None = None,
) -> MemoryEstimate:
    """Bytes on a GPU, from shapes alone: on that of the first replica, which has the most prompts. Raises ValueError if
    no rollout fits.

    With e bytes of the compute dtype and the model's L, D, F, V, N query, K key heads of H:

    - weights, state: the arrays themselves. The update makes the next state beside the last, and a gradient.
    - cache: `2 L K H e` for each token of the prompts and completions that the rollout holds at one time
      (`rollout.shapes.choose_shapes`), at most `rollout_memory_gb`; so do the `eval_batch_size` of an evaluation.
    - prefill or logits of a decode step, whichever is more (`rollout.shapes.prefill_bytes`, `decode_bytes`).
    - update: what `rl.plan.make_update_plan` decides from the memory that the rest leaves: activations that the layers
      keep on the device, and what is there besides at the worst moment (a layer's backward pass, or the logits of
      `logprob_chunk_size` tokens and what is made of them; `rl.activations.peak_bytes`).

    Args:
      policy, state: trees of the run, real or abstract.
      config: config of the run.
      device_bytes: memory of the device; None: no limit.
      replicas: devices that share the prompts and micro-batches.
      gpu: the device; None: the default one.
    """
    model: ModelConfig = policy.config
    lengths = config.max_prompt_length, config.max_completion_length
    on_device = functools.partial(bytes_on_device, count=model.tensor_parallel)
    weights, held = on_device(policy.frozen), on_device(state)
    update = make_update_plan(state, policy.frozen, device_bytes, replicas=replicas, gpu=gpu)

    def sampling(problems: int, group: int, engine: Engine) -> RolloutMemory:
        if config.rollout_backend != "jax":  # the KV cache is vLLM's
            return RolloutMemory()
        prompts = Replicas(count=replicas).largest_share(problems)
        shapes = choose_shapes(policy, prompts, group, *lengths, within(update, engine), gpu)
        prefill = prefill_bytes(policy, prompts, lengths[0], config.batch_invariant, gpu)
        return RolloutMemory(shapes.slots, shapes.cache_bytes, prefill, decode_bytes(model, shapes.slots))

    evaluated = config.eval_samples, config.eval_num_generations, config.eval_engine
    trained = on_device(trained_trees(state.lora, state.norms, config))
    return MemoryEstimate(
        weights=weights,
        state=held,
        rollout=sampling(config.num_prompts, config.num_generations, config.engine),
        evaluation=sampling(*evaluated) if config.eval_dataset else RolloutMemory(),
        gradient=trained,
        update_state=2 * trained + on_device(state.opt_state),
        update_plan=update,
    )
