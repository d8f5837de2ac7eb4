"""Programs compiled in a training run: none after its second step, whatever the lengths."""

import json
import re

import numpy as np
import pytest
import small
from command_lines import lines, training

from qerl_jax import programs, train
from qerl_jax.checkpoint.run_files import METRICS_FILE
from qerl_jax.programs import Ahead

REWARD = """
import zlib

def some(completions, **_):
    return [float(zlib.crc32(text.encode()) % 100 < 8) for text in completions]
"""
STEPS = 10


@pytest.mark.nightly
def test_no_program_is_compiled_after_the_second_step(tmp_path, capfd, monkeypatch):
    """Prompts of 10 to 200 tokens, completions of 1 to 24 that mostly end by EOS, so that survivors move into fewer
    slots; dynamic sampling replaces another number of groups in each step. All that evaluation and first step call is
    compiled ahead.
    """
    unknown = []

    def call(self, jitted, args, kwargs, original=Ahead._call):
        result = original(self, jitted, args, kwargs)
        if programs._signature(jitted, args, kwargs) not in self._ready:
            unknown.append(jitted.__name__)
        return result

    monkeypatch.setattr(Ahead, "_call", call)
    small.bf16(tmp_path / "model", shards=1)
    generation = {"eos_token_id": list(range(60)), "pad_token_id": 0}
    small.write_json(tmp_path / "model" / "generation_config.json", generation)
    rng = np.random.default_rng(0)
    words = rng.choice([1, 2, 5, 10, 30, 45], 80)
    rows = [{"question": "7 " * int(n) + f"What is {i}?", "answer": str(i)} for i, n in enumerate(words)]
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    (tmp_path / "reward.py").write_text(REWARD)
    flags = {
        "--max-steps": STEPS,
        "--batch-size": 40,
        "--num-generations": 4,
        "--save-steps": 3,
        "--max-prompt-length": 200,
        "--max-completion-length": 24,
        "--reward-funcs": f"{tmp_path / 'reward.py'}:some",
        "--reward-workers": 0,
        "--compilation-cache-dir": tmp_path / "rows.jsonl",  # no directory: every program is compiled here
        "--eval-dataset": tmp_path / "rows.jsonl",
        "--eval-samples": 20,
    }
    arguments = [str(word) for pair in flags.items() for word in pair]
    assert train.main(training(tmp_path, *arguments, "--dynamic-sampling")) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    assert len({row["completions/mean_length"] for row in metrics}) > 5, "lengths vary"
    assert len({row["dynamic_sampling/refilled_groups"] for row in metrics}) > 2
    counts = [row["compilations"] for row in metrics]
    assert counts[0] > 0 and counts[2:] == [0] * (STEPS - 2), counts
    said = capfd.readouterr().out
    assert "compiled programs are not kept" in said and re.search(r"compiled \d+ programs in .* waited for", said)
    assert not unknown
