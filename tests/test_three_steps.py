"""Three steps of `qerl_jax.train` against `oracles/plain_run.py`, a straight line in NumPy and PyTorch."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pyarrow.parquet
import pytest
import runs
import safetensors.numpy
import small
from oracles.plain_policy import trained_tensors
from oracles.plain_run import PlainRun
from rich.console import Console

from qerl_jax import train
from qerl_jax.checkpoint.adapter import adapter_tensors, norm_tensors
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.models.lora import LoraConfig
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.types import FinishReason

pytestmark = pytest.mark.usefixtures("nothing_drawn")
REWARD = """
def letters(completions, **_):
    return [None if "z" in text[:2] else float("k" in text[:3]) for text in completions]
"""
# Noise, refills, a failed row, accumulation, trained norms, truncated sampling, clipping, a capped weight; six updates
# in three rollouts.
SETTINGS = {
    "dtype": "float32", "max_steps": 6, "batch_size": 12, "num_generations": 4, "num_iterations": 2,
    "tokens_per_micro_batch": 256, "max_prompt_length": 64, "max_completion_length": 10, "learning_rate": 3e-2,
    "warmup_ratio": 0.2, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-4,
    "max_grad_norm": 0.05, "lora_rank": 3, "lora_alpha": 5.0, "use_rslora": True, "train_norms": True,
    "loss_type": "grpo", "epsilon": 0.002, "epsilon_high": 0.004, "beta": 0.05, "importance_sampling_cap": 1.02,
    "scale_rewards": "batch", "mask_truncated_completions": True, "dynamic_sampling": True, "max_refill_rounds": 1,
    "temperature": 0.9, "top_k": 80, "top_p": 0.95, "min_p": 0.3, "sigma_start": 0.05, "sigma_end": 0.02,
    "num_stages": 3, "system_prompt": "Be brief.", "eval_num_generations": 2, "eval_temperature": 0.7,
    "eval_top_p": 0.9, "eval_batch_size": 5, "reward_workers": 0, "overlong_buffer": 1, "save_steps": 2, "seed": 5,
}  # fmt: skip
FAILED = {2: [9]}  # a row of the second step, before its refill
UNCHECKED = ("time/", "step_time", "tokens_per_second", "compilations")  # the machine decides


def write_problems(path, count: int, first: int) -> list[dict]:
    rows = [{"question": f"{'pens ' * (i % 3)}{first + i}+{i}?", "answer": str(first + 2 * i)} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return [{"id": i, **row} for i, row in enumerate(rows)]


def oracle(model, problems: list[dict], evaluated: list[dict], letters: str) -> PlainRun:
    """The straight line before its first step."""
    first = load_policy(model, lora=LoraConfig(SETTINGS["lora_rank"]), seed=SETTINGS["seed"])
    longest = SETTINGS["max_completion_length"]
    scope: dict = {}
    exec(REWARD, scope)
    rewards = [
        (letters, 1.0, lambda texts, _: scope["letters"](texts)),
        ("overlong", 0.5, lambda _, lengths: [-float(length == longest) for length in lengths]),
    ]
    settings = SETTINGS | {
        "sigmas": [0.0, 0.05, 0.02],  # the three stages of updates 1, 3 and 5 of 6
        "warmup_updates": 2,  # 6 · 0.2, rounded up
        "weight_decay_of_norms": 0.0,
        "norms_without_noise": 0,
    }
    return PlainRun(settings, model, problems, evaluated, adapter_tensors(first), rewards, FAILED)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The run and its oracle, finished."""
    path = tmp_path_factory.mktemp("steps")
    model = small.nvfp4(path / "model", seed=1)
    small.change_json(model / "generation_config.json", eos_token_id=[2, 0, *range(100, 200)])
    problems, evaluated = write_problems(path / "train.jsonl", 7, 20), write_problems(path / "test.jsonl", 3, 60)
    (path / "reward.py").write_text(REWARD)
    letters = f"{path / 'reward.py'}:letters"
    config = runs.Config(
        model=str(model), output_dir=str(path / "run"), dataset=str(path / "train.jsonl"),
        eval_dataset=str(path / "test.jsonl"), reward_funcs=(letters, "overlong"), reward_weights=(1.0, 0.5),
        **SETTINGS,
    )  # fmt: skip

    at = {"step": 0, "round": 0}
    real_collect, real_generate = train.collect_experience, train.generate

    def collect(*arguments):
        at.update(step=at["step"] + 1, round=0)
        return real_collect(*arguments)

    def generate(*arguments, **options):
        rollout, rows = real_generate(*arguments, **options), FAILED.get(at["step"], []) if at["round"] == 0 else []
        at["round"] += 1
        finish, logprobs = np.array(rollout.finish), np.array(rollout.logprobs)
        finish[rows], logprobs[rows] = FinishReason.FAILED, np.nan
        return rollout.replace(finish=jnp.asarray(finish), logprobs=jnp.asarray(logprobs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "generate", generate)
        patch.setattr(train, "collect_experience", collect)
        state = train.train(config, Console(quiet=True))

    plain = oracle(model, problems, evaluated, letters)
    before = plain.evaluate()
    plain.run()
    return state, path / "run", plain, {"before": before, "after": plain.evaluate()}


def test_the_configuration_exercises_what_it_is_for(both):
    """Refilled groups and equal ones that stay, a failed row, truncated and ended ones, both clips, a binding cap."""
    _, _, plain, evaluations = both
    values = {name: [row[name] for row in plain.metrics] for name in plain.metrics[0]}
    assert sum(values["dynamic_sampling/refilled_groups"]) > 0 and max(values["frac_reward_zero_std"]) > 0
    assert values["completions/failed"] == [0, 1, 0]
    assert max(values["completions/clipped_ratio"]) > 0
    assert max(values["clip_ratio/low_mean"]) > 0 and max(values["clip_ratio/high_mean"]) > 0
    assert max(values["sampling/importance_sampling_ratio/max"]) > SETTINGS["importance_sampling_cap"]
    assert min(values["grad_norm"]) > SETTINGS["max_grad_norm"] and max(values["kl"]) > 1e-4
    assert evaluations["before"]["mean_length"] != evaluations["after"]["mean_length"]


def test_every_column_of_the_completions(both):
    _, directory, plain, _ = both
    for step, wanted in enumerate(plain.completions, 1):
        table = pyarrow.parquet.read_table(directory / "completions" / f"step_{step:06d}.parquet").to_pydict()
        assert list(table) and set(table) == set(wanted)
        for name, column in wanted.items():
            if isinstance(column[0], float):
                np.testing.assert_allclose(table[name], column, rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}")
            else:
                assert table[name] == column, f"{name}, step {step}"


def test_every_metric(both):
    _, directory, plain, _ = both
    rows = read_metrics(directory)
    assert len(rows) == len(plain.metrics) == 3
    for found, wanted in zip(rows, plain.metrics, strict=True):
        assert {name for name in found if not name.startswith(UNCHECKED)} == set(wanted)
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=3e-4, abs=2e-6), f"{name}, step {wanted['step']}"


def test_both_evaluations(both):
    _, directory, _, evaluations = both
    found = runs.read_json(directory / "evaluation.json")
    for result in found.values():
        estimates = result.pop("estimates")
        n, ungraded = result["generations"], result.pop("ungraded")
        assert n > 1 and ungraded == [] and {f"avg@{n}", f"pass@{n}", f"maj@{n}"} <= set(estimates)
        assert all(estimate == [0, 0, result["high"]] for estimate in estimates.values())
    assert {name: pytest.approx(value, rel=1e-6) for name, value in evaluations.items()} == found


def test_the_state_and_the_adapter(both):
    """Parameters, AdamW's moments and counters; the exported file holds the same parameters."""
    state, directory, plain, _ = both
    wanted = {name: value.detach().numpy() for name, value in trained_tensors(plain.model).items()}
    policy = load_policy(directory.parent / "model", lora=LoraConfig(SETTINGS["lora_rank"]))
    found = tensors_of(policy, state.lora, state.norms)
    exported = safetensors.numpy.load_file(directory / "adapter" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys() == exported.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(exported[name], found[name], err_msg=name)
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4 * np.abs(value).max(), err_msg=name)
    described = runs.read_json(directory / "adapter" / "adapter_config.json")
    assert (described["r"], described["lora_alpha"], described["use_rslora"]) == (3, 5.0, True)
    assert (int(state.step), int(state.cursor), plain.updates) == (3, plain.cursor, 6)
    for moment, name_there in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
        trees = optax.tree.get(state.opt_state, moment)
        moments = tensors_of(policy, trees["lora"], trees["norms"])
        for name, parameter in trained_tensors(plain.model).items():
            value = plain.optimizer.state[parameter][name_there].numpy()
            np.testing.assert_allclose(
                moments[name], value, rtol=3e-3, atol=1e-3 * np.abs(value).max(), err_msg=f"{moment} of {name}"
            )


def tensors_of(policy, lora, norms) -> dict[str, np.ndarray]:
    """Trees of adapters and norms by PEFT name."""
    policy = policy.replace(lora=lora, norms=norms)
    return adapter_tensors(policy) | {f"base_model.model.{k}": v for k, v in norm_tensors(policy).items()}
