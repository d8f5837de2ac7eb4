"""Real input from end to end: the exact Qwen2.5 tokenizer, a checkpoint of the 0.5B's shapes, GSM8K rows; stop,
resume, export, evaluate.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import runs
from helpers import fp32_policy, plain_rollout

from qerl_jax.checkpoint.peft_config import adapter_config
from qerl_jax.command import STOPPED
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.rollout.engine import generate
from qerl_jax.types import Engine, Sampling, completion_ids

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def half_billion(tmp_path_factory, data):
    """A Hugging Face directory with the 0.5B's true shapes, random weights and the published tokenizer."""
    out = tmp_path_factory.mktemp("real") / "qwen-0.5b"
    command = [
        sys.executable, ROOT / "tools" / "make_checkpoint.py", "0.5B", out, "--tokenizer", data / "qwen2.5_tokenizer",
    ]  # fmt: skip
    made = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert made["parameters"] == 494_032_768  # the published count
    return out


@pytest.mark.nightly
def test_greedy_ids_are_those_of_whole_forward_passes(half_billion):
    """The engine at the true shapes (head dim 64, seven query heads a key head, tied head) against no cache at all."""
    policy = fp32_policy(half_billion, rank=4)
    prompts, sampling = [[9707, 11, 1879, 0], [16, 10]], Sampling(5, temperature=0, num_generations=2)
    rollout = generate(policy, prompts, sampling, jax.random.key(0), Engine(slots=3, chunk=2))
    for ids, (expected, _, _) in zip(
        completion_ids(rollout), plain_rollout(policy, prompts, sampling, jax.random.key(0)), strict=True
    ):
        assert ids == expected


@pytest.mark.nightly
def test_three_steps_stopped_resumed_exported_and_evaluated(half_billion, data, tmp_path):
    directory = tmp_path / "run"
    flags = [
        *("--model", str(half_billion), "--weight-format", "nvfp4", "--dataset", str(data / "gsm8k" / "train.jsonl")),
        *("--output-dir", str(directory), "--max-steps", "3", "--batch-size", "4", "--num-generations", "2"),
        *("--num-iterations", "1", "--max-prompt-length", "256", "--max-completion-length", "16", "--dtype", "float32"),
        *("--save-steps", "1", "--train-norms"),
    ]
    environment_free = [sys.executable, "-m", "qerl_jax.train", *flags]
    process = subprocess.Popen(environment_free, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    runs.wait_for_step(directory, 1, process, timeout=900)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == STOPPED, output
    stopped_at = read_metrics(directory)[-1]["step"]
    assert stopped_at < 3 and "--resume auto" in output
    resumed = subprocess.run([*environment_free, "--resume", "auto"], capture_output=True, text=True, check=True).stdout
    assert f"resuming after step {stopped_at} of 3" in resumed
    rows = read_metrics(directory)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["aqn/norms"] for row in rows] == [48 if row["aqn/sigma"] else 0 for row in rows]
    assert rows[0]["sampling/sampling_logp_difference/max"] < 1e-4  # rollout and trainer agree where σ = 0
    assert adapter_config(directory / "adapter").rank == 32

    command = [
        *(sys.executable, "-m", "qerl_jax.evaluate", str(half_billion), "--adapter", str(directory / "adapter")),
        *("--dataset", str(data / "gsm8k" / "test.jsonl"), "--samples", "2", "--weight-format", "nvfp4"),
        *("--dtype", "float32", "--max-completion-length", "16", "--output", str(tmp_path / "result.json")),
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "pass@1" in printed and "2 problems" in printed
    assert runs.read_json(tmp_path / "result.json")["truncated"] == 1.0
