"""620 random mutations of models, adapters, configs and datasets, read as a run reads them: each is refused by one line
and exit code 2, or what was loaded is exactly what the files say, by independent readers.

A wrong success is: a safetensors file that the format's own library refuses; a weight, a scale or a shape that differs
from the stored bytes; a value that is not finite; a key that was read as something else than it states; a tokenizer
whose ids exceed the embedding; a row of a dataset that is neither a problem nor counted. Changed data bytes that make
another finite weight, another legal text or number cannot be told from the real ones: they may pass.
"""

import json
import math
import re
import shutil
from pathlib import Path

import jax
import mutations
import numpy as np
import pytest
import safetensors
import small
import yaml
from command_lines import time_limit
from oracles.stored_bytes import loaded_bytes

from qerl_jax import command, train
from qerl_jax.checkpoint import names
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.config import Config, to_mapping
from qerl_jax.models.lora import LoraConfig
from qerl_jax.reporting.console import RunConsole
from qerl_jax.run import prepare
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.fingerprints import fingerprints
from qerl_jax.run.hooks import Hooks
from qerl_jax.types import Policy

SECONDS = 20  # limit of a case; they take some 30 ms


PROBE = "Tom has 3 apples."
PROBE_IDS = [503, 306, 227, 25, 493, 20]  # by the tokenizers library from the bundled tokenizer.json
FIELDS = {  # field of config.json -> field of ModelConfig
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}


def first_and_rest(first: int, count: int) -> pytest.MarkDecorator:
    """The first cases, and in the nightly tests the others."""
    rest = pytest.param(range(first, count), marks=pytest.mark.nightly, id="rest")
    return pytest.mark.parametrize("cases", [pytest.param(range(first), id="first"), rest])


@pytest.fixture
def attempt(capsys, nothing_compiled_ahead):
    """Do what a run does up to where it has read all its input. Returns its error or None, and what it read."""

    def run(flags: list[str]) -> tuple[str | None, dict]:
        seen = {}

        def body() -> int:
            seen["config"] = train.parse(flags)
            loaded, _ = prepare.prepare(with_rewards(seen["config"]), RunConsole(), Hooks())
            with loaded.programs, loaded.rewards:
                fingerprints(loaded.config, loaded.stream.sets, loaded.eval_problems)
            seen.update(load=loaded.policy, load_problems=(loaded.stream, loaded.eval_problems))
            return 0

        with time_limit(SECONDS):
            code = command.run(body)
        said = capsys.readouterr()
        if code == 0:
            seen["said"] = said.out
            return None, seen
        assert code == 2
        assert said.err.startswith("error: ") and len(said.err) > 20 and "Traceback" not in said.err, said.err
        return said.err, seen

    return run


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Models in four layouts: two bf16 shards with an index, compressed-tensors, ModelOpt, bitsandbytes."""
    root = tmp_path_factory.mktemp("models")
    return [layout(root / layout.__name__) for layout in (small.bf16, small.nvfp4, small.modelopt, small.nf4)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Eight rows, of which none is wrong."""
    path = tmp_path_factory.mktemp("dataset") / "rows.jsonl"
    rows = [{"question": f"What is {i} + {i}? “{i}”", "answer": f"so\n#### {2 * i}", "n": i} for i in range(8)]
    path.write_text("".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows)))
    return path


def flags(model: Path, dataset: Path, directory: Path) -> list[str]:
    """A run so small that reading its input is all of its time."""
    lengths = ["--max-prompt-length", "120", "--max-completion-length", "8"]
    paths = ["--model", str(model), "--dataset", str(dataset), "--output-dir", str(directory)]
    return [*paths, "--lora-rank", "2", "--max-steps", "1", *lengths]


@first_and_rest(5, 240)
def test_a_damaged_model_is_refused_or_loaded_as_stored(models, dataset, attempt, tmp_path, cases):
    """Over the four layouts."""
    refused = 0
    for case in cases:
        rng, source = np.random.default_rng([1, case]), models[case % len(models)]
        model = tmp_path / f"model{case}"
        shutil.copytree(source, model)
        what = f"case {case}, {source.name}, {mutations.change_directory(model, rng)}"
        try:
            error, seen = attempt(flags(model, dataset, tmp_path / "out"))
            if error is None:
                assert_loaded_as_stored(seen["load"], model, source)
            else:
                refused += 1
                assert str(model) in error or "max_position_embeddings" in error, error
        except Exception as error:
            raise AssertionError(what) from error
        shutil.rmtree(model)
    assert_some_are_refused(refused, cases)


@first_and_rest(5, 60)
def test_a_damaged_adapter_is_refused_or_loaded_as_stored(models, dataset, attempt, tmp_path, cases):
    """The oracle of an accepted one: exported again, it is the file, by the safetensors library."""
    export_adapter(load_policy(models[1], lora=LoraConfig(rank=2)), tmp_path / "sound", norms=False)
    refused = 0
    for case in cases:
        rng, adapter = np.random.default_rng([5, case]), tmp_path / f"adapter{case}"
        shutil.copytree(tmp_path / "sound", adapter)
        what = f"case {case}, {mutations.change_directory(adapter, rng)}"
        try:
            error, seen = attempt([*flags(models[1], dataset, tmp_path / "out"), "--adapter", str(adapter)])
            if error is None:
                export_adapter(seen["load"], tmp_path / "again", norms=False)
                files = [folder / "adapter_model.safetensors" for folder in (adapter, tmp_path / "again")]
                stored, loaded = (
                    {n: bytes(t["data"]) for n, t in safetensors.deserialize(f.read_bytes())} for f in files
                )
                assert stored == loaded
            else:
                refused += 1
                assert str(adapter) in error, error
        except Exception as error:
            raise AssertionError(what) from error
    assert_some_are_refused(refused, cases)


def assert_some_are_refused(refused: int, cases: range) -> None:
    """Otherwise the mutations are not what they should be."""
    assert 0 < refused < len(cases)


def assert_loaded_as_stored(policy: Policy, model: Path, original: Path) -> None:
    """Bytes by the safetensors library, shapes and numbers by the JSON itself, token ids by the unharmed tokenizer."""
    assert all(
        np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves((policy.frozen, policy.norms))
    )
    stored = {}
    for file in model.glob("*.safetensors"):
        for name, tensor in safetensors.deserialize(file.read_bytes()):
            assert name not in stored
            stored[name] = tensor
    loaded = dict(loaded_bytes(policy))
    assert stored.keys() >= loaded.keys()
    for name, data in loaded.items():
        assert bytes(stored[name]["data"]) == data, name
    states = {name: json.loads(bytes(stored[name]["data"])) for name in stored if name.endswith("bitsandbytes__nf4")}
    assert stored.keys() - loaded.keys() - states.keys() <= {names.LM_HEAD}
    for name, state in states.items():
        assert (state["quant_type"], state["blocksize"]) == ("nf4", 64), name
        assert math.prod(state["shape"]) == 2 * len(stored[name.partition(".quant_state")[0]]["data"])
    if names.LM_HEAD in stored.keys() - loaded.keys():  # a tied head stored once more
        assert bytes(stored[names.LM_HEAD]["data"]) == loaded[names.EMBED]
    config = json.loads((model / "config.json").read_text())
    for key, field in FIELDS.items():
        if config.get(key) is not None:
            value = getattr(policy.config, field)
            assert value == config[key] and isinstance(value, bool) == isinstance(config[key], bool), key
    assert all(0 <= token < policy.config.vocab_size for token in policy.config.eos_token_ids)
    if policy.tokenizer is not None:
        assert max(policy.tokenizer.get_vocab().values()) < policy.config.vocab_size
        if (model / "tokenizer.json").read_bytes() == (original / "tokenizer.json").read_bytes():
            assert policy.tokenizer.encode(PROBE) == PROBE_IDS


@first_and_rest(10, 160)
def test_a_damaged_config_is_refused_or_read_as_written(models, dataset, attempt, tmp_path, cases):
    """Of the values, and of the text."""
    plain = {
        **to_mapping(Config(model=str(models[1]), dataset=str(dataset), output_dir=str(tmp_path / "out"))),
        **{"lora_rank": 2, "max_steps": 1, "max_prompt_length": 120, "max_completion_length": 8},
    }
    refused = 0
    for case in cases:
        rng, path = np.random.default_rng([2, case]), tmp_path / f"config{case}.yaml"
        values = mutations.change_value(plain, rng) if case % 2 else plain
        path.write_bytes(yaml.safe_dump(values, sort_keys=False).encode(errors="surrogatepass"))
        if values is plain:
            path.write_bytes(mutations.change_text(path.read_bytes(), rng))
        try:
            error, seen = attempt(["--config", str(path)])
            if error is None:
                assert_read_as_written(seen["config"], path)
            else:
                refused += 1
                names_file_or_field = any(word in error for word in (str(path), *to_mapping(Config())))
                assert names_file_or_field or any(repr(value) in error for value in given(path)), error
        except Exception as error:
            raise AssertionError(f"case {case}: {path.read_text(errors='replace')}") from error
    assert_some_are_refused(refused, cases)


def given(path: Path) -> list:
    """Values of a YAML file, and of the lists in it."""
    values = yaml.safe_load(path.read_bytes()).values()
    return [item for value in values for item in (value if isinstance(value, list) else [value])]


def assert_read_as_written(config: Config, path: Path) -> None:
    """Every line of the file is in the config, as the value that YAML says, and nothing else is."""
    pairs = [(key.value, node) for key, node in yaml.compose(path.read_bytes(), yaml.SafeLoader).value]
    read = {key.replace("-", "_"): value for key, value in yaml.safe_load(path.read_bytes()).items()}
    assert len(pairs) == len(read)
    for name, default in to_mapping(Config()).items():
        value, got = read.get(name, default), to_mapping(config)[name]
        if isinstance(value, str) and isinstance(got, int | float):
            value = float(value)
        if isinstance(got, list) and value is not None and not isinstance(value, list):
            value = [value]
        assert got == value and isinstance(got, bool) == isinstance(value, bool), name


def text_of(value: object) -> str | None:
    """A cell as the text that a problem may hold; None where there is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, str | int | float) and value == value else None


@first_and_rest(5, 160)
def test_a_damaged_dataset_is_refused_or_every_row_accounted_for(models, dataset, attempt, tmp_path, cases):
    """40 mutations a block: of the rows' values, and of the text."""
    rows, refused = [json.loads(line) for line in dataset.read_bytes().splitlines()], 0
    for case in cases:
        rng, path = np.random.default_rng([4, case]), tmp_path / f"rows{case}.jsonl"
        if case % 2:
            values = mutations.change_value(rows, rng)
            path.write_text(
                "".join(json.dumps(row) + "\n" for row in (values if isinstance(values, list) else [values]))
            )
        else:
            path.write_bytes(mutations.change_text(dataset.read_bytes(), rng))
        try:
            error, seen = attempt(flags(models[1], path, tmp_path / "out"))
            if error is None:
                assert_rows_accounted_for(seen, path)
            else:
                refused += 1
                assert str(path) in error or "prompts are longer than" in error, error
        except Exception as error:
            raise AssertionError(f"case {case}: {path.read_bytes()!r}") from error
    assert_some_are_refused(refused, cases)


def assert_rows_accounted_for(seen: dict, path: Path) -> None:
    """Each problem is its row of the file, and as many rows as are missing were told to be left out or dropped."""
    records = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
    (items,) = seen["load_problems"][0].sets
    for item in items:
        record = records[item.problem.id]
        assert item.problem.prompt == text_of(record["question"])
        assert item.problem.answer == text_of(record["answer"]).rsplit("####", 1)[-1].strip() != ""
    assert len({item.problem.id for item in items}) == len(items)
    told = re.findall(r"left out (\d+) of|dropped (\d+) of", " ".join(seen["said"].split()))
    assert len(records) - len(items) == sum(int(number) for pair in told for number in pair if number)
