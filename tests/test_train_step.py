"""One step of `train.train_step` with rollout and update written here, and the end of a run: what each call gets."""

import dataclasses
import io
import signal
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest
import runs
import small
from helpers import randomized
from replicas import on_replicas
from rich.console import Console

from qerl_jax import train
from qerl_jax.backends.vllm_engine import VllmEngine
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.adapter_reader import trained_base
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.orbax import Checkpointer
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import encode_problems
from qerl_jax.data.stream import ProblemStream
from qerl_jax.models.lora import LoraConfig
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.programs import Ahead
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.reporting.phases import Phases
from qerl_jax.reporting.summaries import completion_columns, run_metrics, step_metrics
from qerl_jax.rewards.load import Rewards
from qerl_jax.rl.adamw import AdamW
from qerl_jax.rl.micro_batches import PackShape
from qerl_jax.rl.plan import UpdatePlan
from qerl_jax.rl.state import init_state
from qerl_jax.run import lifecycle
from qerl_jax.run.grading import Grading
from qerl_jax.run.hooks import Hooks, with_objects
from qerl_jax.run.lowering_workers import LoweringWorkers
from qerl_jax.run.prepare import Run
from qerl_jax.run.recorder import Recorder
from qerl_jax.types import FinishReason, Policy, Rollout, TrainState

SEED, STEP, CURSOR = 6, 3, 10
# A stage a rollout, 10 in all: the 4th begins with update 7 of 20, in stage 7 · 10 // 20 = 3, the third of 9 with
# noise, which falls from 1e-2 to 5e-4.
SIGMA = 1e-2 * (5e-4 / 1e-2) ** (2 / 8)
PLAN = UpdatePlan(PackShape(1, 1, 1, 1, 1, 1), 0, 0, 0, 0, rollout_bytes=5e9)
EOS, LENGTH, FAILED = FinishReason.EOS, FinishReason.LENGTH, FinishReason.FAILED
# Two groups of three in two rounds: the second of round 0 is equal, so is the first of round 1. The last row of round 1
# has no reward at all.
REWARDS = [[1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, None]]
FINISH = [[EOS, LENGTH, FAILED, EOS, EOS, EOS], [EOS, EOS, EOS, LENGTH, EOS, EOS]]
TEXTS = [["a", "a a", "a", "b", "b", "b"], ["c", "c", "c", "d d d", "d", "d d"]]


def norms(value: float) -> dict:
    return {"layers": {i: {n: {"weight": jnp.full(4, value)} for n in "ab"} for i in range(2)}}


def likeliest(logp, *_):
    """In the place of the config's loss."""
    return -logp, {}


class Sampler(VllmEngine):
    """Samples by `generate`, in the place of vLLM's process."""

    def __init__(self, generate: Callable[..., Rollout]):
        self.generate = generate


@pytest.fixture
def step(tmp_path, monkeypatch):
    """The calls of a step by name, with the run and the states before and after it."""
    config = runs.config(
        tmp_path, batch_size=6, num_generations=3, num_iterations=2, max_steps=20, scale_rewards="batch", seed=SEED,
        mask_truncated_completions=True, max_completion_length=12, overlong_buffer=5, temperature=0.8, top_k=30,
        top_p=0.9, min_p=0.1, warmup_ratio=0.5, lr_scheduler_type="linear", reward_funcs=("spy", "other"),
        reward_weights=(2.0, 0.25), reward_timeout=7.0, num_stages=10, data_order="level",
    )  # fmt: skip
    tokenizer = load_tokenizer(model_path("tiny"))
    problems = [
        Problem(i, f"Number {i}?", str(100 + i), extra={"level": i / 2}) for i in range(40, 55)
    ]  # no id is a place in the step
    stream = ProblemStream((encode_problems(problems, tokenizer, "", 96)[0],), None, SEED)
    calls = types.SimpleNamespace(generate=[], rewards=[])
    model = types.SimpleNamespace(pad_token_id=0)
    policy = Policy("frozen", norms(0.0), "first", model, LoraConfig(), tokenizer=tokenizer)

    def generate(*arguments, on_progress):
        assert on_progress.__func__ is Grading.begin
        prompts, place = arguments[1], len(calls.generate)
        calls.generate.append(arguments)
        rows = []
        for i, text in enumerate(TEXTS[place]):
            own = tokenizer.encode(text, add_special_tokens=False) + [2] * (FINISH[place][i] == EOS)
            rows.append((i // 3, [*np.asarray(prompts.tokens)[i // 3, : int(prompts.lengths[i // 3])], *own]))
        tokens = np.array([[*ids, *[0] * (110 - len(ids))] for _, ids in rows], np.int32)
        index = jnp.asarray([p for p, _ in rows], jnp.int32)
        lengths = jnp.asarray([len(ids) for _, ids in rows], jnp.int32)
        logprobs = jnp.full(tokens.shape, -0.5 - place, jnp.float32)
        finish = jnp.asarray(FINISH[place], jnp.int8)
        return Rollout(jnp.asarray(tokens), logprobs, jnp.asarray(prompts.lengths[index]), lengths, finish, index)

    def spy(**rows):
        calls.rewards.append(rows)
        return [None if value is None else float(value) for value in REWARDS[len(calls.rewards) - 1]]

    def other(*, completions, **_):
        return [None if text in ("a a", "d d") else 0.4 for text in completions]

    def perturb(clean, sigma, key):
        calls.perturb = clean, sigma, key
        noisy = jax.tree.map(lambda weight: weight + 1, clean)
        noisy["layers"][0]["a"] = clean["layers"][0]["a"]  # three of four
        return noisy

    def grpo_step(*arguments, **own):
        calls.update = *arguments, own
        moved = {"step": jnp.int32(STEP + 1), "cursor": jnp.int32(CURSOR + own["drawn"])}
        return arguments[0].replace(**moved), {"loss": jnp.float32(0.5)}

    def check_same_state(*arguments):
        calls.checked = arguments, hasattr(calls, "record")

    for stand_in in (generate, grpo_step, check_same_state):
        monkeypatch.setattr(train, stand_in.__name__, stand_in)
    hooks = Hooks(perturb=perturb, token_loss=likeliest, with_reference=True)
    run = Run(config, tmp_path, Console(quiet=True), policy, Rewards(spy=spy, other=other), stream, [], hooks, PLAN)
    recorder = object.__new__(Recorder)
    recorder.phases = Phases()
    recorder.write_completions = lambda *arguments: setattr(calls, "written", (arguments, hasattr(calls, "update")))
    recorder.record = lambda *arguments: setattr(calls, "record", arguments)
    static = model, config, AdamW.of(config)
    before = TrainState(jnp.int32(STEP), jnp.int32(CURSOR), norms(0.3), "trained", None, None, *static)
    after = train.train_step(run, recorder, before)
    return types.SimpleNamespace(calls=calls, run=run, before=before, after=after, config=config)


def assert_key(key: jax.Array, *words: int) -> None:
    wanted = jax.random.key(SEED)
    for word in words:
        wanted = jax.random.fold_in(wanted, word)
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(wanted))


def test_the_rollouts(step):
    """The trained adapter under this step's noise, the config's sampling, keys and problems of each round."""
    clean, sigma, key = step.calls.perturb
    assert clean is step.before.norms
    assert sigma == pytest.approx(SIGMA, rel=1e-12)
    assert_key(key, 1, STEP)
    assert len(step.calls.generate) == 2
    for place, (actor, prompts, sampling, key, engine) in enumerate(step.calls.generate):
        assert actor.lora == "trained" and actor.frozen == "frozen"
        assert float(actor.norms["layers"][1]["b"]["weight"][0]) == pytest.approx(1.3)
        assert sampling == step.config.sampling
        assert engine == step.config.engine.replace(prompts=2, free_bytes=5e9)
        assert_key(key, 2, STEP, place)
        wanted = [item.problem.id for item in step.run.stream.at(CURSOR + 2 * place, 2)]
        assert prompts.ids.tolist() == wanted and prompts.tokens.shape == (2, 96)


def test_the_update(step):
    """Clean norms; the problems of all rounds counted. That the replicas agree is checked before the step is recorded.
    Rewards, advantages and masks of the rows: `test_three_steps.py`.
    """
    state, frozen, _, plan, own = step.calls.update
    assert plan is PLAN and own == {"replicas": ALONE, "drawn": 4, "token_loss": likeliest, "with_reference": True}
    assert frozen == "frozen" and state.norms is step.before.norms and state.lora == "trained"
    assert state.step is step.before.step and state.cursor is step.before.cursor
    assert int(step.after.step) == STEP + 1
    (replicas, checked), is_recorded = step.calls.checked
    assert replicas is step.run.replicas and checked is step.after and not is_recorded


def test_the_record(step):
    """What `test_three_steps.py` does not see: speed, verdicts, timeouts, skipped updates, a curriculum's column."""
    state, experience, batch, update, sigma = step.calls.record
    assert (state is step.after, sigma, experience.perturbed) == (True, pytest.approx(SIGMA, rel=1e-12), 3)
    (number, written, advantages), is_late = step.calls.written  # beside the update
    assert (number, written, is_late) == (STEP + 1, experience, False)
    assert jnp.array_equal(advantages, batch.advantages)
    timing = {"time/rollout": 2.0, "time/grading": 0.5, "time/update": 1.5}
    encode = step.run.policy.tokenizer.encode
    rows = [(r, i) for r in range(2) for i in range(len(TEXTS[r]))]  # of both rounds
    sampled = sum(len(encode(TEXTS[r][i], add_special_tokens=False)) + (FINISH[r][i] == EOS) for r, i in rows)
    metrics = step_metrics(experience, update, 3, timing, "spy")
    assert metrics["accuracy"] == pytest.approx(3 / 5)  # one of the six has no verdict
    assert (metrics["tokens_per_second"], metrics["step_time"]) == (sampled / 2.0, 4.0)
    rollout = experience.rollout
    ended = np.asarray(rollout.lengths - rollout.prompt_lengths)[np.asarray(rollout.finish) != LENGTH]  # or failed
    assert metrics["completions/mean_terminated_length"] == pytest.approx(ended.mean())
    assert metrics["completions/failed"] == 1
    tokens = np.asarray(rollout.lengths - rollout.prompt_lengths)
    cut = np.where(np.isin(tokens, (tokens.min(), tokens.max())), LENGTH, EOS).astype(np.int8)
    groups = experience.rewards.reshape(2, 3)
    assert np.isnan(groups).sum(axis=1).tolist() == [1, 1]  # two rewards have a deviation, too
    assert metrics["reward_std"] == pytest.approx(np.nanstd(groups, axis=1, ddof=1).mean())
    rest = step_metrics(
        dataclasses.replace(experience, rollout=rollout.replace(finish=jnp.asarray(cut))), update, 3, timing, "spy"
    )
    extremes = [rest[f"completions/{which}_terminated_length"] for which in ("min", "max")]
    assert extremes == [tokens[cut == EOS].min(), tokens[cut == EOS].max()]
    no_verdict = experience.reward_parts | {"spy": np.full(6, np.nan, np.float32)}
    no_verdict["spy/timeout"] = np.float32([1, 0, 0, 1, 0, 0])
    no_verdict["crash"] = np.float32([2, 0, 0, 2, 0, 2])  # a reward of this name
    of_row = np.array([[0.25], [0.5], [0.5], [0.25], [1.0], [0.0]])
    entropies = jnp.asarray(experience.rollout.completion_mask * of_row, jnp.float32)
    other = dataclasses.replace(
        experience, reward_parts=no_verdict, rollout=experience.rollout.replace(entropies=entropies)
    )
    found = step_metrics(other, update, 3, timing, "spy")
    assert step_metrics(experience, update, 3, timing, "other")["accuracy"] == 0  # a part of the tests is not right
    assert step_metrics(experience, update, 3, timing, None) == {k: v for k, v in metrics.items() if k != "accuracy"}
    tokens = np.asarray(rollout.lengths - rollout.prompt_lengths)  # each counts alike, whatever its completion's length
    assert found["sampling/entropy"] == pytest.approx(tokens @ of_row[:, 0] / tokens.sum()) and len(set(tokens)) > 1
    assert np.isnan(found["accuracy"])
    assert found["rewards/spy/timeout_rate"] == pytest.approx(2 / 6) and found["rewards/spy/crash_rate"] == 0
    assert found["rewards/crash/mean"] == pytest.approx(1) and "rewards/crash_rate" not in found
    lengths = np.asarray(experience.rollout.lengths)
    for skipped in (0, 1, 2):  # of two updates; 7 of the 8 before and in this step changed something
        state = state.replace(opt_state=state.optimizer.init(norms(0.0)))
        state = state.replace(
            opt_state=jax.tree.map(lambda leaf: leaf + 7 if leaf.ndim == 0 else leaf, state.opt_state)
        )
        rate = step.config.learning_rate * (5 + skipped) / 10  # a warm-up of 10, which skipped updates do not count in
        assert run_metrics(experience, state, skipped, sigma, 1000, 15) == {
            "aqn/sigma": sigma, "aqn/norms": 3, "learning_rate": pytest.approx(rate),
            "num_tokens": 1000 + int(lengths.sum()), "epoch": pytest.approx((CURSOR + 4) / 15),
        }  # fmt: skip
    falling = rollout.replace(prompt_index=rollout.prompt_index[::-1])  # levels, too
    columns = completion_columns(dataclasses.replace(experience, rollout=falling), batch.advantages, "level")
    assert columns.pop("data_order/level") == [problem_id / 2 for problem_id in columns["problem_id"]]
    assert list(columns) == list(completion_columns(experience, batch.advantages))


def test_values_of_a_step_are_read_together(step, monkeypatch):
    """The copies of all are begun before the first is waited for; the learning rate, computed from them, comes last."""
    state, experience, batch, update, _ = step.calls.record
    state, update = state.replace(opt_state=state.optimizer.init(norms(0.0))), update | {"kl": jnp.float32(0.25)}
    rollout = experience.rollout.replace(entropies=experience.rollout.logprobs)
    experience, kind, calls = dataclasses.replace(experience, rollout=rollout), type(rollout.lengths), []

    def noting(name: str, call: Callable) -> Callable:
        return lambda array, *rest, **named: calls.append((name, id(array))) or call(array, *rest, **named)

    for name in ("copy_to_host_async", "__array__", "__float__", "__int__", "__sub__"):
        monkeypatch.setattr(kind, name, noting(name, getattr(kind, name)))
    lengths = rollout.lengths, rollout.prompt_lengths, rollout.finish
    of_step = *lengths, rollout.entropies, *update.values()
    of_run = rollout.lengths, state.cursor, state.opt_state[0].count
    of_rows = *lengths, rollout.prompt_index, batch.advantages
    for arrays, late, function, *arguments in (
        (of_step, [], step_metrics, experience, update, 3, {"time/rollout": 2.0}, "spy"),
        (of_run, ["__float__"], run_metrics, experience, state, 0.0, 0.0, 0, 15),
        (of_rows, [], completion_columns, experience, batch.advantages),
    ):
        calls.clear()
        function(*arguments)
        names, ids = zip(*calls, strict=True)
        count = len(arrays)
        assert list(names) == ["copy_to_host_async"] * count + ["__array__"] * count + late
        assert sorted(ids[:count]) == sorted(map(id, arrays))


def test_what_is_written_of_a_step(step):
    """metrics.jsonl and curves by the step's number. Functions of the user's say of no completion that it is right."""
    state, experience, batch, update, sigma = step.calls.record
    state, curves = state.replace(opt_state=state.optimizer.init(norms(0.0))), []
    recorder = Recorder(step.run, Checkpointer(step.run.directory, 1), STEP, 1000)
    recorder.curves = types.SimpleNamespace(log=lambda *arguments: curves.append(arguments))
    with recorder:
        recorder.phases._untaken.update({"rollout": 2.0, "grading": 0.5, "update": 1.5})
        recorder.write_completions(STEP + 1, experience, batch.advantages)
        metrics = recorder.record(state, experience, batch, update | {"skipped": jnp.float32(2)}, sigma)
        path = step.run.directory / "completions" / f"step_{STEP + 1:06d}.parquet"
        assert pyarrow.parquet.read_table(path)["completion"].to_pylist() == experience.completions
    [row] = read_metrics(step.run.directory)
    assert curves == [(STEP + 1, metrics)] and row == pytest.approx(metrics | {"step": STEP + 1})
    assert "accuracy" not in row and row["step_time"] == 4.0
    with np.load(step.run.directory / "nonfinite" / f"step_{STEP + 1:06d}.npz") as file:
        np.testing.assert_array_equal(file["advantages"], batch.advantages)  # of two updates that were skipped


def test_completions_that_cannot_be_written_end_the_step(step):
    state, experience, batch, update, sigma = step.calls.record
    state = state.replace(opt_state=state.optimizer.init(norms(0.0)))
    (step.run.directory / "completions").write_text("a file where the directory would be")
    with Recorder(step.run, Checkpointer(step.run.directory, 1), STEP, 1000) as recorder:
        recorder.phases._untaken.update({"rollout": 2.0, "grading": 0.5, "update": 1.5})
        recorder.write_completions(STEP + 1, experience, batch.advantages)  # the update goes on
        with pytest.raises(OSError, match="completions"):
            recorder.record(state, experience, batch, update | {"skipped": jnp.float32(0)}, sigma)


def test_functions_and_records_of_the_users_are_named_by_their_argument(step):
    def mine(completions, **_):
        return [0.0] * len(completions)

    records = [{"question": "1?", "answer": "1"}]
    functions = {name: step.run.given[name] for name in ("perturb", "token_loss")}
    for objects, wanted in (
        (([mine], records, None), {"reward_funcs": "mine", "train_dataset": "train_dataset"}),
        ((None, None, records), {"eval_dataset": "eval_dataset"}),
    ):
        config = with_objects(dataclasses.replace(step.config, reward_weights=None), *objects)
        run = dataclasses.replace(step.run, config=config)
        assert run.given == functions | wanted


def test_accuracy_is_by_the_verdict_of_the_largest_weight(step):
    state, experience, batch, update, sigma = step.calls.record
    state, parts = state.replace(opt_state=state.optimizer.init(norms(0.0))), experience.reward_parts
    experience = dataclasses.replace(experience, reward_parts={"answer": parts["other"], "dapo": parts["spy"]})
    config = dataclasses.replace(step.config, reward_funcs=("answer", "dapo"), reward_weights=(1.0, 2.0))
    with Recorder(dataclasses.replace(step.run, config=config), None, STEP, 1000) as recorder:
        recorder.phases._untaken.update({"rollout": 2.0, "grading": 0.5, "update": 1.5})
        metrics = recorder.record(state, experience, batch, update | {"skipped": jnp.float32(0)}, sigma)
    assert metrics["accuracy"] == pytest.approx(3 / 5)


def test_the_end_of_a_run(step, tmp_path):
    """The trained policy is what is evaluated, under the evaluation's settings and by its dataset's reward, and what is
    exported before that. Replicas share the evaluation's problems.
    """
    config = dataclasses.replace(
        step.config, model=str(small.bf16(tmp_path / "model", 1)), dataset=("codeforces",), eval_dataset="arithmetic",
        eval_temperature=0.3, eval_top_p=0.5, eval_num_generations=4, eval_batch_size=7, train_norms=True,
    )  # fmt: skip
    policy = load_policy(config.model, lora=LoraConfig(4), dtype=jnp.float32)
    first = init_state(policy, config)
    last = first.replace(
        step=jnp.int32(10), norms=jax.tree.map(lambda leaf: leaf + 1, policy.norms), lora=randomized(policy, 0).lora
    )
    calls, curves, exported = [], [], tmp_path / "adapter" / "adapter_model.safetensors"

    def generate(policy, prompts, sampling, key, engine):
        ids = prompts.ids.tolist()
        calls.append((policy, ids, sampling, key, (engine.slots, engine.prompts, engine.free_bytes), exported.exists()))
        rows, answers = jnp.repeat(jnp.arange(len(ids)), 4), {40: [140] * 4, 41: [140, None, None, None]}
        texts = [f"<answer>{answer}</answer>" for i in ids for answer in answers[i]]  # right are 140 and 141
        new = [policy.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        own = [[*np.asarray(prompts.tokens)[i // 4, : int(prompts.lengths[i // 4])], *ids] for i, ids in enumerate(new)]
        tokens = jnp.asarray([[*ids, *[0] * (200 - len(ids))] for ids in own], jnp.int32)
        finish = jnp.full(len(rows), FinishReason.LENGTH, jnp.int8)
        lengths = jnp.asarray([len(ids) for ids in own], jnp.int32)
        return Rollout(tokens, jnp.zeros(tokens.shape), jnp.asarray(prompts.lengths[rows]), lengths, finish, rows)

    ahead = Ahead(1)
    ahead.cancel()
    ahead.waited, ahead.seconds = 75.0, 900.0
    run = dataclasses.replace(
        step.run, config=config, policy=policy, programs=ahead, eval_problems=list(step.run.stream.sets[0][:2]),
        vllm=Sampler(generate), console=Console(file=(said := io.StringIO()), width=200),
    )  # fmt: skip
    recorder = Recorder(run, Checkpointer(tmp_path, 1, {f"model {config.model}": "a5b6"}), 9, 1000, {})
    recorder.curves = types.SimpleNamespace(log=lambda *arguments: curves.append(arguments), close=lambda: None)
    recorder.metrics.append(10, {"num_tokens": 2000, "reward": 0.5, "grad_norm": 0.0, "frac_reward_zero_std": 1.0})
    stopped = dataclasses.replace(run, vllm=Sampler(lambda *_: signal.raise_signal(signal.SIGTERM)))
    with pytest.raises(KeyboardInterrupt, match=r"the evaluation is not: make up for it with\n.*resume='auto'"):
        lifecycle.finish_run(stopped, recorder, last)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    lifecycle.finish_run(run, recorder, last)
    assert "│ adapter, which no step trained │ adapter " in said.getvalue()
    report = (step.run.directory / "report.md").read_text()
    assert "- none of 1 steps trained anything: the rewards of every group were equal; try" in report
    assert "\n| compiling (since the last start) | 75.0 | " in report  # for which the run waited
    [(evaluated, ids, sampling, key, slots, is_exported)] = calls
    assert evaluated.norms is last.norms and evaluated.lora is last.lora and evaluated.frozen is policy.frozen
    assert ids == [item.problem.id for item in run.eval_problems] and sampling == config.eval_sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.5, 0, 0)
    assert (sampling.num_generations, sampling.max_new_tokens, slots, is_exported) == (4, 12, (7, 2, 5e9), True)
    assert_key(key, 3, 0)
    result = recorder.evaluations.get("after")
    assert result.accuracy == 1 / 2 and curves == [(10, result.metrics())]
    export_adapter(policy.replace(norms=last.norms, lora=last.lora), tmp_path / "wanted", norms=True)
    assert exported.read_bytes() == (tmp_path / "wanted" / exported.name).read_bytes()
    assert trained_base(exported.parent) == "a5b6"  # that of the model when it was loaded
    lifecycle._evaluate(run, recorder, policy, "before", 0)
    assert recorder.evaluations.get("before").accuracy == 1 / 2 and curves[1][0] == 0
    assert calls[1][0] is policy
    calls.clear()

    def submit(*arguments):
        raise LookupError(*arguments[-2:])

    workers = LoweringWorkers()
    workers.submit = submit
    more = [*run.eval_problems, step.run.stream.sets[0][2]]
    one = dataclasses.replace(run, vllm=None, workers=workers, replicas=Replicas(1, 2), eval_problems=more)
    with pytest.raises(LookupError) as asked:  # the programs of the first one's two problems, though it has one
        lifecycle._evaluate(one, recorder, policy, "before", 0)
    assert asked.value.args == (2, max(len(item.tokens) for item in more))

    def shared(replicas):
        return lifecycle.evaluate_policy(dataclasses.replace(run, replicas=replicas), policy)

    assert on_replicas(2, shared) == [result] * 2 and sorted(ids for _, ids, *_ in calls) == [[40], [41]]
