"""A GPU whose memory really ends within an update: one line with the numbers, and the newest state on the disk."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import runs
import small
from command_lines import ROWS, lines, replaced, training

from qerl_jax import train
from qerl_jax.checkpoint.orbax import latest_step
from qerl_jax.reporting.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU's memory")]

LINE = (
    r"error: the update ran out of memory: micro-batches of \d+ tokens were planned with [\d.]+ GB of activations and "
    r"[\d.]+ GB for one program, of the device's [\d.]+ GB; lower update_memory_gb below [\d.]+ \(layers are then "
    r"recomputed\), tokens_per_micro_batch or logprob_chunk_size"
)
SIZES = ["--batch-size", "128", "--num-generations", "8", "--max-completion-length", "100", "--dtype", "bfloat16"]


def of_ours(stderr: str) -> str:
    """Without what XLA's allocator and compiler print by themselves."""
    theirs = r"[WE]\d{4} |If this is caused by memory fragmentation|Current allocation summary"
    return "\n".join(line for line in stderr.strip().splitlines() if not re.match(theirs, line))


@pytest.fixture
def place(tmp_path) -> Path:
    """0.12 G parameters, whose update keeps some 0.2 MB a token, a dataset, and a reward that differs within a group:
    rows of equal rewards would leave the update, and all memory with them.
    """
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8}
    small.bf16(tmp_path / "model", 1, **shape, num_key_value_heads=2, head_dim=128)
    (tmp_path / "rows.jsonl").write_text(lines(ROWS * 4))
    (tmp_path / "rewards.py").write_text("def length(completions, **_):\n    return [len(c) for c in completions]\n")
    return tmp_path


def flags_of(place: Path) -> list[str]:
    return training(place, *SIZES, "--reward-funcs", f"{place / 'rewards.py'}:length")


def test_memory_that_another_takes_before_the_second_update(place, capfd):
    """All but 100 MB is taken after the second rollout. The state of step 1, which was not due, is saved, and the run
    goes on once the memory is free again.
    """
    taken: list[jax.Array] = []

    def take_all() -> None:
        for size in (1 << 30, 1 << 28, 1 << 26):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                while True:
                    taken.append(jax.block_until_ready(jnp.zeros(size, jnp.uint8)))
        del taken[-2:]

    flags = replaced(flags_of(place), "--save-steps", "50")
    with pytest.raises(MemoryError) as failed:
        train.train(train.parse(flags), on_step=runs.in_the_second_update(take_all))
    said = f"error: {failed.value}"
    taken.clear()
    with capfd.disabled():
        print(said)
    assert re.fullmatch(LINE, said)
    assert latest_step(place / "run") == 1 and [row["step"] for row in read_metrics(place / "run")] == [1]
    assert train.main([*flags, "--resume", "auto"]) == 0
    assert [row["step"] for row in read_metrics(place / "run")] == [1, 2]


def test_settings_that_ask_for_more_than_there_is(place, capfd):
    """In a hundredth of the memory a run goes on with micro-batches of all tokens, which it was told would fit."""
    flags = replaced(flags_of(place), "--max-steps", "1000")
    command = [sys.executable, "-m", "qerl_jax.train", *flags]
    environment = os.environ | {"XLA_CLIENT_MEM_FRACTION": "0.01"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **streams) as first:
        runs.wait_for_step(place / "run", 1, first)
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=240) == 130, first.stdout.read()
    saved = latest_step(place / "run")
    beyond = ["--resume", "auto", "--update-memory-gb", "1000", "--tokens-per-micro-batch", "20000"]
    done = subprocess.run([*command, *beyond], env=environment, capture_output=True, text=True, timeout=400)
    with capfd.disabled():
        print(done.stderr)
    assert done.returncode == 2 and re.fullmatch(LINE, of_ours(done.stderr))
    assert saved >= 1 and latest_step(place / "run") == saved
