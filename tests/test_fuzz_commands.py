"""Random mutations of what `compare`, `export` and `evaluate` read: each ends in one line and exit code 2, or with a
result that an independent reader of the same files gives.

The readers are transformers and peft for `compare`, NumPy for `export`, and the JSON itself for the records and presets
of `evaluate`. Changed data bytes that make another finite weight, legal text or number may pass.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import mutations
import numpy as np
import pytest
import safetensors
import small
from command_lines import ROWS, lines, time_limit
from helpers import randomized, with_norm_offsets

from qerl_jax import compare, export
from qerl_jax.evaluate import main as evaluate
from qerl_jax.io import names
from qerl_jax.io.adapter import export_adapter
from qerl_jax.io.load import load_policy
from qerl_jax.models.lora import LoraConfig

SECONDS = 30  # limit of a case; most take less than one
DTYPES = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
SHORT = ["--max-prompt-length", "120", "--max-completion-length", "4", "--batch-size", "4", "--dtype", "float32"]


@pytest.fixture
def attempt(capsys) -> Callable[..., tuple[int, str]]:
    """Call a command line. Returns its exit code, and all that it printed."""

    def run(main: Callable[[list[str]], int], *arguments: object) -> tuple[int, str]:
        with time_limit(SECONDS):
            code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err, said
        if code == 2:
            assert re.fullmatch("error: [^\n]{20,}\n", said.err), said.err
        return code, said.out + said.err

    return run


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A bf16 model, an NVFP4 model, an adapter with norms for both, with a tokenizer, and eight rows."""
    root = tmp_path_factory.mktemp("sound")
    small.bf16(root / "bf16")
    small.nvfp4(root / "nvfp4")
    policy = with_norm_offsets(randomized(load_policy(root / "bf16", lora=LoraConfig(2), dtype=jnp.float32), 1), 1)
    export_adapter(policy, root / "adapter", base_model="bf16")
    for name in small.TOKENIZER:
        shutil.copyfile(root / "bf16" / name, root / "adapter" / name)
    (root / "rows.jsonl").write_text(lines(ROWS))
    return root


def damaged(source: Path, place: Path, seed: list[int]) -> tuple[Path, str]:
    """A copy of a directory with one random change, and what it is."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place)
    return place, f"{seed}: {mutations.change_directory(place, np.random.default_rng(seed))}"


def test_a_damaged_model_is_refused_or_computed_as_transformers_does(sound, attempt, tmp_path):
    """30 mutations, two thirds of the bf16 model, whose weights transformers reads by itself."""
    refused = 0
    for case in range(30):
        model, what = damaged(sound / ("nvfp4", "bf16", "bf16")[case % 3], tmp_path / "model", [11, case])
        code, said = attempt(compare.main, model)
        assert code in (0, 2), (what, said)
        assert code == 0 or str(model) in said or "max_position_embeddings" in said, (what, said)
        refused += code == 2
    assert 8 < refused < 30


def test_a_damaged_adapter_is_refused_or_computed_as_peft_does(sound, attempt, tmp_path):
    """30 mutations."""
    refused = 0
    for case in range(30):
        adapter, what = damaged(sound / "adapter", tmp_path / "adapter", [12, case])
        code, said = attempt(compare.main, sound / "bf16", "--adapter", adapter)
        assert code in (0, 2), (what, said)
        assert code == 0 or str(adapter) in said, (what, said)
        refused += code == 2
    assert 8 < refused < 30


def stored(directory: Path) -> dict[str, np.ndarray]:
    """Tensors of a directory's files, by the safetensors library."""
    return {
        name: np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for file in directory.glob("*.safetensors")
        for name, tensor in safetensors.deserialize(file.read_bytes())
    }


def test_a_damaged_adapter_is_refused_or_merged_as_numpy_does(sound, attempt, tmp_path):
    """40 mutations of base or adapter. What is written is `W + alpha / r · B A`, rounded once to bf16."""
    refused = 0
    for case in range(40):
        parts = {name: sound / name for name in ("bf16", "adapter")}
        chosen = ("bf16", "adapter")[case % 2]
        parts[chosen], what = damaged(parts[chosen], tmp_path / chosen, [13, case])
        out = tmp_path / "out"
        code, said = attempt(export.main, parts["adapter"], out, "--base", parts["bf16"], "--as", "merged")
        assert code in (0, 2), (what, said)
        refused += code == 2
        if code == 2:
            assert not out.exists() and (str(parts[chosen]) in said or "logits differ" in said), (what, said)
            continue
        base, lora, merged = (stored(path) for path in (parts["bf16"], parts["adapter"], out))
        config = json.loads((parts["adapter"] / "adapter_config.json").read_text())
        for name, weight in merged.items():
            prefix, wanted = f"base_model.model.{name}", base[name].astype(np.float64)
            if prefix in lora:
                wanted = lora[prefix].astype(np.float64)
            if (a := lora.get(f"{prefix.removesuffix('.weight')}.lora_A.weight")) is not None:
                b = lora[f"{prefix.removesuffix('.weight')}.lora_B.weight"]
                wanted = wanted + config["lora_alpha"] / config["r"] * b.astype(np.float64) @ a
            np.testing.assert_allclose(weight.astype(np.float64), wanted, rtol=2**-8, atol=1e-6, err_msg=what)
        assert merged.keys() >= base.keys() - {names.LM_HEAD}, what
        shutil.rmtree(out)
    assert 10 < refused < 40


def test_damaged_records_are_refused_or_counted_as_they_state(sound, attempt, tmp_path):
    """60 mutations of finished records. Of what is accepted every line is one of the evaluation's own or states all
    that an item has, and the printed share of correct completions is that of the file.
    """
    path, flags = tmp_path / "records.jsonl", ["--samples", "6", "--num-generations", "2", "--problems-at-once", "2"]
    command = [sound / "bf16", "--dataset", sound / "rows.jsonl", *SHORT, *flags, "--records", path]
    code, _ = attempt(evaluate, *command)
    whole, refused = path.read_bytes(), 0
    assert code == 0 and whole.count(b"\n") == 7
    for case in range(60):
        rng = np.random.default_rng([14, case])
        if case % 2:
            rows = mutations.change_value([json.loads(line) for line in whole.splitlines()], rng)
            path.write_text("".join(json.dumps(row) + "\n" for row in (rows if isinstance(rows, list) else [rows])))
        else:
            path.write_bytes(mutations.change_text(whole, rng))
        damage = path.read_bytes()
        code, said = attempt(evaluate, *command)
        if code == 2:
            refused += 1
            assert "records.jsonl" in said and path.read_bytes() == damage, (case, said)
            continue
        assert code == 0, case
        header, *items = [json.loads(line) for line in path.read_bytes().splitlines()]
        _, *originals = [json.loads(line) for line in whole.splitlines()]
        assert len(items) == 6 and header == json.loads(whole.splitlines()[0]), case
        for item, original in zip(items, originals, strict=True):
            assert item.keys() == original.keys(), case
            assert {name: kind_of(value) for name, value in item.items()} == kinds(original, item), (case, item)
        verdicts = [verdict for item in items for verdict in item["verdicts"] if verdict != "no gold"]
        share = 100 * verdicts.count("correct") / len(verdicts)
        assert f"avg@2 {share:.1f} %" in said, (case, said)
    assert 20 < refused < 60


def kind_of(value: object) -> object:
    """Type of a JSON value; of a list those of its entries."""
    return [type(entry) for entry in value] if isinstance(value, list) else type(value)


def kinds(original: dict, item: dict) -> dict:
    """The types that an item of these records may have: answers and votes may be missing."""
    wanted = {name: kind_of(value) for name, value in original.items()}
    wanted["answers"] = [type(entry) if entry is None else str for entry in item["answers"]]
    wanted["majority"] = type(None) if item["majority"] is None else int
    return wanted


class Reached(ValueError):
    """Sampling would begin."""


@pytest.mark.parametrize("preset", ["gsm8k", "math500", "aime24", "amc23"])
def test_a_damaged_preset_is_refused_or_every_row_accounted_for(sound, attempt, data, tmp_path, monkeypatch, preset):
    """20 mutations each of a local copy's test split, up to where it has been read."""
    seen: list[int] = []
    module = sys.modules["qerl_jax.evaluate"]
    load_encoded = module.load_encoded

    def stop(name: str) -> None:
        raise Reached("sampling would begin here")

    def remember(*arguments: object, **options: object) -> tuple:
        found = load_encoded(*arguments, **options)
        seen.append(len(found[0]))
        return found

    monkeypatch.setattr(module, "load_encoded", remember)
    monkeypatch.setattr(module, "correctness_reward", stop)
    refused = 0
    for case in range(20):
        copy, what = tmp_path / preset, f"{preset} {case}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(data / "presets" / preset, copy)
        [file] = [path for path in copy.rglob("*.jsonl") if path.name.startswith("test")]
        rng, text = np.random.default_rng([15, case]), file.read_bytes()
        rows = [json.loads(line) for line in text.splitlines()]
        changed = mutations.change_value(rows, rng) if case % 2 else None
        if changed is None:
            file.write_bytes(mutations.change_text(text, rng))
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in changed))
        seen.clear()
        code, said = attempt(evaluate, sound / "bf16", "--dataset", f"{preset}:{copy}", *SHORT)
        assert code == 2, what
        if seen:
            records = [line for line in file.read_bytes().split(b"\n") if line.strip()]
            left = re.findall(r"left out (\d+) of|dropped (\d+) of", said)
            assert len(records) - seen[0] == sum(int(n) for pair in left for n in pair if n), (what, said)
        else:
            refused += 1
            assert str(copy) in said, (what, said)
    assert 2 < refused < 20
