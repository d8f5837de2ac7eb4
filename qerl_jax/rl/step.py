"""One rollout's update as a pure function: `grpo_step(state, frozen, batch, plan) -> (state, metrics)`.

A plain function over a few compiled programs, one for each kind of work (embedding, a layer forward, a layer backward,
head, optimizer): what is compiled does not depend on the depth, no weight is stacked or copied, and the number of
micro-batches is that of the sequences at hand.

Axes: B sequences, S sequences of a micro-batch, T its tokens, C completion tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float32

from qerl_jax.compilation import as_committed, settled
from qerl_jax.config import Config
from qerl_jax.models.lora import without_adapter
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.programs import program
from qerl_jax.rl import head, layer
from qerl_jax.rl.activations import Keeps
from qerl_jax.rl.checks import checked
from qerl_jax.rl.loss import LossSettings, TokenLoss
from qerl_jax.rl.metrics import over_updates
from qerl_jax.rl.micro_batches import Assignment, MicroBatch, Packed, PackShape, divide, prompts_of
from qerl_jax.rl.optimizer import apply_gradients, parts_of, zeros_like
from qerl_jax.rl.plan import UpdatePlan, make_update_plan, out_of_memory
from qerl_jax.rl.reduction import over_replicas
from qerl_jax.rl.state import from_parts, in_parts, trained_trees
from qerl_jax.types import Batch, TrainState


def grpo_step(
    state: TrainState,
    frozen: Any,
    batch: Batch,
    plan: UpdatePlan | None = None,
    *,
    drawn: int | None = None,
    token_loss: TokenLoss | None = None,
    with_reference: bool = False,
    replicas: Replicas = ALONE,
) -> tuple[TrainState, dict[str, Float32[Array, ""]]]:
    """Make `num_iterations` updates from one scored rollout, and move `step` and `cursor` of the state on.

    The first update's ratio is `exp(logp − stop_gradient(logp))`; its log-probabilities are the `old_logp` of those
    that follow, so no extra forward pass is made. An update whose loss or gradient is not finite changes nothing and
    is counted.

    It packs the sequences by their lengths, which it reads, so that it cannot be called under `jit`, and waits for the
    result. Sequences without a token in the loss are left out, and so are those of advantage 0 (equal rewards) where
    the loss has no gradient for them (`LossSettings.vanishes_with_advantage`): neither their forward nor their backward
    pass is computed, but their tokens stay in the denominators.

    Args:
      state: from `init_state` or the last step.
      frozen: `policy.frozen`; never donated, never copied.
      batch: `batch_size` rows.
      plan: how it is divided into micro-batches, and what of the forward pass runs twice to save memory, from
        `make_update_plan`, which knows the device's memory; None: as if that had no limit.
      drawn: problems taken from the data stream for the batch, by which `state.cursor` moves on; None: those of the
        batch.
      token_loss: a loss of your own (`TokenLoss`); None: that of `loss_type` (`built_in_loss`). Make it once, outside
        of the loop: programs are compiled for it, and again for another, unless the two compare as equal.
      with_reference: compute `reference_logp` for the token loss although `beta` is 0.
      replicas: the processes that share the work, each with the same state, batch and plan. Each computes some of the
        micro-batches, the same ones in all updates; gradients and metrics are summed before the optimizer's step, which
        each makes.

    Returns:
      The next state, and scalar metrics averaged over the updates (`skipped` summed). `tokens` are those in the loss,
      `trained_tokens` those of sequences that were computed, over which `entropy` and `sampling/*` are means; NaN
      without any.

    Raises:
      ValueError: the batch contradicts the config, naming both values, or lacks the behaviour log-probabilities that
        the importance weight needs (`rl.checks`).
      MemoryError: the device has too little memory, with what to lower in the next plan. `state` is as it was.
      ReplicaError: another replica failed.
    """
    batch = checked(batch, state.config)
    plan = make_update_plan(state, frozen, longest=batch.tokens.shape[1]) if plan is None else plan
    drawn = batch.tokens.shape[0] // state.config.num_generations if drawn is None else drawn
    batch = as_committed(batch, frozen)  # of one device, where a rollout was gathered or a part of it replaced
    state, frozen, batch = settled((state, frozen, batch))
    config, dtype = state.config, frozen["embed_tokens"].dtype.name
    work = Work(
        plan=plan,
        keeps=plan.layers(state.model.num_layers),
        shape=layer.LayerShape(state.model, dtype, plan.pack),
        head_shape=head.HeadShape(state.model, dtype, config.logprob_chunk_size),
        loss=LossSettings.of(config, token_loss),
        needs_reference=with_reference or config.beta > 0,
        frozen=frozen,
        batch=batch,
        replicas=replicas,
    )
    try:
        return jax.block_until_ready(_step(state, work, drawn))  # a lack of memory may show only here
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(out_of_memory(plan)) from error


def _step(state: TrainState, work: Work, drawn: int) -> tuple[TrainState, dict[str, Float32[Array, ""]]]:
    config: Config = state.config
    micro_batches = assigned(work.plan, work.batch, work.loss.vanishes_with_advantage, work.replicas)
    room = work.plan.pack.longest_prefix, work.plan.pack.longest_suffix
    inputs = head.inputs_of(config.loss_type, config.max_completion_length, room, work.batch)
    reference = _reference(state, work, *inputs, micro_batches) if work.needs_reference else None
    old, updates = zeros_like(inputs[1]["weights"]), []
    for iteration in range(config.num_iterations):
        state, metrics, logprobs = _update(state, work, *inputs, micro_batches, old, iteration > 0, reference)
        updates.append(metrics)
        old = logprobs if iteration == 0 else old
    (step, cursor), metrics = next_position(state.step, state.cursor, np.int32(drawn), updates)
    return state.replace(step=step, cursor=cursor), metrics


class Work(NamedTuple):
    """What the passes of a step share.

    Attributes:
      plan: how the update is divided.
      keeps: what each layer keeps between the passes.
      shape: what the layers' programs are compiled for, but for the kind of micro-batch.
      head_shape: what the head's are.
      loss: the loss.
      needs_reference: whether anything reads the reference's log-probabilities.
      frozen: `policy.frozen`.
      batch: the batch.
      replicas: those that share the micro-batches.
    """

    plan: UpdatePlan
    keeps: list[Keeps]
    shape: layer.LayerShape
    head_shape: head.HeadShape
    loss: LossSettings
    needs_reference: bool
    frozen: Any
    batch: Batch
    replicas: Replicas

    def layer_shape(self, kind: PackShape) -> layer.LayerShape:
        """What the layers' programs are compiled for in a kind of micro-batch."""
        return dataclasses.replace(self.shape, pack=kind)

    def embed(self, sequences: head.Sequences, some: MicroBatch) -> tuple[Array, Packed]:
        """The residual stream before the first layer, and the layout."""
        prefixes, embedding = self.plan.pack.roomy().prefixes, self.frozen["embed_tokens"]
        return head.embed(some.kind.tokens, prefixes, embedding, sequences, some.assignment)


def assigned(plan: UpdatePlan, batch: Batch, needs_advantage: bool, replicas: Replicas = ALONE) -> list[MicroBatch]:
    """The sequences of each micro-batch of this replica: those with a token in the loss and, under `needs_advantage`,
    an advantage other than 0. For the shapes of a batch (`programs.record`) an empty one of each kind.
    """
    suffixes = plan.pack.roomy().suffixes
    if isinstance(batch.lengths, jax.ShapeDtypeStruct):
        none = Assignment(np.zeros(0, np.int32), np.zeros(0, np.int32)).with_room(suffixes)
        return [MicroBatch(none, kind) for kind in plan.pack.kinds()]
    tokens, lengths, prompt_lengths, mask, advantages = jax.device_get(
        (batch.tokens, batch.lengths, batch.prompt_lengths, batch.loss_mask, batch.advantages)
    )
    trains = mask.any(axis=1) & ((advantages != 0) | (not needs_advantage))
    lengths = np.where(trains, lengths, 0)
    found = divide(lengths, prompt_lengths, prompts_of(tokens, prompt_lengths), plan.pack, replicas.count)
    own = (found[i] for i in replicas.share(len(found)))
    return [MicroBatch(some.assignment.with_room(suffixes), some.kind) for some in own]


without_adapters = program(without_adapter)


def layers_of(lora: Any, norms: Any) -> list[dict[str, Any]]:
    """Adapters and layer norms of each layer."""
    return [{"lora": lora["layers"][i], "norms": own} for i, own in sorted(norms["layers"].items())]


def head_of(frozen: Any) -> dict[str, Any]:
    """The weights behind the last layer, of `Policy.frozen`."""
    return {"norm": frozen["norm"]["weight"], "head": frozen.get("lm_head", frozen["embed_tokens"])}


def _reference(
    state: TrainState,
    work: Work,
    sequences: head.Sequences,
    completions: head.LossInputs,
    micro_batches: list[MicroBatch],
) -> Array:
    """Log-probabilities of the model's checkpoint, [B, C]."""
    norms = state.norms if state.reference_norms is None else state.reference_norms
    layers = layers_of(without_adapters(state.lora), norms)
    logprobs = zeros_like(completions["weights"])
    for some in micro_batches:
        x, packed = work.embed(sequences, some)
        shape = work.layer_shape(some.kind)
        for i, trained in enumerate(layers):
            x = layer.forward(shape, work.frozen["layers"][i], trained, x, packed)
        arguments = head_of(work.frozen), x, packed, completions, logprobs
        logprobs = head.head_logprobs(work.head_shape, state.config.sampling.distribution, *arguments)
    return logprobs


def _update(
    state: TrainState,
    work: Work,
    sequences: head.Sequences,
    completions: head.LossInputs,
    micro_batches: list[MicroBatch],
    old: Array,
    has_old: bool,
    reference: Array | None,
) -> tuple[TrainState, dict[str, Array], Array]:
    """One optimizer update; also returns the log-probabilities before it, [B, C]."""
    layers = layers_of(state.lora, state.norms)
    # Made between activations, which are freed earlier, they would split the free memory: peaks were up to 13 % higher.
    trained = trained_trees(state.lora, state.norms, state.config)
    zeros = from_parts([zeros_like(part) for part in in_parts(trained, len(layers))])
    gradients = [{name: tree["layers"][i] for name, tree in zeros.items()} for i in range(len(layers))]
    sums, logprobs = head.no_sums(work.loss, completions, reference), zeros_like(completions["weights"])
    for some in micro_batches:
        x, packed = work.embed(sequences, some)
        shape = work.layer_shape(some.kind)
        x, kept = _forward(work, shape, layers, x, packed)
        arrays = x, packed, completions, old, np.bool_(has_old), reference, sums, logprobs
        settings = work.head_shape, work.loss, state.config.sampling.distribution
        d_x, sums, logprobs = head.head_loss(*settings, head_of(work.frozen), *arrays)
        del x, arrays
        _backward(work, shape, layers, gradients, kept, d_x, packed)
    parts = parts_of(gradients)
    del gradients  # frees this replica's own behind the sum
    parts, sums = over_replicas(work.replicas, parts, sums)
    state, metrics = apply_gradients(state, parts, sums)
    return state, metrics, logprobs


def _forward(
    work: Work, shape: layer.LayerShape, layers: list[dict[str, Any]], x: Array, packed: Packed
) -> tuple[Array, list[tuple[Array, layer.Kept | None]]]:
    """The residual stream behind the last layer, and what each layer keeps."""
    held = []
    for i, (trained, keeps) in enumerate(zip(layers, work.keeps, strict=True)):
        arguments = shape, work.frozen["layers"][i], trained, x, packed
        before, kept = x, None
        if keeps is Keeps.INPUT:
            x = layer.forward(*arguments)
        else:
            x, kept = layer.forward_and_keep(*arguments)
        if keeps is Keeps.ALL_BUT_GATE_UP:
            kept = dataclasses.replace(kept, gate_up=None)
        held.append((before, kept))
    return x, held


def _backward(
    work: Work,
    shape: layer.LayerShape,
    layers: list[dict[str, Any]],
    gradients: list[Any],
    held: list,
    d_x: Array,
    packed: Packed,
) -> None:
    """Add the gradients of the layers to `gradients`, and empty `held`."""
    for i in reversed(range(len(layers))):
        frozen = work.frozen["layers"][i]
        gradients[i], d_x = layer.backward(shape, frozen, layers[i], gradients[i], *held.pop(), d_x, packed)


@program
def next_position(
    step: Array, cursor: Array, drawn: Array, updates: list[dict[str, Array]]
) -> tuple[tuple[Array, Array], dict[str, Array]]:
    """Step and cursor after a rollout of `drawn` problems, and the metrics of the updates as one."""
    return (step + 1, cursor + drawn), over_updates(updates)
