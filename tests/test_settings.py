"""Settings: the value of each where nothing is given, and where a value that is given arrives."""

import dataclasses
import inspect
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from helpers import assert_trees_equal, randomized
from rich.console import Console

import qerl_jax
from qerl_jax import keys
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.config import Config
from qerl_jax.evaluate import main as evaluate
from qerl_jax.evaluate import parse
from qerl_jax.models.formats import Nvfp4
from qerl_jax.models.lora import LoraConfig
from qerl_jax.rl.adamw import AdamW
from qerl_jax.run import prepare
from qerl_jax.run.dry_run import local_problems
from qerl_jax.run.hooks import Hooks
from qerl_jax.types import Engine, Sampling


def test_what_follows_from_the_defaults_of_a_config():
    """The defaults themselves are in docs/config.md, which a test holds against the code."""
    config = Config()
    assert config.upper_clip == 0.28 and config.lora.scale == 1 and config.overlong_tokens == 204
    assert config.resampling_rounds == 0


OF_PYTHON = {
    "evaluate": {"seed": 0, "system_prompt": "", "max_prompt_length": 512},
    "group_advantages": {"scale_rewards": "group"},
    "load_dataset": {"asks_itself": False, "first_id": 0},
    "load_policy": {"weight_format": None, "seed": 0},
    "make_batch": {"mask_truncated_completions": False},
    "quantize_checkpoint": {"weight_format": "nvfp4"},
    "token_logprobs": {"temperature": 1.0},
    "LoraConfig": {"rank": 32, "alpha": None, "use_rslora": False},
    "Sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "num_generations": 1},
}


def test_defaults_that_results_depend_on():
    """Of Python's functions, and of the evaluation's own flags."""
    for name, wanted in OF_PYTHON.items():
        parameters = inspect.signature(getattr(qerl_jax, name)).parameters
        assert {field: parameters[field].default for field in wanted} == wanted, name
    own, _ = parse(["tiny"])
    assert (own.dataset, own.split, own.max_prompt_length, own.max_completion_length) == ("gsm8k", "test", 4096, 4096)


TELLING = {
    "batch_size": 12, "num_generations": 3, "max_steps": 41, "num_iterations": 4, "max_completion_length": 23,
    "temperature": 0.8, "top_k": 31, "top_p": 0.91, "min_p": 0.07,
    "eval_num_generations": 5, "eval_temperature": 0.3, "eval_top_p": 0.83, "eval_batch_size": 17,
    "rollout_memory_gb": 3.5, "batch_invariant": True,
    "lora_rank": 6, "lora_alpha": 9.0, "use_rslora": True, "lora_target_modules": ("q_proj", "up_proj"),
    "learning_rate": 3e-3, "lr_scheduler_type": "linear", "warmup_ratio": 0.26, "weight_decay": 0.31,
    "adam_beta1": 0.81, "adam_beta2": 0.92, "adam_epsilon": 1e-5,
    "data_order": "level", "reward_columns": ("tests", "level", "level of"), "dynamic_sampling": True,
    "max_refill_rounds": 7, "overlong_buffer": 11, "epsilon_high": 0.37,
}  # fmt: skip


def test_what_becomes_of_a_configs_fields():
    """41 updates of 4 a rollout are 11 rollouts, so 44 updates; 44 · 0.26 of them, rounded up, warm up."""
    config = Config(**TELLING)
    found = {name: getattr(config, name) for name in ("sampling", "eval_sampling", "engine", "eval_engine", "lora")}
    assert found == {
        "sampling": Sampling(23, 0.8, 31, 0.91, 0.07, 3),
        "eval_sampling": Sampling(23, 0.3, 0, 0.83, 0.0, 5),
        "engine": Engine(None, 3.5, 8, True),
        "eval_engine": Engine(17, 3.5, 8, True),
        "lora": LoraConfig(6, 9.0, True, ("q_proj", "up_proj")),
    }
    assert config.lora.scale == pytest.approx(9 / 6**0.5)
    optimizer = dataclasses.asdict(AdamW.of(config))
    assert optimizer == {
        "learning_rate": np.float32(3e-3), "warmup": 12, "updates": 44, "lr_scheduler_type": "linear",
        "adam_beta1": 0.81, "adam_beta2": 0.92, "adam_epsilon": 1e-5, "weight_decay": 0.31,
    }  # fmt: skip
    assert (config.num_prompts, config.num_rollouts, config.resampling_rounds) == (4, 11, 7)
    assert (config.order_column, config.read_columns) == ("level", ("tests", "level", "level of"))
    assert (config.overlong_tokens, config.upper_clip, config.vllm_share) == (11, 0.37, 0.0)
    shares = {given: Config(rollout_backend="vllm", vllm_gpu_memory_utilization=given) for given in (None, 0.25)}
    assert {given: own.vllm_share for given, own in shares.items()} == {None: 0.4, 0.25: 0.25}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """(Model, adapter with norms, its policy): of rank 2, alpha 3 and two projections."""
    place = tmp_path_factory.mktemp("adapted")
    model, lora = small.bf16(place / "model", shards=1), LoraConfig(2, 3.0, False, ("q_proj", "up_proj"))
    policy = randomized(load_policy(model, "nvfp4", lora, jnp.float32), seed=1)
    export_adapter(policy, place / "adapter")
    return model, place / "adapter", policy


def test_a_run_loads_what_its_config_names(adapted):
    """Its adapter in place of fresh ones, its format and dtype; its kernels, which a CPU does not have."""
    model, adapter, policy = adapted
    shape = {"lora_rank": 2, "lora_alpha": 3.0, "lora_target_modules": ("q_proj", "up_proj")}
    config = Config(model=str(model), adapter=str(adapter), weight_format="nvfp4", dtype="float32", **shape)
    found = prepare.load(config)
    assert_trees_equal((found.frozen, found.norms, found.lora), (policy.frozen, policy.norms, policy.lora))
    assert found.dtype == jnp.float32
    with pytest.raises(ValueError, match="mosaic_gpu"):
        prepare.load(dataclasses.replace(config, matmul_kernel="mosaic_gpu"))


def test_every_flag_of_an_evaluation_arrives(adapted, tmp_path, capsys):
    """Which split, columns, prompts, weights, samples and limits: by the arguments of the rollout; kernels by their
    absence on a CPU.
    """
    model, adapter, policy = adapted
    rows = [{"q": f"{'long ' * 20}{i} + {i}?", "a": str(2 * i), "question": "no"} for i in range(9)]  # no "answer"
    for split, own in (("train", rows[:6]), ("test", rows[6:])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, own)))
    flags = {
        "adapter": adapter, "dataset": tmp_path, "split": "train", "samples": 5, "prompt-column": "q",
        "answer-column": "a", "system-prompt": "Be brief.", "max-prompt-length": 40,
        "overlong-prompts": "truncate_left", "max-completion-length": 7, "num-generations": 3, "temperature": 0.7,
        "top-p": 0.85, "seed": 11, "batch-size": 4, "rollout-memory-gb": 0.5, "problems-at-once": 2,
        "dtype": "float32", "records": tmp_path / "records.jsonl",
    }  # fmt: skip
    seen = []

    def generate(*arguments):
        seen.append(arguments)
        raise ValueError("seen")

    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert evaluate([str(model), *words, "--batch-invariant"], generate) == 2
    assert capsys.readouterr().err == "error: seen\n"
    [(actor, prompts, sampling, key, engine)] = seen
    assert_trees_equal((actor.frozen, actor.norms, actor.lora), (policy.frozen, policy.norms, policy.lora))
    assert isinstance(actor.frozen["layers"][0]["self_attn"]["o_proj"]["weight"], Nvfp4)
    assert sampling == Sampling(7, 0.7, 0, 0.85, 0.0, 3)
    assert engine == Engine(4, 0.5, 8, True, 2)
    wanted = keys.for_step(11, keys.Purpose.EVALUATE, 0)
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(wanted))
    assert prompts.ids.tolist() == [0, 1] and prompts.lengths.tolist() == [40, 40]
    texts = [actor.tokenizer.decode(np.asarray(row).tolist()) for row in prompts.tokens]
    assert [text.partition(" + ")[0].split()[-1] for text in texts] == ["0", "1"]
    settings = json.loads((tmp_path / "records.jsonl").read_text().splitlines()[0])
    told = {name.replace("-", "_"): value for name, value in flags.items() if name != "records"}
    found = settings.get("settings", settings)
    assert {name: str(found[name]) for name in told} == {name: str(value) for name, value in told.items()}
    assert found["weight_format"] == "nvfp4" and found["batch_invariant"] is True
    assert evaluate([str(model), *words[:-2], "--matmul-kernel", "mosaic_gpu"], generate) == 2
    assert "mosaic_gpu" in capsys.readouterr().err


def test_hooks_that_change_the_training_are_named_and_kept():
    """Each of them; one that only looks on is neither in the report nor in a checkpoint's fingerprints."""
    names = ("problems", "sigma", "perturb", "token_loss", "optimizer")
    hooks = Hooks(**dict.fromkeys(names, prepare.check), on_step=prepare.load)
    assert hooks.given() == dict.fromkeys(names, "qerl_jax.run.prepare.check") and Hooks().given() == {}
    changed = {name for name, text in hooks.fingerprints().items() if text != Hooks().fingerprints()[name]}
    assert changed == {f"hook {name}" for name in names} == set(Hooks().fingerprints())


def test_a_run_reads_the_columns_that_its_config_names(adapted, tmp_path):
    model, _, policy = adapted
    row = {"q": "1 + 1?", "a": "2", "level": 3, "question": "no", "answer": "no"}
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"level": level}) for level in (5, 3, 4)))
    columns = {"prompt_column": "q", "answer_column": "a", "data_order": "level", "eval_samples": 2}
    files = {"dataset": str(tmp_path / "rows.jsonl"), "eval_dataset": str(tmp_path / "rows.jsonl")}
    config = Config(model=str(model), max_prompt_length=512, **columns, **files)
    stream, evaluation = prepare.load_problems(config, policy.tokenizer, Console(quiet=True))
    assert [item.problem.extra["level"] for item in stream.at(0, 3)] == [3, 4, 5]
    for items in stream.at(0, 3), evaluation:
        assert {(item.problem.prompt, item.problem.answer) for item in items} == {("1 + 1?", "2")}
    assert len(evaluation) == 2
    planned = dataclasses.replace(config, max_steps=1)
    shown = local_problems(planned, policy.tokenizer, Console(quiet=True), [])  # in a dry run
    assert [item.problem.extra["level"] for item in shown] == [3, 5, 3, 4]
    console = Console(record=True, file=io.StringIO(), width=200)
    mixed = dataclasses.replace(config, dataset=(*config.dataset, "math"), max_steps=-1)
    local_problems(mixed, policy.tokenizer, console, [1000])  # 1000 is a problem of the hub's, which is not read
    assert "max_steps" not in console.export_text()  # which nobody knows without its size
    for rewards, said in (("answer",), 0), (("mine.py:f", "answer"), 1):
        console = Console(record=True, file=io.StringIO(), width=200)
        prepare.load_problems(dataclasses.replace(config, reward_funcs=rewards), policy.tokenizer, console)
        told = "rows.jsonl: columns not given to rewards: answer, question (reward_columns)"
        assert console.export_text().count(told) == said
