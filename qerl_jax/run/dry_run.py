"""`--dry-run`: the resolved config, the parameter table and the memory estimate, for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from qerl_jax.config import Config, dump
from qerl_jax.run.memory import Memory, Plan, plan


def show_dry_run(config: Config, console: Console) -> None:
    """Print what the run would be. Raises what `plan` raises; nothing is loaded, run or written."""
    planned = plan(config)
    console.print(dump(config), markup=False, soft_wrap=True)
    console.print(parameter_table(planned))
    console.print(memory_table(planned.memory, config))
    if planned.cache_note:
        console.print(planned.cache_note, soft_wrap=True)
    files = "no weight files there yet" if planned.files is None else f"weight files of {_gb(planned.files)}"
    console.print(
        f"{config.model}: {planned.model.parameter_count() / 1e6:,.1f} M parameters, projections in {planned.stored}, "
        f"{files}. Dry run: nothing was loaded, run or written.",
        soft_wrap=True,
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.3f} GB"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def parameter_table(planned: Plan) -> Table:
    """A row for each kind of parameter."""
    table = _table("Parameters", "what", "millions", "stored as", "bits each", "on the device")
    for part in planned.parts:
        bits = f"{8 * part.bytes / part.parameters:.2f}"
        table.add_row(part.name, f"{part.parameters / 1e6:,.3f}", part.stored, bits, _gb(part.bytes))
    table.add_section()
    table.add_row("all of it", "", "", "", _gb(sum(part.bytes for part in planned.parts)))
    return table


def memory_table(memory: Memory, config: Config) -> Table:
    """A row for each thing that takes memory, and both peaks."""
    table = _table("Memory estimate (GB = 1e9 bytes)", "what", "rollout", "update", "evaluation")
    evaluated = memory.eval_sequences > 0
    sequences = f"{memory.sequences} sequences" + (f" (evaluation: {memory.eval_sequences})" if evaluated else "")

    def row(what: str, rollout: int | None = None, update: int | None = None, evaluation: int | None = None) -> None:
        evaluation = evaluation if evaluated else None
        table.add_row(what, *("" if count is None else _gb(count) for count in (rollout, update, evaluation)))

    held = memory.weights + memory.state
    row("weights, adapters, norms, optimizer state", held, held, held)
    row(f"keys and values of {sequences} at a time", memory.cache, None, memory.eval_cache)
    row("decode step: logits and sampling", memory.logits, None, memory.eval_logits)
    row("gradient", None, memory.gradient)
    pack, recomputed = memory.update_plan.pack, memory.update_plan.recomputed
    row(f"activations of {pack.tokens} tokens, {recomputed} layers recomputed", None, memory.activations)
    row("a layer's backward pass, or the head", None, memory.working)
    table.add_section()
    row("peak, about", memory.rollout, memory.update, memory.evaluation)
    return table
