"""A run resumes from what it was: model, dataset and reward file by their fingerprints, metrics.jsonl by its steps."""

import array
import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
from replicas import on_replicas
from rich.console import Console

from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.orbax import Checkpointer
from qerl_jax.checkpoint.safetensors import CheckpointError, model_fingerprint
from qerl_jax.config import Config, ConfigError, dump, load
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import EncodedProblem
from qerl_jax.evaluation import Evaluation
from qerl_jax.parallel import ALONE
from qerl_jax.reporting.metrics import MetricsFile, cut_back, read_evaluations, write_evaluations
from qerl_jax.rl.state import init_state
from qerl_jax.run import directory as run_directory
from qerl_jax.run.fingerprints import (
    PROMPTS_DATE,
    fingerprints,
    function_fingerprint,
    problems_fingerprint,
    prompts_date,
)
from qerl_jax.run.lifecycle import _kept_evaluations, restore
from qerl_jax.train import parse
from qerl_jax.types import TrainState


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("inputs")
    small.bf16(place / "model", shards=1)
    (place / "mine.py").write_text("def reward(completions, **_):\n    return [0.0 for _ in completions]\n")
    return place


def config_of(place: Path, **changes: object) -> Config:
    fixed = {"model": str(place / "model"), "dtype": "float32", "output_dir": str(place / "run"), "max_steps": 8}
    return Config(reward_funcs=(f"{place / 'mine.py'}:reward",), **(fixed | changes))


def problem(i: int, answer: str = "1") -> EncodedProblem:
    return EncodedProblem(Problem(i, "?", answer), array.array("i", [i, 2, 3]))


@pytest.fixture(scope="module")
def state(place) -> TrainState:
    config = config_of(place)
    return init_state(load_policy(config.model, lora=config.lora), config)


def test_prompts_keep_the_date_of_the_runs_start(state, tmp_path):
    """Tomorrow's resume would else have another dataset, where a chat template writes the date."""
    config = dataclasses.replace(state.config, output_dir=str(tmp_path))
    today = {datetime.date.today()}
    resumed = dataclasses.replace(config, resume="auto")
    assert {prompts_date(config, ALONE), prompts_date(resumed, ALONE)} <= today | {datetime.date.today()}
    Checkpointer(tmp_path, 1, {PROMPTS_DATE: "2024-07-26"}).save(state)
    assert prompts_date(resumed, ALONE) == datetime.date(2024, 7, 26)
    assert prompts_date(config, ALONE) in today | {datetime.date.today()}
    # That of the first replica, where another has another day already.
    dates = on_replicas(2, lambda replicas: prompts_date(resumed if replicas.is_first else config, replicas))
    assert dates == [datetime.date(2024, 7, 26)] * 2


def test_exchanged_inputs_are_named_and_refused_unless_told(place, state, tmp_path):
    config = state.config
    items = [problem(0), problem(1)]
    before = fingerprints(config, [items], [])
    checkpoints = Checkpointer(tmp_path, 1, before)
    checkpoints.save(state)
    checkpoints.restore(state)
    Checkpointer(tmp_path, 1, before | {"an input of a later version": "0"}).restore(state)

    reward, weights = place / "mine.py", place / "model" / "model.safetensors"
    sound = {path: path.read_bytes() for path in (reward, weights)}
    changed = bytearray(sound[weights])
    changed[len(changed) // 2] ^= 1  # one bit
    exchanged = {
        f"reward {config.reward_funcs[0]}": (reward, b"#" + sound[reward], [items]),
        f"model {config.model}": (weights, bytes(changed), [items]),
        "dataset gsm8k": (reward, sound[reward], [[problem(0), problem(1, "2")]]),
    }
    for name, (path, content, sets) in exchanged.items():
        path.write_bytes(content)
        now = fingerprints(config, sets, [])
        path.write_bytes(sound[path])
        said = f"0: {name} is not what it was when the checkpoint was saved (SHA-256 {before[name][:12]}…, now"
        with pytest.raises(ConfigError, match=re.escape(said)):
            Checkpointer(tmp_path, 1, now).restore(state)
        told = state.replace(config=dataclasses.replace(config, allow_changed_inputs=True))
        Checkpointer(tmp_path, 1, now).restore(told)
    assert fingerprints(config, [items], []) == before


def test_an_exchanged_evaluation_or_dataset_is_named(place):
    """By its own problems, not those of the training or of another dataset."""
    config = config_of(place, eval_dataset="arithmetic")
    before, *others = (
        fingerprints(config, [[problem(i)]], evaluated)
        for i, evaluated in (
            (0, [problem(5)]), (0, [problem(5, "2")]), (0, [problem(5), problem(6)]), (1, [problem(5)]),
        )
    )  # fmt: skip
    changed = [{name for name in before if before[name] != other[name]} for other in others]
    assert changed == [{"eval_dataset arithmetic"}, {"eval_dataset arithmetic"}, {"dataset gsm8k"}]
    config = config_of(place, dataset=("gsm8k", "math"))
    before, other = (fingerprints(config, [[problem(0)], [problem(1, answer)]], []) for answer in "12")
    assert {name for name in before if before[name] != other[name]} == {"dataset math"}


def test_results_of_other_problems_or_of_another_run_are_not_kept(state, tmp_path):
    """Those before training are of the run that begins with them, and of these problems; those after, of its end."""
    config = dataclasses.replace(state.config, output_dir=str(tmp_path), eval_dataset="arithmetic", max_steps=2)
    results = {name: Evaluation(0.5, 0.4, 0.6, 0.5, 0.0, 0.0, 1.0, 8, 1) for name in ("before", "after")}
    inputs = {"eval_dataset arithmetic": "1", "dataset gsm8k": "2"}
    Checkpointer(tmp_path, 1, inputs).save(state.replace(step=jnp.int32(1)))
    for step, changes, kept in (
        (2, {}, ["before", "after"]), (2, {"dataset gsm8k": "3"}, ["before", "after"]), (1, {}, ["before"]),
        (1, {"eval_dataset arithmetic": "3"}, []), (0, {}, []),
    ):  # fmt: skip
        write_evaluations(tmp_path, results)
        assert list(_kept_evaluations(config, inputs | changes, step)) == list(read_evaluations(tmp_path)) == kept


def test_every_file_that_a_policy_is_made_of_counts(tmp_path):
    """Weights, configs, tokenizer and chat template, by name too; nothing else, no result of an evaluation either."""
    model = tmp_path / "model"
    model.mkdir()
    weights = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
    configs = ("config.json", "generation_config.json", "tokenizer_config.json", "hf_quant_config.json")
    tokenizer = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json", "chat_template.jinja")
    others = {"README.md", "result.json", "tokenizer.json.bak"}
    names = (*weights, *configs, *tokenizer, "adapter_config.json", *others)
    for name in names:
        (model / name).write_text("a")
    whole, changed = model_fingerprint(model), set()
    for name in names:
        (model / name).write_text("b")
        changed |= {name} if model_fingerprint(model) != whole else set()
        (model / name).write_text("a")
    assert changed == set(names) - others and model_fingerprint(model) == whole
    (model / "config.json").rename(model / "other_config.json")
    assert model_fingerprint(model) != whole


def test_a_dataset_is_its_ids_tokens_answers_and_columns_in_order():
    """Of one problem each other: none of them has the fingerprint of another."""
    one, tokens = Problem(0, "?", "1", extra={"hint": "a"}), array.array("i", [1, 2])
    others = [
        dataclasses.replace(one, id=1),
        dataclasses.replace(one, answer="2"),
        dataclasses.replace(one, extra={"hint": "b"}),
        dataclasses.replace(one, extra={"help": "a"}),
    ]
    items = [EncodedProblem(problem, tokens) for problem in (one, *others)]
    items += [EncodedProblem(one, array.array("i", ids)) for ids in ([1, 3], [2, 1])]
    sets = [[item] for item in items] + [items[:2], items[1::-1]]
    assert len({problems_fingerprint(some) for some in sets}) == len(sets)


@dataclasses.dataclass(frozen=True)
class Scaled:
    by: float

    def __call__(self, value: float) -> float:
        return self.by * value


def test_a_function_is_its_source_and_what_it_holds():
    """Not its own record, which a notebook's second call finds filled."""

    def scaled(by: object, record: list) -> Callable:
        return lambda value, scale=1: record.append(value) or by * value * scale

    functions = [
        None, scaled(1, []), scaled(1.5, []), scaled(Scaled(1), []), Scaled(1), Scaled(2), Scaled(1).__call__,
        functools.partial(scaled, 1), functools.partial(scaled, 2), optax.lion(1e-4), optax.lion(1.0),
        optax.lion(optax.cosine_decay_schedule(1e-4, 8)), optax.lion(optax.cosine_decay_schedule(1e-4, 9)),
        optax.sgd(1e-4), jax.jit(Scaled(1)), jax.jit(Scaled(2)),
    ]  # fmt: skip
    prints = [function_fingerprint(function) for function in functions]
    assert len(set(prints)) == len(functions)
    assert function_fingerprint(scaled(1, [2])) == prints[1] and function_fingerprint(optax.lion(1.0)) == prints[10]


def test_a_large_model_is_sampled_all_over(tmp_path):
    """3 MB: a change of every weight, as any training makes it, of the header or of the end shows."""
    path, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    data = rng.integers(0, 256, 3_000_000).astype(np.uint8)
    path.write_bytes(data.tobytes())
    seen = {model_fingerprint(tmp_path)}
    for start, stop in ((0, 8), (2_999_990, 3_000_000), (1_500_000, 1_560_000)):
        other = data.copy()
        other[start:stop] ^= 1
        path.write_bytes(other.tobytes())
        seen.add(model_fingerprint(tmp_path))
    assert len(seen) == 4


def written(directory: Path, steps: list[int]) -> Path:
    for step in steps:
        MetricsFile(directory).append(step, {"num_tokens": 10 * step})
    return directory


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([1, 2], "ends where step 3 must stand"),
        ([], "ends where step 1 must stand"),
        ([1, 3], "has step 3 where step 2 must stand"),
        ([1, 2, 2, 3], "has step 2 where step 3 must stand"),
        ([1, 2, 3, 3], "has step 3 where step 4 must stand"),
        ([2, 1, 3], "has step 2 where step 1 must stand"),
    ],
)
def test_metrics_that_are_cut_doubled_or_gone_are_refused(tmp_path, steps, said):
    written(tmp_path, steps)
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path}/metrics.jsonl {said}")):
        cut_back(tmp_path, 3)
    kept = (tmp_path / "metrics.jsonl").read_text().splitlines() if steps else []
    assert [json.loads(line)["step"] for line in kept] == steps


def test_metrics_with_all_steps_go_on(tmp_path):
    assert cut_back(written(tmp_path, [1, 2, 3, 4]), 3) == 30 and cut_back(tmp_path, 3) == 30


def test_a_resume_that_finds_nothing_says_so(place, state, tmp_path, capsys):
    assert restore(config_of(place, resume="auto"), Checkpointer(tmp_path, 1), state, Console()) is state
    assert "no checkpoint to resume in" in capsys.readouterr().out


def test_a_resume_says_from_where_and_what_has_changed(state, tmp_path, capsys):
    """Of the newest of two checkpoints; then the run ends later, also one that was at its end. One update
    was not finite and does not count. Cosines by hand: after a step of warm-up 3 and 6 of 7, after two 2 and 5 of 18;
    the noise of stages 7, 3, 9 and 4 is 0.01 · 20 ** -((stage - 1) / 8).
    """
    config = dataclasses.replace(
        state.config, output_dir=str(tmp_path), resume="auto", sigma_start=1e-2, sigma_end=5e-4
    )
    state = state.replace(config=config)

    def save(step: int) -> None:
        counted = jax.tree.map(lambda leaf: leaf + (step - 1) * (leaf.dtype == jnp.int32), state.opt_state)
        Checkpointer(tmp_path, 2).save(state.replace(step=jnp.int32(step), opt_state=counted))

    save(3)
    said = {
        (5, 5): "max_steps: 8 -> 5\nresuming after step 5 of 5: nothing is left to train, a larger max_steps goes on\n",
        (5, 8): "resuming after step 5 of 8\n",
        (5, 20): "max_steps: 8 -> 20; learning rate of step 6: 6.11e-05 -> 9.7e-05; its noise: 0.00106 -> 0.00473\n"
        "resuming after step 5 of 20\n",
        (8, 20): "max_steps: 8 -> 20; learning rate of step 9: 4.95e-06 -> 8.21e-05; its noise: 0.0005 -> 0.00325\n"
        "resuming after step 8 of 20\n",
    }
    for (step, steps), lines in said.items():
        save(step)
        (tmp_path / "checkpoints" / "7").mkdir(exist_ok=True)  # without a manifest
        changed = dataclasses.replace(config, max_steps=steps)
        found = restore(changed, Checkpointer(tmp_path, 2), state.replace(config=changed), Console(soft_wrap=True))
        assert int(found.step) == step and capsys.readouterr().out == lines


def test_a_run_that_was_moved_is_found_beside_its_config(place, tmp_path):
    moved = tmp_path / "a run"
    (moved / "checkpoints" / "4").mkdir(parents=True)
    (moved / "checkpoints" / "4" / "manifest.json").write_text("{}")
    (moved / "config.yaml").write_text(dump(config_of(place)))
    flags = ["--config", str(moved / "config.yaml"), "--resume", "auto"]
    with pytest.raises(ConfigError, match=re.escape(f"--output-dir '{moved}'")):
        parse(flags)
    assert parse([*flags, "--output-dir", str(moved)]).output_dir == str(moved)
    assert parse(flags[:2]).output_dir == str(place / "run")


def test_the_flag_holds_for_one_start_and_commands_are_quoted(place, tmp_path):
    run_directory.write_config(tmp_path, config_of(place, allow_changed_inputs=True))
    assert not load(tmp_path / "config.yaml").allow_changed_inputs
    assert f"--config '{tmp_path}/a b/config.yaml'" in run_directory.resume_command(tmp_path / "a b")
