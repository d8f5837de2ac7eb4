"""vLLM as engine of rollouts, against a stand-in that computes with the adapter and norms that reached it."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
import small
from helpers import logprobs_of, randomized
from processes import is_running

from qerl_jax import LoraConfig, Prompts, Sampling, aqn, generate, keys, load_policy
from qerl_jax.backends.vllm_engine import VllmEngine, VllmError, Weights, assemble, row_seeds, sampling_arguments
from qerl_jax.backends.vllm_settings import check, engine_options, refuse_version
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.safetensors import CheckpointError
from qerl_jax.config import Config, ConfigError
from qerl_jax.types import FinishReason, completion_ids

LISTS = [[5, 6, 7], [9], [11, 12, 13, 14]]
PROMPTS = Prompts.from_lists(LISTS, ids=[3, 4, 5])
SAMPLING = Sampling(6, temperature=0.8, num_generations=2)
KEY = keys.for_step(0, keys.Purpose.SAMPLE, 0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return small.nvfp4(tmp_path_factory.mktemp("models") / "nvfp4")


@pytest.fixture(scope="module")
def policy(base):
    """Random adapters, in fp32 as the stand-in computes."""
    return randomized(load_policy(base, lora=LoraConfig(rank=4), dtype=jnp.float32), seed=0)


def begin(base, policy):
    config = Config(model=str(base), rollout_backend="vllm")
    return VllmEngine(engine_options(config, base, 10, 6, 4, 0.4), policy.config)


@pytest.fixture(scope="module")
def running(install_stand_in, base, policy, tmp_path_factory):
    """(An engine, what it has been asked): one for most tests, because a process of its own starts for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        asked = install_stand_in(patch, tmp_path_factory.mktemp("running") / "stand-in")
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # whose log-probabilities are others
        patch.setenv("GLOO_SOCKET_IFNAME", "eth7")
        patch.delenv("NCCL_SOCKET_IFNAME", raising=False)
        engine = begin(base, policy)
    yield engine, asked
    engine.close()
    assert not engine.directory.exists()


def noisy(policy, step, sigma=0.05):
    return policy.replace(norms=aqn.perturb(policy.norms, sigma, keys.for_step(0, keys.Purpose.AQN, step)))


def of_policy(policy, rollout, temperature):
    """Log-probabilities of a rollout's completions by the trainer."""
    found = logprobs_of(policy, rollout.tokens, rollout.attention_mask, temperature)
    return np.where(rollout.completion_mask, np.pad(found, ((0, 0), (1, 0))), 0)


def test_a_rollout_is_that_of_the_noisy_adapted_policy(running, policy, base):
    (engine, asked), actor = running, noisy(policy, 0)
    rollout = engine.generate(actor, PROMPTS, SAMPLING, KEY)
    wanted = of_policy(actor, rollout, 0.8)
    np.testing.assert_allclose(rollout.logprobs, wanted, atol=2e-5)
    assert np.abs(of_policy(policy, rollout, 0.8) - wanted).max() > 1e-2  # without noise: another distribution

    (begun,), own = asked("start"), asked("generate")[-1]
    assert own["prompts"] == [ids for ids in LISTS for _ in range(2)]
    shared = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 6, "logprobs": 0}
    shared |= {"stop_token_ids": [2, 0], "ignore_eos": True, "detokenize": False}
    assert all(row == {**shared, "seed": row["seed"]} for row in own["sampling"])
    assert begun["model"] == str(base) and begun["logprobs_mode"] == "processed_logprobs"
    assert (begun["max_model_len"], begun["max_num_seqs"], begun["gpu_memory_utilization"]) == (10, 6, 0.4)
    assert begun["enable_lora"] and begun["max_lora_rank"] == 8 and not begun["enable_prefix_caching"]
    assert asked("environment")[0]["values"] == ["0", "eth7", "lo"]  # ours, the user's, and ours where none is set

    assert rollout.tokens.shape == (6, 4 + 6) and rollout.entropies is None
    assert rollout.prompt_index.tolist() == [0, 0, 1, 1, 2, 2]
    ended = [ids[-1] in policy.config.eos_token_ids for ids in completion_ids(rollout)]
    assert rollout.finish.tolist() == [FinishReason.EOS if end else FinishReason.LENGTH for end in ended]
    assert all(end or len(ids) == 6 for ids, end in zip(completion_ids(rollout), ended, strict=True))


def test_every_update_reaches_vllm_and_the_adapter_before_it_leaves(running, policy):
    engine, asked = running
    before = len(asked("add_lora"))
    for step, actor in enumerate((randomized(policy, seed=6), randomized(policy, seed=7))):
        rollout = engine.generate(noisy(actor, step), PROMPTS, SAMPLING, KEY)
        np.testing.assert_allclose(rollout.logprobs, of_policy(noisy(actor, step), rollout, 0.8), atol=2e-5)
    engine.generate(noisy(actor, step), PROMPTS, SAMPLING, KEY)  # nothing new: nothing is sent
    numbers = [load["id"] for load in asked("add_lora")[before:]]
    assert numbers == [1001 + before, 1002 + before]
    assert [own["lora"] for own in asked("generate")[-3:]] == [numbers[0], numbers[1], numbers[1]]
    assert [path.name for path in engine.directory.iterdir() if path.is_dir()] == [f"adapter-{numbers[1]}"]


def test_completions_beyond_the_models_positions_are_refused(running):
    engine, _ = running
    with pytest.raises(ValueError, match=r"4 tokens and 253 new ones exceed.*max_position_embeddings 256"):
        engine.sample(PROMPTS, dataclasses.replace(SAMPLING, max_new_tokens=253), KEY)


def test_norms_keep_their_fp32_bits(running, policy):
    """A σ of 1e-4 is lost in bf16, whose spacing above 1 is 2^-7."""
    engine, _ = running
    engine.set_weights(Weights.of_policy(noisy(policy, 0, sigma=1e-4)))
    loud = Weights.of_policy(noisy(policy, 1, sigma=1e-4))
    found = engine._ask(("set_layer_norms", (loud.norms,)), "layer norms")
    engine.set_weights(loud)
    assert len(found) == 2 * policy.config.num_layers
    for name, value in loud.norms.items():
        assert found[name].dtype == np.float32 and found[name].tobytes() == value.tobytes()


def test_norms_that_did_not_arrive_are_sent_again(policy):
    """With the dtype that they have, too."""
    quiet, loud = (Weights.of_policy(noisy(policy, seed)) for seed in (0, 1))
    engine, sent = object.__new__(VllmEngine), []
    engine._norms, engine._lora = quiet.norms, quiet.lora
    answers = [{name: value.astype(np.float64) for name, value in loud.norms.items()}, quiet.norms]
    engine._ask = lambda message, _: sent.append(message[1][0]) or answers.pop(0)
    with pytest.raises(VllmError, match="4 of 4 layer norms"):
        engine.set_weights(loud)
    engine.set_weights(quiet)
    assert [norms is weights.norms for norms, weights in zip(sent, (loud, quiet), strict=True)] == [True, True]


def test_a_base_without_an_adapter(running, base):
    engine, asked = running
    engine.set_weights(Weights.of_files(base, None))
    rollout = engine.sample(PROMPTS, SAMPLING, KEY)
    plain = load_policy(base, lora=LoraConfig(rank=0), dtype=jnp.float32)
    np.testing.assert_allclose(rollout.logprobs, of_policy(plain, rollout, 0.8), atol=2e-5)
    assert asked("generate")[-1]["lora"] is None


def test_the_weights_of_an_exported_adapter_are_the_policys(policy, base, tmp_path):
    export_adapter(noisy(policy, 0), tmp_path / "adapter", base_model=str(base))
    stored, held = Weights.of_files(base, tmp_path / "adapter"), Weights.of_policy(noisy(policy, 0))
    for ours, theirs in ((held.lora, stored.lora), (held.norms, stored.norms)):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert stored.config.rank == 4
    for name in small.TOKENIZER:
        shutil.copy(base / name, tmp_path / "adapter" / name)
    Weights.of_files(base, tmp_path / "adapter")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(CheckpointError, match="the tokenizer is not the base's: chat_template is"):
        Weights.of_files(base, tmp_path / "adapter")


def test_greedy_completions_are_the_engines_own(running, policy):
    greedy = Sampling(6, temperature=0)
    found, wanted = running[0].generate(policy, PROMPTS, greedy, KEY), generate(policy, PROMPTS, greedy, KEY)
    for name in ("tokens", "lengths", "finish", "prompt_lengths", "prompt_index", "logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)


def test_seeds_are_a_function_of_step_problem_and_sample(running, policy):
    engine, asked = running

    def seeds(step, prompts, group):
        key = keys.for_step(0, keys.Purpose.SAMPLE, step)
        engine.generate(policy, prompts, SAMPLING.replace(num_generations=group), key)
        return [own["seed"] for own in asked("generate")[-1]["sampling"]]

    first = seeds(0, PROMPTS, 2)
    assert len({*first, *seeds(1, PROMPTS, 2)}) == 12
    assert seeds(0, Prompts.from_lists(LISTS[1:2], ids=[4]), 2) == first[2:4]  # whatever stands beside it
    assert seeds(0, Prompts.from_lists([LISTS[0]] * 2, ids=[3, 3]), 1) == first[:2]  # asked for twice: two samples
    assert len(set(seeds(0, Prompts.from_lists([LISTS[0]] * 2, ids=[3, 3]), 2))) == 4


def test_every_setting_of_the_sampler_reaches_vllm():
    sampling = Sampling(7, temperature=0.7, top_k=5, top_p=0.9, min_p=0.2, num_generations=3)
    assert sampling_arguments(sampling, (4, 2)) == {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.2, "max_tokens": 7, "stop_token_ids": [4, 2],
        "ignore_eos": True, "logprobs": 0, "detokenize": False,
    }  # fmt: skip


def test_seeds_fill_the_63_bits_that_vllm_takes():
    """So that no two of a run's rows are likely to have the same: of 2^31, two of 2,000 would in 1 of 1,000 steps."""
    seeds = row_seeds(keys.for_step(0, keys.Purpose.SAMPLE, 0), np.arange(64), np.zeros(64, int))
    assert min(seeds) >= 0 and 1 << 62 < max(seeds) < 1 << 63
    for bits in (seeds, [seed & 0xFFFFFFFF for seed in seeds], [seed >> 32 for seed in seeds]):
        assert len(set(bits)) == 64


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("start", r"vLLM failed \(start\): RuntimeError: no memory left for the KV cache; the end of its log:"),
        ("norms", r"1 of 4 layer norms in vLLM are not those written: model\.layers\.0\.input_layernorm"),
        ("adapter", r"vLLM has the adapters \[1001, 1002\], not 1002"),
        ("dies", r"vLLM failed \(rollout\): its process ended with 9"),
    ],
)
def test_failures_are_told(fault, words, stand_in, base, policy, tmp_path):
    model = shutil.copytree(base, tmp_path / "model")
    (model / "fault").write_text(fault)
    with pytest.raises(VllmError, match=words), begin(model, policy) as engine:
        engine.set_weights(Weights.of_policy(noisy(policy, 0)))
        if fault == "dies":
            engine.sample(PROMPTS, SAMPLING, KEY)
        engine.set_weights(Weights.of_policy(randomized(policy, seed=7)))


def test_a_worker_that_does_not_start_leaves_neither_process_nor_files(monkeypatch, policy):
    engines = []

    def fails(engine, *_):
        engines.append(engine)
        raise VllmError("no memory left")

    monkeypatch.setattr(VllmEngine, "_ask", fails)
    with pytest.raises(VllmError, match="no memory left"):
        VllmEngine({"model": "m"}, policy.config)
    assert engines[0]._process.returncode == -signal.SIGKILL and not engines[0].directory.exists()


def test_a_failure_ends_with_the_newest_lines_of_the_log(tmp_path):
    engine = object.__new__(VllmEngine)
    engine.log = tmp_path / "log"
    engine.log.write_text("".join(f"line {number}\n" for number in range(30)))
    engine._connection = types.SimpleNamespace(send=lambda _: None, recv=lambda: ("no memory left", None))
    with pytest.raises(VllmError) as failed:
        engine._ask("options", "start")
    said = "vLLM failed (start): no memory left; the end of its log:"
    assert str(failed.value).splitlines() == [said, *(f"line {number}" for number in range(10, 30))]


def test_completions_by_hand(policy):
    """EOS is 2. A log-probability that is not finite fails a completion; greedy ones are certain; one that ends for no
    reason is refused.
    """
    prompts, rows = Prompts.from_lists([[1, 3], [4]]), np.array([0, 1, 1])
    completions = [([5, 2], [-1.0, -0.5], "stop"), ([6, 7], [-0.25, -2.0], "length"), ([6, 2], [-1, np.nan], "stop")]
    found = assemble(prompts, rows, completions, Sampling(2), policy.config)
    assert found.tokens.tolist() == [[1, 3, 5, 2], [4, 6, 7, 0], [4, 6, 2, 0]]
    assert found.logprobs.tolist() == [[0, 0, -1, -0.5], [0, -0.25, -2, 0], [0, 0, 0, 0]]
    assert found.lengths.tolist() == [4, 3, 3] and found.prompt_lengths.tolist() == [2, 1, 1]
    assert found.finish.tolist() == [FinishReason.EOS, FinishReason.LENGTH, FinishReason.FAILED]
    assert not assemble(prompts, rows, completions, Sampling(2, temperature=0), policy.config).logprobs.any()
    for ids, reason in (([5], "length"), ([5, 6], "stop"), ([5, 2], "length"), ([5, 6], "abort")):
        with pytest.raises(VllmError, match=f"vLLM ended completion 0 by '{reason}' after {len(ids)} tokens"):
            assemble(prompts, rows[:1], [(ids, [-1.0] * len(ids), reason)], Sampling(2), policy.config)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.23.0", "rollout_backend 'vllm' needs vLLM 0.22.1, and 0.23.0 is installed"),
        ("0.22.1rc1", "rollout_backend 'vllm' needs vLLM 0.22.1, and 0.22.1rc1 is installed"),
        ("0.22.1+cu130", None),
    ],
)
def test_another_version_is_refused(version, words):
    with contextlib.nullcontext() if words is None else pytest.raises(ConfigError, match=re.escape(words)):
        refuse_version(version, "rollout_backend 'vllm'")


def test_weights_that_vllm_would_compute_otherwise_are_refused(stand_in, base, tmp_path):
    check(Config(weight_format="nvfp4"), base)
    plain = small.bf16(tmp_path / "plain")
    check(Config(), plain)
    with pytest.raises(ConfigError, match="backend 'vllm' uses one GPU, this run has 2: --devices 1"):
        check(Config(), plain, 2, "backend")
    with pytest.raises(
        ConfigError, match=r"cannot run weight_format 'nf4', quantized while loading.*qerl_jax\.quantize"
    ):
        check(Config(weight_format="nf4"), plain)
    with pytest.raises(ConfigError, match="NVFP4 by ModelOpt"):
        check(Config(), small.modelopt(tmp_path / "modelopt"))


def test_options_follow_the_settings(base):
    config = Config(rollout_backend="vllm", rollout_memory_gb=2.5, seed=9)
    options = engine_options(config, base, 100, 1000, 33, config.vllm_share)
    assert options["kv_cache_memory_bytes"] == 2_500_000_000 and options["gpu_memory_utilization"] == 0.4
    assert (options["max_num_seqs"], options["max_lora_rank"], options["seed"]) == (256, 64, 9)
    assert options["dtype"] == "bfloat16" and options["max_model_len"] == 100
    plain = engine_options(dataclasses.replace(config, rollout_memory_gb=None), base, 9, 9, 0, 0.4)
    assert not {"kv_cache_memory_bytes", "enable_lora", "max_lora_rank"} & plain.keys()
    ranks = {1: 8, 8: 8, 9: 16, 32: 32, 512: 512}  # the smallest that vLLM allows and that holds the adapter
    assert {rank: engine_options(config, base, 9, 9, rank, 0.4)["max_lora_rank"] for rank in ranks} == ranks
    with pytest.raises(ConfigError, match="an adapter of rank 513: vLLM takes at most 512"):
        engine_options(config, base, 100, 1000, 513, 0.4)


PARENT = """
import sys, time
from pathlib import Path
from qerl_jax.backends.vllm_engine import VllmEngine
from qerl_jax.backends.vllm_settings import engine_options
from qerl_jax.config import Config
from qerl_jax.checkpoint.hf_config import model_config
base = Path(sys.argv[1])
engine = VllmEngine(engine_options(Config(rollout_backend="vllm"), base, 10, 6, 0, 0.4), model_config(base))
print(engine._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.nightly
def test_the_worker_ends_with_a_parent_that_is_killed(stand_in, base):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(base)], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    os.kill(worker, 0)
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 20
    while time.monotonic() < end and is_running(worker):
        time.sleep(0.1)
    assert not is_running(worker)
