"""Programs that record themselves and are compiled before their first call."""

import collections
import dataclasses
import functools
import gc
import re
import sys
import threading
import time
import weakref
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
from command_lines import training
from qerl_kernels.kernel_programs import KERNEL_PROGRAM_NAME, TARGET, kernel_programs
from replicas import on_replicas
from timing import compile_calls

from qerl_jax import aqn, keys, programs
from qerl_jax.compilation import CompilationCounter, committed
from qerl_jax.config import Config
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.programs import Ahead, Recorded, program, record
from qerl_jax.rl.advantages import group_advantages, make_batch
from qerl_jax.rl.plan import make_update_plan
from qerl_jax.rl.state import init_state
from qerl_jax.rl.step import grpo_step
from qerl_jax.rollout.engine import generate
from qerl_jax.rollout.shapes import RolloutShapes, decode_bytes, prefill_bytes
from qerl_jax.run import prepare
from qerl_jax.run.abstract import abstract_run
from qerl_jax.run.hooks import Hooks
from qerl_jax.run.memory import estimate_memory
from qerl_jax.run.rehearsal import rehearse_evaluation, rehearse_evaluation_of_run, rehearse_run, rehearse_step
from qerl_jax.train import parse
from qerl_jax.types import Prompts


def names_of(recorded: list[Recorded]) -> list[str]:
    return [each.function.__name__ for each in recorded]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_chain_of_calls_is_recorded_and_compiled_once(on_device):
    """With donated state that calls hand on, a weakly typed number, a key, NumPy's arrays, and a program within one."""

    @program
    def doubled(x):
        return 2 * x

    @program(static_argnames="count")
    def start(key, count):
        return jnp.broadcast_to(key, (count,)), jnp.zeros((count, 8)), 1.0

    @program(donate_argnums=1)
    def step(weights, state, numbers):
        keys, x, number = state
        return keys, doubled(x @ weights) + numbers, number + 1.0

    def run(weights, key):
        assert jax.eval_shape(lambda x: doubled(x=x), weights).shape == weights.shape  # in a trace of the caller's own
        state = start(key, count=4)
        for _ in range(3):
            state = step(weights, state, np.ones(8, np.float32))
        return state

    weights, key = np.ones((8, 8), np.float32), jax.random.key(0)
    weights = jax.device_put(weights, jax.devices()[0]) if on_device else jnp.asarray(weights)
    found = record(run, weights, key)
    assert names_of(found) == ["start", "step"] + ["step"] * on_device  # what `start` returns is not committed
    keys_, x, number = found[-1].results
    assert (x.shape, x.dtype, x.sharding is not None) == ((4, 8), jnp.float32, on_device)
    assert keys_.shape == (4,) and number.weak_type
    with CompilationCounter() as counter:
        assert compile_calls(run, weights, key) == len(found)
        assert sorted(counter.take()) == sorted(f"jit({name})" for name in names_of(found))
        _, x, number = run(weights, key)
        assert counter.take() == []
    # x = 2 · 8 x + 1, three times from 0
    np.testing.assert_array_equal(x, np.full((4, 8), 1 + 16 + 256))
    assert number == 4


def test_a_program_that_two_functions_call_is_compiled_once():
    @program
    def doubled(x):
        return 2 * x

    with Ahead(1) as ahead:
        assert [len(ahead.begin(function, np.ones(3))) for function in (doubled, lambda x: doubled(x))] == [1, 0]


def test_a_weakly_typed_number_has_a_program_of_its_own():
    """Whose results have other types: 2 · 0.5 in bf16 is bf16 for a weak 2 alone."""

    @program
    def scaled(x, factor):
        return factor * x

    x, known = jnp.ones(3, jnp.bfloat16), {}
    results = [record(scaled, x, factor, known=known)[0].results for factor in (jnp.asarray(2.0), np.float32(2))]
    assert [result.dtype for result in results] == [jnp.bfloat16, jnp.float32] and len(known) == 2


def test_a_dtype_has_a_program_of_its_own():
    @program
    def doubled(x):
        return x + x

    with Ahead(1) as ahead:
        assert [len(ahead.begin(doubled, np.ones(3, kind))) for kind in (np.float32, np.int32, np.float32)] == [1, 1, 0]


SETTINGS = {
    "nvfp4, trained norms, KL, two updates": [
        *("--weight-format", "nvfp4", "--dtype", "float32", "--train-norms", "--beta", "0.1", "--num-iterations", "2")
    ],
    "bf16, one adapter, few slots": [
        *("--lora-target-modules", "down_proj", "--rollout-memory-gb", "2e-5"),
        "--batch-invariant",
    ],
}


def config_of(place: Path, *more: str) -> Config:
    return parse(training(place, *more))


def signatures(function, *args) -> set:
    known = {}
    record(function, *args, known=known)
    return set(known)


def shapes_in(function, *args) -> RolloutShapes:
    """The shapes of the rollout that is recorded."""
    [shapes] = [each.args[-1] for each in record(function, *args) if each.function.__name__ == "allocate"]
    return shapes


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=name, marks=[pytest.mark.nightly] * (i > 0))
        for i, (name, flags) in enumerate(SETTINGS.items())
    ],
)
def test_the_programs_of_a_step_are_known_from_its_config(tmp_path, flags):
    """The weights need none besides, and a step on them compiles nothing that was not recorded, and nothing twice."""
    small.bf16(tmp_path / "model")
    config = config_of(tmp_path, *flags)
    policy = committed(prepare.load(config))
    state = init_state(policy, config)
    arguments = config, Hooks(), policy, state, make_update_plan(state, policy.frozen)
    known = {}
    found = names_of(record(rehearse_step, *arguments, known=known))
    assert signatures(rehearse_run, config, Hooks(), None) == set(known)
    with CompilationCounter() as counter:
        compile_calls(rehearse_step, *arguments)
        compiled = collections.Counter(counter.take())  # none that other tests have compiled
        assert compiled <= collections.Counter(f"jit({name})" for name in found)
        rng, limit = np.random.default_rng(0), config.max_prompt_length
        prompts = [rng.integers(3, 500, rng.integers(1, limit + 1)).tolist() for _ in range(config.num_prompts)]
        rewards = jnp.asarray(rng.random(config.batch_size), jnp.float32)
        aqn_key, sample_key = (keys.for_step(0, purpose, 0) for purpose in (keys.Purpose.AQN, keys.Purpose.SAMPLE))
        counter.take()
        noisy = Hooks().noisy(state.norms, 0.01, aqn_key)
        assert int(aqn.count_perturbed(state.norms, noisy)) == len(jax.tree.leaves(noisy))
        actor = policy.replace(norms=noisy, lora=state.lora)
        rollout = generate(actor, Prompts.from_lists(prompts, length=limit), config.sampling, sample_key, config.engine)
        advantages = group_advantages(rewards, config.num_generations, config.scale_rewards)
        batch = make_batch(rollout, advantages, rewards, config.mask_truncated_completions)
        grpo_step(state, policy.frozen, batch, arguments[-1])
        assert counter.take() == []


def test_replicas_rehearse_their_own_part(tmp_path):
    """Of eight groups of two over three replicas a rollout of three groups, and micro-batches so small that all three
    have some.
    """
    small.bf16(tmp_path / "model")
    config, replicas = config_of(tmp_path, "--batch-size", "16"), Replicas(2, 3)
    policy, state = committed(abstract_run(config))
    alone, plan = (make_update_plan(state, policy.frozen, replicas=count) for count in (1, 3))
    assert plan.pack.tokens < alone.pack.tokens
    found = signatures(rehearse_step, config, Hooks(), policy, state, plan, replicas)
    assert signatures(rehearse_run, config, Hooks(), None, replicas) == found
    assert shapes_in(rehearse_run, config, Hooks(), None, replicas).slots == 6


def test_programs_are_those_of_ones_own_loss_optimizer_and_batch(tmp_path):
    """With the reference those of another pass, without the adapter, although there is no penalty."""
    small.bf16(tmp_path / "model")

    def likeliest(logp, old_logp, behaviour_logp, reference_logp, advantages, mask):
        return -logp, {}

    def more(than: set, hooks: Hooks, *flags: str) -> tuple[set, set]:
        found = signatures(rehearse_run, config_of(tmp_path, *flags), hooks, None)
        return found, {function.__name__ for function, *_ in found - than}

    plain, _ = more(set(), Hooks())
    own, its = more(plain, Hooks(token_loss=likeliest))
    assert "head_loss" in its
    _, its = more(own, Hooks(token_loss=likeliest, with_reference=True))
    assert {"without_adapter", "forward", "head_logprobs"} <= its
    assert "apply" in more(plain, Hooks(optimizer=optax.sgd(1.0)))[1]
    assert more(plain, Hooks(), "--mask-truncated-completions")[1] == {"make_batch"}
    assert more(plain, Hooks(), "--scale-rewards", "none")[1] == {"_advantages"}
    _, its = more(set(), Hooks(), "--rollout-backend", "vllm", "--dtype", "bfloat16")
    assert "head_loss" in its and "decode_chunk" not in its


def test_programs_of_halves_come_behind_all_others_of_a_step(tmp_path):
    """Those of their passes alone: a first update may need none, and waits for none of them. Of a replica that has no
    prompt to sample for."""
    small.bf16(tmp_path / "model")
    config, replicas = config_of(tmp_path), Replicas(63, 64)
    policy, state = committed(abstract_run(config))
    plan = make_update_plan(state, policy.frozen)
    plan = dataclasses.replace(plan, pack=dataclasses.replace(plan.pack, has_half=True))
    arguments = config, Hooks(), policy, state, plan, replicas
    *found, embed, keep, loss, backward = names_of(record(rehearse_step, *arguments))
    passes = ["embed", "forward_and_keep", "head_loss", "backward"]
    assert [embed, keep, loss, backward] == passes == [name for name in found if name in passes]
    assert "decode_chunk" not in found


def test_what_the_weights_decide_is_compiled_after_them(tmp_path):
    """ModelOpt's scales multiply and llm-compressor's divide: config.json does not say which, and every program that
    reads them is another one.
    """
    small.modelopt(tmp_path / "model")
    config, known = config_of(tmp_path), {}
    before = names_of(record(rehearse_run, config, Hooks(), None, known=known))
    policy = committed(prepare.load(config))
    state = init_state(policy, config)
    plan = make_update_plan(state, policy.frozen)
    more = record(rehearse_step, config, Hooks(), policy, state, plan, known=known)
    assert set(names_of(more)) == {"cast_lora", "prefill_layer", "decode_chunk", "forward_and_keep", "backward"}
    assert len(more) < len(before)


def test_the_programs_of_an_evaluation_are_known_from_the_config(tmp_path):
    small.bf16(tmp_path / "model")
    config = config_of(tmp_path)
    found = signatures(rehearse_evaluation_of_run, config, None, 5, 9)
    policy, other = committed(prepare.load(config)), config_of(tmp_path, "--top-k", "5", "--num-generations", "2")
    assert found == signatures(rehearse_evaluation, config, policy, None, 5, 9) != set()
    assert found == signatures(rehearse_evaluation, other, policy, None, 5, 9)  # it has its own sampling
    few = config_of(tmp_path, "--eval-batch-size", "4", "--eval-num-generations", "2")
    assert shapes_in(rehearse_evaluation_of_run, few, None, 5, 9).slots == 4  # and its own slots
    roomy = shapes_in(rehearse_evaluation_of_run, config, None, 5, 9)
    beside = max(prefill_bytes(policy, 5, 9, False), decode_bytes(policy.config, 5))
    plan = make_update_plan(init_state(policy, config), policy.frozen)
    plan = dataclasses.replace(plan, rollout_bytes=(roomy.cache_bytes - 9 + beside) / 0.94)
    assert (roomy.slots, roomy.prompt_slots) == (5, 32)
    assert shapes_in(rehearse_evaluation_of_run, config, plan, 5, 9).prompt_slots < 32  # in the memory that is left


def test_another_learning_rate_length_temperature_or_clip_norm_finds_its_programs(tmp_path):
    """Those numbers are arrays; truncation, which changes the work, is not. Replicas have more to know."""
    small.bf16(tmp_path / "model")

    def found(*flags: str, replicas: Replicas = ALONE) -> set:
        return signatures(rehearse_run, config_of(tmp_path, *flags), Hooks(), None, replicas)

    first = found()
    numbers = ["--learning-rate", "3e-5", "--max-steps", "700", "--warmup-ratio", "0.3", "--max-grad-norm", "0.7"]
    assert (
        found(*numbers, "--temperature", "0.6", "--seed", "5", "--sigma-start", "0.1", "--sigma-end", "0.01") == first
    )
    assert found("--top-k", "5") != first
    several = [found("--batch-size", "6", replicas=Replicas(index, 2)) for index in (0, 1)]  # of 2 and 1 prompts
    assert several[0] == several[1]
    more = {function.__name__ for function, *_ in several[1] - first}
    assert {"as_one", "placed", "of_all", "apply_flat", "checksum"} <= more


SIZES = [
    *("--max-prompt-length", "90", "--max-completion-length", "60", "--batch-size", "64", "--num-generations", "8"),
    *("--tokens-per-micro-batch", "2048"),
]
SMALL = ["make_batch", "inputs_of"]  # joins and pads; all others of an update but the layers' have shapes of buckets
LAYER = ["forward_and_keep", "backward"]  # of an update
SLOTS = ["allocate", "admit_jit", "decode_chunk", "gather", "gather"]  # of the largest number of slots
ANEW = {
    "--max-completion-length 50 --max-prompt-length 70": SMALL,
    "--num-generations 4": ["_advantages", *LAYER],
    "--batch-size 128": ["_advantages", *SMALL, *SLOTS],
    "--max-completion-length 70": [
        *SMALL, *LAYER, "allocate", *["decode_chunk"] * 3, "gather", "gather",
    ],
}  # fmt: skip


def test_programs_are_recorded_for_the_memory_of_the_device(tmp_path):
    """Caches as wide as the buckets, and as narrow as the limits where weights and state leave no more."""
    small.bf16(tmp_path / "model")
    config, sizes = config_of(tmp_path, *SIZES), {}
    policy, state = abstract_run(config)

    def widths_on(device_bytes: float | None) -> tuple[int, int, int]:
        shapes = shapes_in(rehearse_run, config, Hooks(), device_bytes)
        sizes[shapes.cache_bytes] = estimate_memory(policy, state, config, device_bytes).rollout.cache
        return shapes.prompt_slots, shapes.prompt_width, shapes.completion_width

    assert widths_on(None) == (32, 96, 64)
    free = make_update_plan(state, policy.frozen, 1e9).rollout_bytes
    assert free == 1e9 - sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((policy.frozen, state)))
    beside = max(prefill_bytes(policy, 8, 90, False), decode_bytes(policy.config, 64))
    assert widths_on(1e9 - free + (max(sizes) - 9 + beside) / 0.94) == (8, 96, 64)
    assert all(recorded == estimated for recorded, estimated in sizes.items()) and len(sizes) == 2


def test_a_run_of_other_sizes_finds_most_of_its_programs(tmp_path):
    """What is compiled anew: little where a limit stays in its bucket (64 and 96 tokens here), nothing of the rollout
    in another group, and what decodes all sequences of another batch at once.
    """
    small.bf16(tmp_path / "model")

    def found(*flags: str) -> set:
        return signatures(rehearse_run, config_of(tmp_path, *SIZES, *flags), Hooks(), None)

    first = found()
    anew = {change: sorted(each[0].__name__ for each in found(*change.split()) - first) for change in ANEW}
    assert anew == {change: sorted(names) for change, names in ANEW.items()} and len(first) == 32


def test_a_call_waits_for_its_own_program_only():
    """One that is known does not wait for others; one that is not, until all is recorded."""
    may_trace = threading.Event()

    @program
    def quick(x):
        return x + 1

    @program
    def slow(x):
        assert may_trace.wait(60)
        return x + 2

    lines = []
    with CompilationCounter() as counter, Ahead(2, lines.append) as ahead:
        began = time.perf_counter()
        ahead.submit(quick, np.ones(3))
        ahead.submit(slow, np.ones(3))
        assert quick(np.ones(3)).tolist() == [2, 2, 2] and lines == []
        before = ahead.waited = 10.0  # of earlier calls
        threading.Timer(0.3, may_trace.set).start()
        until_called = time.perf_counter() - began
        assert slow(np.ones(3)).tolist() == [3, 3, 3]
        assert (waited := ahead.waited - before) > 0.2
        while not lines:
            assert quick(np.ones(3)).tolist() == [2, 2, 2]
        assert ahead.seconds > until_called + waited
        waited = ahead.waited
        assert quick(np.ones(4)).tolist() == [2] * 4 and ahead.waited == waited  # no longer asked
        assert sorted(counter.take()) == ["jit(quick)", "jit(quick)", "jit(slow)"]
    [line] = lines
    counts = re.match(r"compiled (\d) programs(?: and loaded (\d) from the cache)? in ", line).groups()
    assert sum(int(count or 0) for count in counts) == 2
    assert line.endswith(f" in {ahead.seconds:.1f} s, of which the run waited {waited:.1f}")


def test_an_error_is_left_to_the_call():
    """Of recording, of lowering, of a function that reads values. The first of recording is said."""
    attempts, said = [], []

    @program
    def fails_first(x):
        attempts.append(x)
        if len(attempts) == 1:
            raise ValueError("not ahead")
        return x + 1

    def reads(x):
        return float(x[0])

    with Ahead(2, done=said.append) as ahead:
        ahead.submit(fails_first, np.ones(3))
        ahead.submit(reads, jnp.ones(3))
        assert fails_first(np.ones(3)).tolist() == [2, 2, 2]
    assert said[1:] == ["not all programs were compiled ahead of their calls: ValueError: not ahead"]
    with pytest.raises(TypeError, match="float"):
        record(lambda x: fails_first(float(x)), jax.ShapeDtypeStruct((), jnp.float32))


def test_a_call_does_not_wait_for_a_program_that_could_not_be_lowered(monkeypatch):
    @program
    def add_one(x):
        return x + 1

    def refuse(lowered):
        raise ValueError("not lowered")

    monkeypatch.setattr(programs, "kernel_programs", refuse)
    with Ahead(2) as ahead:
        late = threading.Timer(
            20, lambda: [ready.cancel() for ready in ahead._ready.values()]
        )  # ends a call that waits
        late.start()
        ahead.submit(add_one, np.ones(3))
        assert add_one(np.ones(3)).tolist() == [2, 2, 2]
        late.cancel()


@pytest.mark.parametrize("collects", [False, True])
def test_no_garbage_is_collected_and_threads_switch_often_while_programs_are_lowered(collects):
    """Afterwards all is as it was before, also where a program cannot be lowered."""
    seen, interval = [], sys.getswitchinterval()

    @program
    def traced(x):
        seen.append((gc.isenabled(), sys.getswitchinterval() < interval))
        return x + len(x)

    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with Ahead(1) as ahead:
            ahead.begin(traced, jax.ShapeDtypeStruct((2,), jnp.float32))
            assert (gc.isenabled(), sys.getswitchinterval()) == (collects, interval)
            with pytest.raises(TypeError, match="len"):
                ahead.begin(traced, jax.ShapeDtypeStruct((), jnp.float32))
        assert (gc.isenabled(), sys.getswitchinterval()) == (collects, interval)
        assert seen == [(False, True)] * 2
    finally:
        (gc.enable if was else gc.disable)()


@pytest.fixture
def nothing_frozen():
    """`conftest` freezes what was imported."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.freeze()


def test_collections_pass_over_what_is_compiled_while_the_run_lasts(nothing_frozen):
    """But not over the garbage of compiling, which is collected first. What the process has frozen itself stays so."""

    @program
    def function(x):
        return x + 1

    def called(ahead: Ahead) -> None:
        ahead.submit(function, np.ones(3))
        wait(ahead._recordings)
        wait(ahead._ready.values())
        assert gc.get_freeze_count() < 1000 or was_frozen
        function(np.ones(3))

    was_frozen = False
    with Ahead() as ahead:
        cycle = type("Cycle", (), {})()
        cycle.itself, garbage = cycle, weakref.ref(cycle)
        del cycle
        called(ahead)
        assert gc.get_freeze_count() > 50_000 and garbage() is None
    assert gc.get_freeze_count() < 1000 and gc.isenabled()
    gc.freeze()
    was_frozen = gc.get_freeze_count()
    with Ahead() as ahead:
        called(ahead)
    assert gc.get_freeze_count() > 0.9 * was_frozen


class Noted(jax.stages.Lowered):
    """A traced function and what it is lowered to at once, of a kernel or of a program: notes that it is compiled."""

    def __init__(self, name: str, log: list[str], *kernels: Self, until: threading.Event | None = None):
        """`until`: set by the kernel "last", or waited for by a program."""
        self.name, self.log, self.until = name, log, until
        self.kernels = {kernel.name: kernel for kernel in kernels}

    def lower(self) -> Self:
        return self

    def compile(self) -> None:
        if self.until is not None and self.name != "last":
            assert self.until.wait(60)
        self.log.append(self.name)
        if self.name == "last":
            self.until.set()
        if self.name == "fails":
            raise RuntimeError(self.name)


@pytest.fixture
def by_attribute(monkeypatch):
    """The kernels of a `Noted`."""
    monkeypatch.setattr(programs, "kernel_programs", lambda lowered: lowered.kernels)


def compiled(threads: int, *functions: Noted) -> None:
    ahead = Ahead(threads)
    wait([ahead._start(function.name, Recorded(None, (), {}, function, None, None)) for function in functions])
    ahead.cancel()


def test_kernels_compile_beside_their_programs_and_once(by_attribute):
    """The programs end after the last kernel here. A kernel that fails is its program's to tell."""
    log, done = [], threading.Event()
    a, fails, last = Noted("a", log), Noted("fails", log), Noted("last", log, until=done)
    two = Noted("first", log, a, until=done), Noted("second", log, a, fails, until=done)
    compiled(4, *two, Noted("third", log, last, a, until=done))
    assert sorted(log[:3]) == ["a", "fails", "last"] and sorted(log[3:]) == ["first", "second", "third"]


@pytest.mark.parametrize("cache", [None, "somewhere"])
def test_no_kernel_is_compiled_for_a_program_that_is_there(by_attribute, cache):
    """With one thread it is there first. Where it takes a moment, as one from the persistent cache does, the kernel
    waits for it; without a cache it does not.
    """
    log, program = [], Future()
    was = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", cache)
    try:
        compiled(1, Noted("first", log, Noted("kernel", log)))
        threading.Timer(0.2, program.set_result, [None]).start()
        in_a_minute = time.monotonic() + 60
        programs._compile_kernel(Noted("beside", log), program, in_a_minute, threading.Event())
        assert log == (["first"] if cache else ["first", "beside"])
    finally:
        jax.config.update("jax_compilation_cache_dir", was)


@pytest.mark.parametrize(
    ("cache", "backend", "is_beside_first"),
    [("somewhere", "gpu", True), (None, "gpu", True), ("somewhere", "cpu", True), ("somewhere", "gpu", False)],
)
def test_the_first_of_several_replicas_compiles_what_the_others_find_in_the_cache(
    by_attribute, monkeypatch, cache, backend, is_beside_first
):
    """Also where another one comes first. Each compiles all, with the kernels, where it would find nothing: without a
    cache, on a CPU, on another machine. What has no name nobody waits for.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    logs, second, is_found = ([], []), threading.Event(), cache and backend == "gpu" and is_beside_first

    def compile_all(replicas: Replicas) -> None:
        log, replicas.link.is_beside_first = logs[replicas.index], is_beside_first
        if replicas.is_first:
            assert second.wait(60)
        ahead = Ahead(2, replicas=replicas)
        done = None if is_found and not replicas.is_first else threading.Event()
        own = Noted("named", log, Noted("last", log, until=done), until=done), Noted("other", log)
        ahead._start("other", Recorded(None, (), {}, own[1], None, None)).result()
        compiling = ahead._start("named", Recorded(None, (), {}, own[0], None, "named"))
        if not replicas.is_first:
            wait([compiling], 0.3 if is_found else 60)
            seen.extend(log)
            second.set()
        compiling.result()
        ahead._compilers.shutdown()

    was, seen = jax.config.jax_compilation_cache_dir, []
    jax.config.update("jax_compilation_cache_dir", cache)
    try:
        assert on_replicas(2, compile_all) == [None, None]
    finally:
        jax.config.update("jax_compilation_cache_dir", was)
    first, other = map(sorted, logs)
    assert first == ["last", "named", "other"] and other == (["named", "other"] if is_found else first)
    assert seen == ["other"] if is_found else "named" in seen


def test_nothing_begins_after_the_end(by_attribute):
    """Programs and kernels in the queue are not compiled, what is being compiled goes on, and nobody waits for it."""
    log, begun, over = [], threading.Event(), threading.Event()

    class Slow(Noted):
        def compile(self) -> None:
            begun.set()
            super().compile()

    ahead, began = Ahead(1), time.monotonic()
    ahead._start("slow", Recorded(None, (), {}, Slow("slow", log, Noted("kernel", log), until=over), None, None))
    ahead._start("next", Recorded(None, (), {}, Noted("next", log), None, None))
    assert begun.wait(60)
    ahead.cancel()
    assert ahead._ready["next"].done() and not ahead._ready["slow"].done() and time.monotonic() - began < 50
    with pytest.raises(InterruptedError):
        ahead._start("later", Recorded(None, (), {}, Noted("later", log), None, None))
    over.set()
    wait(ahead._ready.values())
    assert log == ["slow"]


def test_a_kernel_is_no_program():
    """Nothing that the counter counts; and a CPU's programs have none."""

    @jax.jit
    def function(x):
        return jnp.sin(x)

    def kernel():
        return jnp.ones(3)

    kernel.__name__ = KERNEL_PROGRAM_NAME
    with CompilationCounter() as counter:
        jax.jit(kernel).lower().compile()
        assert counter.take() == []
        lowered = function.lower(1.0)
        assert kernel_programs(lowered) == {}
        lowered.compile()
        assert counter.take() == ["jit(function)"]


def test_what_a_future_jax_writes_is_left_out():
    """A kernel with a setting that is no string and no truth value; others are found in their order."""
    settings = {"module": b"m", "use_custom_barrier": False}

    def kernels(**more):
        def function():
            made = [
                jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), jnp.float32))(kernel_hash=name, **settings, **more)
                for name in (b"\xff2", b"1")
            ]
            return sum(made)

        return kernel_programs(jax.jit(function).trace().lower(lowering_platforms=("cuda",)))

    assert list(kernels()) == [b"\xff2", b"1"]
    [again] = kernel_programs(kernels()[b"1"].trace().lower(lowering_platforms=("cuda",)))
    assert again == b"1"
    assert kernels(ranks=np.arange(3)) == {} and kernels(count=np.int32(3)) == {}


def test_what_the_compiler_refuses_is_raised():
    """Before the function is called, and not only where it calls the program."""
    refused = program(lambda x: x + 1, compiler_options={"xla_is_no_option": "1"})
    with Ahead(1) as ahead:
        [compiling] = ahead.begin(lambda: refused(jnp.ones(2)))
        with pytest.raises(Exception, match="xla_is_no_option"):
            compiling.result()


@pytest.mark.parametrize("transformed", [jax.jit, jax.vmap, lambda f: jax.jit(jax.vmap(f))])
def test_a_program_with_options_of_the_compiler_runs_within_another(transformed):
    """As advantages do in a function of a user's that is compiled."""
    rewards = jnp.asarray([[0.0, 1.0, 1.0, 1.0], [2.0, 0.0, 0.5, 0.5]])
    rewards = rewards[0] if transformed is jax.jit else rewards
    found = transformed(functools.partial(group_advantages, num_generations=2))(rewards)
    expected = [group_advantages(row, 2) for row in rewards.reshape(-1, 4)]
    np.testing.assert_allclose(found.reshape(-1, 4), expected, rtol=1e-6)
    own = rewards.ravel()[:4]  # no argument of what is compiled
    np.testing.assert_allclose(jax.jit(lambda: group_advantages(own, 2))(), expected[0], rtol=1e-6)
