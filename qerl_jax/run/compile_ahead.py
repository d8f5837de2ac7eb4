"""The programs of a run, compiled in the background while its tokenizer, weights and problems are read."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

from rich.console import Console

from qerl_jax import keys
from qerl_jax.compilation import Program, as_committed, committed, compile_programs
from qerl_jax.config import Config
from qerl_jax.rl.compile import abstract_batch, update_programs
from qerl_jax.rl.state import compute_copy
from qerl_jax.rollout.programs import rollout_programs
from qerl_jax.run.abstract import abstract_run
from qerl_jax.run.hooks import Hooks
from qerl_jax.types import Policy, TrainState

_SLOW = ("decode_chunk", "backward", "forward_and_keep", "prefill_layer", "head_loss")  # to compile, slowest first


def run_programs(config: Config, hooks: Hooks, policy: Policy, state: TrainState) -> list[Program]:
    """Every program of a run's rollouts, noise and updates, those that compile longest first.

    Args:
      config: settings of the run.
      hooks: functions of the user's.
      policy, state: those the run starts with, real or abstract, committed to a device.
    """
    policy = policy.replace(norms=state.norms, lora=state.lora)
    sample = keys.for_step(config.seed, keys.Purpose.SAMPLE, 0)
    sizes = config.num_prompts, config.max_prompt_length
    own = config.rollout_backend == "jax"
    batch = as_committed(abstract_batch(config), policy)
    programs = [
        *(rollout_programs(policy, *sizes, config.sampling, sample, config.engine) if own else ()),
        *update_programs(state, policy.frozen, batch, hooks.token_loss, hooks.with_reference),
        *hooks.programs(state.norms, keys.for_step(config.seed, keys.Purpose.AQN, 0)),
    ]
    if state.weights is not None:
        programs.append(Program("weights in the compute dtype", compute_copy, (state.weights, policy.frozen)))

    def rank(program: Program) -> int:
        name = program.function.__name__
        return _SLOW.index(name) if name in _SLOW else len(_SLOW)

    return sorted(programs, key=rank)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No collection of garbage meanwhile: tracing and lowering make millions of objects that stay, and looking at them
    over and over took 2.6 of 29 s from the command to the end of step 1.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CompileAhead:
    """Compiles the programs of a run in the background, from its config and the model's config.json. As a context it
    ends with `cancel`.

    Args:
      config: settings of the run, checked.
      hooks: functions of the user's.
    """

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self._started, self._cancelled = time.perf_counter(), threading.Event()
        self._total, self._told = 0, ""
        pool = ThreadPoolExecutor(1)
        self._compiled: Future[set[Hashable]] = pool.submit(self._compile, config, hooks)
        pool.shutdown(wait=False)

    def _compile(self, config: Config, hooks: Hooks) -> set[Hashable]:
        with _no_collection():
            programs = run_programs(config, hooks, *committed(abstract_run(config, hooks.optimizer)))
            self._total = len(programs)
            compile_programs(programs, done=self._tell, cancelled=self._cancelled)
            return {program.signature() for program in programs}

    def _tell(self, name: str, count: int) -> None:
        self._told = f"compiled {count}/{self._total}: {name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Begin no further program; those that are being compiled go on."""
        self._cancelled.set()

    def finish(self, config: Config, hooks: Hooks, policy: Policy, state: TrainState, console: Console) -> int:
        """Wait for the programs, and compile those that the real policy and state need besides: an adapter to start
        from, weights in an unusual form, or a number of steps that the dataset decides.

        Returns the number of these.
        """
        waited = time.perf_counter()
        with console.status("compiling the programs of rollout and update …") as status:
            while wait([self._compiled], timeout=0.1).not_done:
                status.update(self._told or "compiling the programs of rollout and update …")
            # What fails on the abstract arrays either fails on the real ones too, or need not be told.
            compiled = set() if self._compiled.exception() else self._compiled.result()
            programs = run_programs(config, hooks, policy, state)
            rest = [program for program in programs if program.signature() not in compiled]
            compile_programs(rest, done=lambda name, count: status.update(f"compiled {count}/{len(rest)}: {name}"))
        now = time.perf_counter()
        console.print(
            f"compiled {len(programs)} programs of rollout and update in {now - self._started:.1f} s, "
            f"{now - waited:.1f} s of them after loading",
            markup=False,
        )
        return len(rest)
