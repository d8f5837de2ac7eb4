"""The programs of a run, compiled in the background while its tokenizer, weights and problems are read."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

from rich.console import Console

from qerl_jax import keys
from qerl_jax.compilation import (
    Program,
    WithoutCollections,
    as_committed,
    committed,
    compile_programs,
    compilers,
    start_compiling,
)
from qerl_jax.config import Config
from qerl_jax.rl.compile import abstract_batch, update_programs
from qerl_jax.rl.state import compute_copy
from qerl_jax.rollout.programs import rollout_programs
from qerl_jax.run.abstract import abstract_run
from qerl_jax.run.hooks import Hooks
from qerl_jax.types import Policy, TrainState

ROLLOUT, UPDATE = "rollout", "update"
"""The two parts of a step that wait for their programs."""

_SLOW = ("prefill_layer", "decode_chunk", "backward", "forward_and_keep", "head_loss")  # to compile, slowest first
_SWITCH_SECONDS = 5e-4
_FROZEN_BY_THE_PROCESS = 10_000
"""Objects, fewer than jax has. Python 3.12 begins with some hundred frozen ones."""


def run_programs(part: str, config: Config, hooks: Hooks, policy: Policy, state: TrainState) -> list[Program]:
    """Every program of a part of a run's steps, those that compile longest first.

    Args:
      part: `ROLLOUT`, the noise included, or `UPDATE`.
      config: settings of the run.
      hooks: functions of the user's.
      policy, state: those the run starts with, real or abstract, committed to a device.
    """
    if part == ROLLOUT:
        policy = policy.replace(norms=state.norms, lora=state.lora)
        sizes, key = (config.num_prompts, config.max_prompt_length), keys.for_step(config.seed, keys.Purpose.SAMPLE, 0)
        own = config.rollout_backend == "jax"
        sampled = rollout_programs(policy, *sizes, config.sampling, key, config.engine) if own else ()
        clean = getattr(state, config.noise_target)
        noise = hooks.programs(config, clean, keys.for_step(config.seed, keys.Purpose.AQN, 0))
        programs = [*sampled, *noise]
        if state.weights is not None:
            programs.append(Program("weights in the compute dtype", compute_copy, (state.weights, policy.frozen)))
    else:
        batch = as_committed(abstract_batch(config), policy)
        programs = update_programs(state, policy.frozen, batch, hooks.token_loss, hooks.with_reference)

    def rank(program: Program) -> int:
        name = program.function.__name__
        return _SLOW.index(name) if name in _SLOW else len(_SLOW)

    return sorted(programs, key=rank)


@contextlib.contextmanager
def _lowering() -> Iterator[None]:
    """Settings of the interpreter while a thread lowers programs beside others: no collection of garbage, and threads
    switch more often. One that reads weights needs the interpreter for microseconds at a time, and waited 5 ms for each
    of them.
    """
    switching = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        with WithoutCollections():
            yield
    finally:
        sys.setswitchinterval(switching)


class CompileAhead:
    """Compiles the programs of a run in the background, from its config and the model's config.json: first those of the
    rollout, then those of the update, on which the first rollout does not wait. As a context it ends with `cancel`.

    Within the context the objects that are there once all is compiled are frozen, unless the process has frozen some
    itself: Python's full collections of garbage looked at them for half a second in one of eleven updates (64 small
    layers, a CPU).

    Args:
      config: settings of the run, checked.
      hooks: functions of the user's.
    """

    def __init__(self, config: Config, hooks: Hooks) -> None:
        self._started, self._cancelled = time.perf_counter(), threading.Event()
        self._parts: dict[str, Future[dict[Future, Program]]] = {ROLLOUT: Future(), UPDATE: Future()}
        self._finished: set[str] = set()
        self._has_frozen = False
        self._lowered = ""  # the program in work
        thread = ThreadPoolExecutor(1)  # Python joins it at exit; a thread that dies within the compiler takes it along
        thread.submit(self._compile, config, hooks)
        thread.shutdown(wait=False)

    def _compile(self, config: Config, hooks: Hooks) -> None:
        pool = compilers()
        try:
            with _lowering():
                policy, state = committed(abstract_run(config, hooks.optimizer))
                for part, future in self._parts.items():
                    programs = [] if self._cancelled.is_set() else run_programs(part, config, hooks, policy, state)
                    future.set_result(start_compiling(self._told(programs), pool, self._cancelled))
        except Exception as error:  # `finish` goes on without
            for future in self._parts.values():
                if not future.done():
                    future.set_exception(error)
        pool.shutdown(wait=False)

    def _told(self, programs: list[Program]) -> Iterator[Program]:
        for program in programs:
            self._lowered = program.name
            yield program

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()
        if self._has_frozen:
            gc.unfreeze()

    def cancel(self) -> None:
        """Begin no further program; those that are being compiled go on."""
        self._cancelled.set()
        for part in self._parts.values():
            for future in part.result() if part.done() and not part.exception() else ():
                future.cancel()

    def finish(
        self, part: str, config: Config, hooks: Hooks, policy: Policy, state: TrainState, console: Console
    ) -> int:
        """Wait for the programs of a part, and compile those that the real policy and state need besides: an adapter to
        start from, weights in an unusual form, or a number of steps that the dataset decides. Once for each part.

        Returns the number of these.
        """
        if part in self._finished:
            return 0
        self._finished.add(part)
        waited = time.perf_counter()
        compiled = self._wait(part, console)
        programs = run_programs(part, config, hooks, policy, state)
        rest = [program for program in programs if program.signature() not in compiled]
        compile_programs(rest)
        now = time.perf_counter()
        if part == UPDATE and gc.get_freeze_count() < _FROZEN_BY_THE_PROCESS:
            gc.collect()
            gc.freeze()
            self._has_frozen = True
        before = {ROLLOUT: "loading", UPDATE: "the rollout"}[part]
        console.print(
            f"compiled {len(programs)} programs of the {part} in {now - self._started:.1f} s, "
            f"{now - waited:.1f} s of them after {before}",
            markup=False,
        )
        return len(rest)

    def _wait(self, part: str, console: Console) -> set[Hashable]:
        """Signatures of a part's programs once all are compiled. What fails on the abstract arrays either fails on the
        real ones too, or need not be told.
        """
        doing, submitted = f"compiling the programs of the {part}", self._parts[part]
        # During the first update the progress bar of the steps is there; a terminal shows one moving line at a time.
        with console.status(f"{doing} …") if part == ROLLOUT else contextlib.nullcontext() as status:
            while wait([submitted], timeout=0.1).not_done:
                if status is not None:
                    status.update(f"{doing}: {self._lowered}")
            running = {} if submitted.exception() else submitted.result()
            while left := wait(running, timeout=0.1).not_done:
                if status is not None:
                    status.update(f"{doing}: {len(running) - len(left)} of {len(running)} done")
        return {running[future].signature() for future in running if not (future.cancelled() or future.exception())}
