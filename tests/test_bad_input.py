"""Bad input through the command lines: one line that names file, key and both values, exit code 2, nothing lost.

`OUT`, `MODEL` and `DATA` in a message stand for the directories and files of the test.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import small
import test_export_command
from command_lines import ROWS, assert_says, error_of, evaluation, lines, replaced, training

from qerl_jax import train
from qerl_jax.checkpoint import names
from qerl_jax.compare import main as compare
from qerl_jax.evaluate import main as evaluate

pytestmark = pytest.mark.usefixtures("nothing_compiled_ahead")

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def place(tmp_path) -> Path:
    """Where a test puts its model, dataset and run."""
    (tmp_path / "rows.jsonl").write_text(lines(ROWS))
    return tmp_path


def tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda model: small.change_tensors(model, change)


def element(name: str, index: object, value: object) -> Callable[[Path], None]:
    return tensors(lambda all_: all_[name].__setitem__(index, value))


def cut(path: str, size: int) -> Callable[[Path], None]:
    return lambda model: (model / path).write_bytes((model / path).read_bytes()[:size])


def smaller_embedding(model: Path) -> None:
    small.change_json(model / "config.json", vocab_size=511)
    small.change_tensors(
        model, lambda all_: all_.update({name: all_[name][:511] for name in (names.EMBED, names.LM_HEAD)})
    )


FILE, SHARD, CONFIG = "MODEL/model.safetensors", "model-00002-of-00002.safetensors", "MODEL/config.json"
# what is wrong: (layout, damage, message)
MODELS: dict[str, tuple[Callable, Callable[[Path], object], str]] = {
    "truncated shard": (
        small.bf16,
        cut(SHARD, 20_000),
        f"MODEL/{SHARD} is damaged, or was cut short (20,000 bytes): …, file not fully covered",
    ),
    "global scale beyond fp32's weights": (
        small.modelopt,
        element(f"{Q}.weight_scale_2", (), 1e37),
        f"{FILE}: '{Q}.weight_scale_2' is 9.999999933815813e+36, which multiplies weights by 1e+37; it must lie "
        "between 1.18e-38 and 1.27e+35 for them to be numbers",
    ),
    "tokenizer larger than the embedding": (
        small.nvfp4,
        smaller_embedding,
        "MODEL: the tokenizer's ids reach 511, but the embedding has vocab_size 511 rows",
    ),
    "a head beside a tied embedding": (
        functools.partial(small.bf16, shards=1, tie_word_embeddings=True),
        tensors(lambda all_: all_.update({names.LM_HEAD: 2 * all_[names.EMBED]})),
        f"{FILE}: '{names.LM_HEAD}' differs from '{names.EMBED}', but config.json says tie_word_embeddings true",
    ),
    "a chat template without the message": (
        small.nvfp4,
        lambda model: (model / "chat_template.jinja").write_text("{{ bos_token }}Hello"),
        "MODEL: the chat template loses the user's message; of '…' it makes '…Hello'",
    ),
    "no tokenizer": (
        small.nvfp4,
        lambda model: [(model / name).unlink() for name in small.TOKENIZER],
        "…the model directory has no tokenizer, and text prompts need one",
    ),
    "broken tokenizer": (
        small.nvfp4,
        cut("tokenizer.json", 1000),
        f"MODEL: the tokenizer files {list(small.TOKENIZER)} cannot be read: JSONDecodeError: …",
    ),
    "no model": (small.nvfp4, shutil.rmtree, "model directory MODEL does not exist"),
    "GGUF": (
        small.nvfp4,
        lambda model: (model / "config.json").rename(model / "m.gguf"),
        f"{CONFIG} does not exist: …; m.gguf is not read: take the model's safetensors",
    ),
    "GGUF beside a config": (
        small.nvfp4,
        lambda model: (model / "model.safetensors").rename(model / "m.gguf"),
        "MODEL holds neither …; m.gguf is not read: take the model's safetensors",
    ),
    "a file": (
        small.nvfp4,
        lambda model: (model.rename(model.with_name("moved")), model.write_text("")),
        "model directory MODEL is a file",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case, place, capfd):
    layout, damage, message = MODELS[case]
    damage(layout(place / "model"))
    assert_says(error_of(train.main, training(place), place, capfd), message)
    if case in ("truncated shard", "no tokenizer", "no model"):  # read by the same code
        assert_says(error_of(evaluate, evaluation(place), place, capfd), message)
    assert not (place / "run").exists()


# what is wrong: (content of the dataset, message)
DATASETS: dict[str, tuple[str, str]] = {
    "malformed line": (lines(ROWS[:2]) + '{"question": "What\n' + lines(ROWS[2:]), "DATA, line 3 is not JSON: …"),
    "missing column": (lines([{"prompt": "What?", "answer": "4"}]), "DATA…'question'…['answer', 'prompt']…"),
    "prompts too long": (
        lines([{"question": "What is it? " * 80, "answer": "4"}]),
        "…max_prompt_length 120; the shortest has … tokens",
    ),
}


@pytest.mark.parametrize("case", DATASETS)
def test_datasets(case, place, capfd):
    small.nvfp4(place / "model")
    content, message = DATASETS[case]
    (place / "rows.jsonl").write_text(content)
    calls = (train.main, training(place)), (train.main, training(place, "--dry-run")), (evaluate, evaluation(place))
    for main, arguments in calls:
        assert_says(error_of(main, arguments, place, capfd), message)
    assert not (place / "run").exists()


@pytest.mark.parametrize("case", ["an adapter for a wider base", "an adapter that is not finite", "another vocabulary"])
def test_adapters(case, place, capfd):
    """What `export` refuses about an adapter and its base, the other command lines refuse."""
    damage, message = test_export_command.BAD[case]
    test_export_command.put_model_and_adapter(place)
    damage(place)
    adapter, rank = place / "adapter", ("--lora-rank", "4")
    calls = [(train.main, training(place, *rank)), (evaluate, evaluation(place)), (compare, [str(place / "model")])]
    if case != "an adapter that is not finite":
        calls.append((train.main, training(place, *rank, "--dry-run")))
    for main, arguments in calls:
        said = error_of(main, [*arguments, "--adapter", str(adapter)], place, capfd).replace(str(adapter), "ADAPTER")
        assert_says(said, message)
    assert not (place / "run").exists()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_headers(more, place, capfd):
    """What those of adapter and weights show, a dry run refuses, too."""
    test_export_command.put_model_and_adapter(place)
    flags = training(place, "--adapter", str(place / "adapter"), *more)
    other_rank = (
        f"{place}/adapter/adapter_config.json has lora_rank 4, not 64; lora_alpha 4, not 64: set it as the adapter has "
        "it"
    )
    assert_says(error_of(train.main, flags, place, capfd), other_rank)
    tensors(lambda all_: all_.pop(f"{Q}.weight_scale"))(place / "model")
    missing = f"{FILE}: tensor '{Q}.weight_scale' is missing from the checkpoint"
    assert_says(error_of(train.main, replaced(flags, "--lora-rank", "4"), place, capfd), missing)
