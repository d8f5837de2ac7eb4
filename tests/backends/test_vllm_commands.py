"""The command lines with vLLM, against the stand-in."""

import json
import sys

import jax.numpy as jnp
import pytest
import runs
import small
from command_lines import replaced

from qerl_jax import aqn, generate, keys, launch, load_policy
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.config import Config, ConfigError
from qerl_jax.evaluate import main as evaluate
from qerl_jax.evaluate import parse, run
from qerl_jax.models.lora import LoraConfig
from qerl_jax.parallel import Replicas
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.train import main, train

pytestmark = pytest.mark.usefixtures("nothing_drawn")
EVALUATE = [
    *("--dataset", "arithmetic", "--samples", "4", "--batch-size", "8"),
    *("--max-prompt-length", "120", "--max-completion-length", "12"),
]


def records(path):
    """The lines of problems."""
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


@pytest.mark.nightly
def test_a_greedy_evaluation_is_that_of_the_trainers_engine(stand_in, tmp_path, capsys):
    """Base, adapter and trained norms; prompts, stop rule and grader are the same, and so are the records, which the
    other backend does not go on with.
    """
    model = str(small.nvfp4(tmp_path / "model"))
    policy = load_policy(model, lora=LoraConfig(rank=4), dtype=jnp.float32)
    noisy = policy.replace(norms=aqn.perturb(policy.norms, 0.1, keys.for_step(0, keys.Purpose.AQN, 0)))
    export_adapter(noisy, tmp_path / "adapter", base_model=model)
    flags = [model, *EVALUATE, "--adapter", str(tmp_path / "adapter"), "--temperature", "0"]
    for backend, dtype in (("jax", "float32"), ("vllm", "bfloat16")):
        own = ["--backend", backend, "--dtype", dtype, "--records", str(tmp_path / f"{backend}.jsonl")]
        assert evaluate([*flags, *own]) == 0
    said = capsys.readouterr().out
    assert f"vLLM 0.22.1: {2 * policy.config.num_layers} layer norms and" in said
    assert len({line for line in said.splitlines() if line.startswith("pass@1")}) <= 1
    assert records(tmp_path / "vllm.jsonl") == records(tmp_path / "jax.jsonl")
    (begun,) = stand_in("start")
    assert begun["gpu_memory_utilization"] == 0.85 and begun["max_num_seqs"] == 8
    assert len(stand_in("generate")) == 1
    refused = {"jax": "written with dtype 'float32', this call has 'bfloat16'"}
    refused |= {"vllm": "written with vllm '0.22.1', this call has None"}
    for written, other in (("jax", "vllm"), ("vllm", "jax")):
        own = ["--backend", other, "--dtype", "bfloat16", "--records", str(tmp_path / f"{written}.jsonl")]
        assert evaluate([*flags, *own]) == 2
        assert refused[written] in capsys.readouterr().err
    assert len(stand_in("start")) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dtype", "float32"], "dtype 'float32' contradicts backend 'vllm'"),
        (["--weight-format", "nvfp4"], "backend 'vllm' cannot run weight_format 'nvfp4', quantized while loading"),
        (["--max-completion-length", "510"], "and 510 new ones exceed the model's max_position_embeddings 512"),
    ],
)
def test_evaluate_refuses_in_one_line(flags, words, stand_in, capsys):
    assert evaluate(["tiny", *replaced(EVALUATE, *flags), "--backend", "vllm"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1
    assert stand_in("start") == []


@pytest.mark.parametrize(("backend", "devices"), [("vllm", "1"), ("jax", "all")])
def test_an_evaluation_by_vllm_takes_one_device(backend, devices, stand_in, monkeypatch):
    class Sized(Exception):
        """With the flags of devices."""

    def size(found, *_):
        raise Sized(found.devices)

    monkeypatch.setattr(launch, "sized", size)
    with pytest.raises(Sized, match=devices):
        evaluate(["tiny", *EVALUATE, "--backend", backend])


def test_an_evaluation_has_room_for_the_longest_prompt_and_its_completion(stand_in, monkeypatch, tmp_path):
    class Begun(Exception):
        """With what vLLM was asked for."""

    def begin(options, model):
        raise Begun(options)

    monkeypatch.setattr(sys.modules["qerl_jax.evaluate"], "VllmEngine", begin)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1", "answer": "2"}\n' + json.dumps({"question": "é" * 50, "answer": "1"}) + "\n")
    flags = ["--backend", "vllm", "--system-prompt", ""]
    arguments, config = parse(["tiny", *replaced(EVALUATE, "--dataset", str(path)), *flags])
    with pytest.raises(Begun) as begun:
        run(arguments, config, generate)
    (options,) = begun.value.args
    tokenizer = load_tokenizer(model_path("tiny"))
    turn = {"role": "user", "content": "é" * 50}
    prompt = tokenizer.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
    assert options["max_model_len"] == len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) + 12
    assert options["max_num_seqs"] == 8


def test_the_devices_of_every_replica_count(stand_in):
    flags = ["tiny", *replaced(EVALUATE, "--max-completion-length", "64"), "--backend", "vllm"]
    config = Config("tiny", reward_funcs="strict_format", rollout_backend="vllm", max_completion_length=64)
    for count, each in ((3, 1), (1, 2), (3, 2)):
        with pytest.raises(ConfigError, match=f"^backend 'vllm' uses one GPU, this run has {count * each}:"):
            run(*parse(flags), generate, Replicas(0, count, None, each))
        with pytest.raises(ConfigError, match=f"^rollout_backend 'vllm' uses one GPU, this run has {count * each}:"):
            train(config, dry_run=True, replicas=Replicas(0, count, None, each))


def test_a_run_samples_by_vllm_with_the_policy_of_each_step(stand_in, tmp_path, nothing_compiled_ahead):
    """Two rollouts of two updates, the second with noise; evaluated before and after."""
    settings = {"dtype": "bfloat16", "max_steps": 4, "num_stages": 2, "noise_formula": "paper", "beta": 0.0}
    settings |= {
        "train_norms": False, "dynamic_sampling": False, "sigma_start": 1.0, "rollout_backend": "vllm",
        "eval_samples": 2,
    }  # fmt: skip
    settings |= {"eval_dataset": "arithmetic", "eval_batch_size": 12}
    train(runs.config(tmp_path / "run", **runs.on_small(tmp_path) | settings))
    rows = read_metrics(tmp_path / "run")
    assert [row["aqn/norms"] for row in rows] == [0, 4]  # 2 L, in the second step
    assert [load["id"] for load in stand_in("add_lora")] == [1001, 1002, 1003]  # first policy, after each step
    asked = stand_in("generate")
    assert [entry["lora"] for entry in asked] == [1001, 1001, 1002, 1003]  # evaluation, two rollouts, evaluation
    seeds = [{own["seed"] for own in entry["sampling"]} for entry in asked[1:3]]
    assert len(seeds[0]) == len(seeds[1]) == 8 and not seeds[0] & seeds[1]
    assert all(own["temperature"] == 1.0 and own["max_tokens"] == 24 for own in asked[1]["sampling"])
    (begun,) = stand_in("start")
    assert begun["gpu_memory_utilization"] == 0.4 and begun["max_model_len"] == 120 + 24
    assert begun["max_num_seqs"] == 12  # the larger of a rollout's 8 and an evaluation's
    assert set(runs.read_json(tmp_path / "run" / "evaluation.json")) == {"before", "after"}
    assert (tmp_path / "run" / "adapter").is_dir()
    # The importance weights see what vLLM sampled: without noise both differ by the rounding of bf16.
    clean, noisy = (row["sampling/sampling_logp_difference/mean"] for row in rows)
    assert 0 < clean < 0.02 < 0.1 < noisy


def test_a_dry_run_counts_no_cache_and_tells_the_share(stand_in, tmp_path, capfd):
    flags = ["--model", "tiny", "--dataset", "arithmetic", "--output-dir", str(tmp_path / "run"), "--dry-run"]
    own = ["--rollout-backend", "vllm", "--vllm-gpu-memory-utilization", "0.25", "--max-completion-length", "64"]
    assert main([*flags, *own, "--max-prompt-length", "96"]) == 0
    said = capfd.readouterr().out
    assert "keys and values of 0 sequences" in said
    assert "vLLM takes 0.25 of the GPU's memory besides" in said
