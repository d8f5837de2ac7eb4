"""`--dry-run`: the resolved config, the parameter table and the memory estimate, for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qerl_jax import aqn
from qerl_jax.checkpoint import assets
from qerl_jax.checkpoint.check import check_names
from qerl_jax.checkpoint.hf_config import model_config
from qerl_jax.checkpoint.load import accepted_quantization, read_tokenizer
from qerl_jax.checkpoint.orbax import refuse_changed
from qerl_jax.checkpoint.safetensors import open_checkpoint
from qerl_jax.config import Config, ConfigError, dump
from qerl_jax.data.presets import PRESETS
from qerl_jax.data.problems import BUNDLED, in_cache
from qerl_jax.data.prompts import EncodedProblem
from qerl_jax.reporting.console import say
from qerl_jax.rewards.load import Rewards
from qerl_jax.rl.plan import recomputation
from qerl_jax.rollout.shapes import ending_note
from qerl_jax.run.abstract import has_weights
from qerl_jax.run.devices import device_bytes
from qerl_jax.run.hooks import Hooks, with_ids
from qerl_jax.run.memory import MemoryEstimate, MemoryReport, examined
from qerl_jax.run.prepare import check_output, load_problems, ready_rewards, say_left_out, with_prompt_length
from qerl_jax.run.sample import sample_lines


def show_dry_run(
    config: Config, console: Console, processes: int = 1, tensor_parallel: int = 1, hooks: Hooks | None = None
) -> None:
    """Print config, parameters, memory on each device of so many processes with so many each, the first prompt and what
    the rewards pay; no weights are loaded, nothing is trained or written.

    An output directory that a run may not use is said last. Raises ConfigError where no rollout fits, and what
    `load_problems`, the rewards, `Hooks.ids_at`, and the reader of the weights' and the adapter's headers raise.
    """
    config = with_prompt_length(config, console)
    ids = hooks.ids_at(0, config.num_prompts) if hooks else []
    with ready_rewards(config, console, download=False) as rewards:
        _show(config, rewards, console, processes, tensor_parallel, ids)


def _show(
    config: Config, rewards: Rewards, console: Console, processes: int, tensor_parallel: int, ids: Sequence[int]
) -> None:
    from huggingface_hub import constants

    directory = assets.model_path(config.model, weights=False)
    if has_weights(directory):
        quantization = accepted_quantization(directory, config.weight_format)
        check_names(open_checkpoint(directory), model_config(directory), quantization)
    tokenizer = read_tokenizer(directory, config.adapter)
    limit, devices = device_bytes(), processes * tensor_parallel
    report, fault = examined(config, limit, processes, tensor_parallel)
    if report is None:
        raise ConfigError(fault)
    say(console, dump(config))
    console.print(parameter_table(report))
    console.print(memory_table(report.memory, config, devices))
    if fault:
        say(console, fault)
    if config.rollout_backend == "vllm":
        say(console, f"vLLM takes {config.vllm_share:g} of the GPU's memory besides, for its base and KV cache.")
    say(console, ending_note(report.model, tokenizer))
    if config.max_steps != -1 and (note := aqn.note(config, config.num_rollouts)):
        say(console, note)
    if tokenizer is None:
        say(console, "The model directory has no tokenizer yet: no prompt is made or shown.")
    else:
        for line in sample_lines(config, rewards, tokenizer, local_problems(config, tokenizer, console, ids)):
            say(console, line)
    for line in absent_datasets(config, Path(constants.HF_HUB_CACHE)):
        say(console, line)
    files = "no weight files there yet" if report.files is None else f"weight files of {_gb(report.files)}"
    say(
        console,
        f"{config.model}: {report.model.parameter_count() / 1e6:,.1f} M parameters, projections in {report.stored}, "
        f"{files}. Dry run: no weights were loaded, nothing was written.",
    )
    try:
        check_output(config)
        refuse_changed(config)
    except (ConfigError, OSError) as error:
        say(console, f"A run would be refused: {error}")


def local_problems(config: Config, tokenizer: Any, console: Console, ids: Sequence[int]) -> list[EncodedProblem]:
    """The training problems, read as a run does, of the datasets that are not on the hub, behind those with which a
    curriculum begins; so are those evaluated. `ids`: of the first step, where a function chooses.
    """
    local = tuple(name for name in config.dataset if name not in PRESETS)
    evaluated = None if config.eval_dataset in PRESETS else config.eval_dataset
    if not local and not evaluated:
        return []
    chosen = dataclasses.replace(config, dataset=local or (BUNDLED,), dataset_weights=None, eval_dataset=evaluated)
    stream, _ = load_problems(chosen, tokenizer, console)
    first: list[EncodedProblem] = []
    if local == config.dataset:
        first = with_ids(ids, 0, stream)
        sized = config.with_max_steps(len(stream))
        if config.max_steps == -1:
            epochs = f"num_train_epochs {config.num_train_epochs:g}"
            say(console, f"{epochs} of {len(stream)} problems: max_steps {sized.max_steps}")
        if not first:
            say_left_out(sized, len(stream), console)
    if config.order_column and not first:
        first = stream.at(0, 1)
    return [*first, *(item for items in stream.sets for item in items)] if local else []


def absent_datasets(config: Config, cache: Path) -> Iterator[str]:
    """A line for each dataset of a run that the hub's cache in a directory has nothing of."""
    for name in dict.fromkeys((*config.dataset, config.eval_dataset)):
        if name in PRESETS and not in_cache(hub_id := PRESETS[name].hub_id, cache):
            yield f"{name} is not on this machine: a run downloads it from the Hugging Face hub ({hub_id})."


def _gb(count: int) -> str:
    return f"{count / 1e9:.3f} GB"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def parameter_table(report: MemoryReport) -> Table:
    """A row for each kind of parameter."""
    table = _table("Parameters", "what", "millions", "stored as", "bits each", "on the device")
    for entry in report.parameters:
        bits = f"{8 * entry.bytes / entry.parameters:.2f}"
        table.add_row(entry.name, f"{entry.parameters / 1e6:,.3f}", entry.stored, bits, _gb(entry.bytes))
    table.add_section()
    table.add_row("all of it", "", "", "", _gb(sum(entry.bytes for entry in report.parameters)))
    return table


def memory_table(memory: MemoryEstimate, config: Config, devices: int = 1) -> Table:
    """A row for each thing that takes memory, and both peaks."""
    each = f" on each of {devices} devices" if devices > 1 else ""
    table = _table(f"Memory estimate{each} (GB = 1e9 bytes)", "what", "rollout", "update", "evaluation")
    own, other = memory.rollout, memory.evaluation
    evaluated = other.sequences > 0
    sequences = f"{own.sequences} sequences" + (f" (evaluation: {other.sequences})" if evaluated else "")

    def row(what: str, rollout: int | None = None, update: int | None = None, evaluation: int | None = None) -> None:
        evaluation = evaluation if evaluated else None
        table.add_row(what, *("" if count is None else _gb(count) for count in (rollout, update, evaluation)))

    held = memory.weights + memory.state
    row("weights, adapters, norms, optimizer state", held, held, held)
    row(f"keys and values of {sequences} at a time", own.cache, None, other.cache)
    row("prefill: activations, or", own.prefill, None, other.prefill)
    row("decode step: logits and sampling", own.logits, None, other.logits)
    row("gradient", None, memory.gradient)
    plan = memory.update_plan
    row(f"activations of {plan.pack.tokens} tokens, {recomputation(plan)}", None, plan.kept_bytes)
    row("a layer's backward pass, or the head", None, plan.working_bytes)
    table.add_section()
    row("peak, about", memory.rollout_peak, memory.update_peak, memory.evaluation_peak)
    return table
