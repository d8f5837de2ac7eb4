"""Bad input through the command lines: one line that names file, key and both values, exit code 2, nothing lost.

`OUT`, `MODEL` and `DATA` in a message stand for the directories and files of the test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import small
import test_export_command
from command_lines import ROWS, assert_says, error_of, evaluation, lines, training

from qerl_jax import train
from qerl_jax.compare import main as compare
from qerl_jax.evaluate import main as evaluate
from qerl_jax.io import layout_nf4, names
from qerl_jax.quantize import main as quantize

pytestmark = pytest.mark.usefixtures("nothing_compiled_ahead")

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def place(tmp_path) -> Path:
    """Where a test puts its model, dataset and run."""
    (tmp_path / "rows.jsonl").write_text(lines(ROWS))
    return tmp_path


def tensors(change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda model: small.change_tensors(model, change)


def config(**changes: object) -> Callable[[Path], None]:
    return lambda model: small.change_json(model / "config.json", **changes)


def element(name: str, index: object, value: object) -> Callable[[Path], None]:
    return tensors(lambda all_: all_[name].__setitem__(index, value))


def cut(path: str, size: int) -> Callable[[Path], None]:
    return lambda model: (model / path).write_bytes((model / path).read_bytes()[:size])


def in_blocks(size: int) -> np.ndarray:
    """The text beside an NF4 weight."""
    state = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": [64, 64]}
    return np.frombuffer(json.dumps(state).encode(), np.uint8)


def smaller_embedding(model: Path) -> None:
    small.change_json(model / "config.json", vocab_size=500)
    small.change_tensors(
        model, lambda all_: all_.update({name: all_[name][:500] for name in (names.EMBED, names.LM_HEAD)})
    )


SCALE, GLOBAL = f"{Q}.weight_scale", f"{Q}.weight_global_scale"
STATE = f"{Q}.{layout_nf4.STATE}"
F8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
FILE, SHARD, CONFIG = "MODEL/model.safetensors", "model-00002-of-00002.safetensors", "MODEL/config.json"
# what is wrong: (layout, damage, message)
MODELS: dict[str, tuple[Callable, Callable[[Path], object], str]] = {
    "missing shard": (
        small.bf16,
        lambda model: (model / SHARD).unlink(),
        f"MODEL/model.safetensors.index.json names 2 shards, of which ['{SHARD}'] are missing",
    ),
    "truncated shard": (
        small.bf16,
        cut(SHARD, 20_000),
        f"MODEL/{SHARD} is damaged, or was cut short (20,000 bytes): …, file not fully covered",
    ),
    "wrong shape": (
        small.nvfp4,
        tensors(lambda all_: all_.update({SCALE: all_[SCALE][:8]})),
        f"{FILE}: '{SCALE}' has shape [8, 1], the config asks for [16, 1]",
    ),
    "shape of the config": (
        small.nvfp4,
        config(intermediate_size=64),
        f"{FILE}: 'model.layers.0.mlp.gate_proj.weight_packed' has shape [32, 8], the config asks for [64, 8]",
    ),
    "missing scale": (
        small.nvfp4,
        tensors(lambda all_: all_.pop(SCALE)),
        f"{FILE}: tensor '{SCALE}' is missing from the checkpoint",
    ),
    "NaN block scale": (
        small.nvfp4,
        element(SCALE, (5, 0), F8(np.nan)),
        f"{FILE}: '{SCALE}'[5, 0] is nan, must be a number of at least 0",
    ),
    "negative block scale": (
        small.nvfp4,
        element(SCALE, (5, 0), F8(-2)),
        f"{FILE}: '{SCALE}'[5, 0] is -2.0, must be a number of at least 0",
    ),
    "NaN global scale": (
        small.nvfp4,
        element(GLOBAL, 0, np.nan),
        f"{FILE}: '{GLOBAL}' is nan, must be finite and above 0",
    ),
    "negative global scale": (
        small.modelopt,
        element(f"{Q}.weight_scale_2", (), -3),
        f"{FILE}: '{Q}.weight_scale_2' is -3.0, must be finite and above 0",
    ),
    "global scale beyond fp32's weights": (
        small.modelopt,
        element(f"{Q}.weight_scale_2", (), 1e37),
        f"{FILE}: '{Q}.weight_scale_2' is 9.999999933815813e+36, which multiplies weights by 1e+37; it must lie "
        "between 1.18e-38 and 1.27e+35 for them to be numbers",
    ),
    "NaN weight": (
        lambda path: small.bf16(path, shards=1),
        element(f"{Q}.weight", (3, 4), np.nan),
        f"{FILE}: '{Q}.weight': rows 0 to 15 hold a value that is not finite",
    ),
    "unknown quantization method": (
        small.bf16,
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        f"{CONFIG}: quantization is {{'quant_method': 'gptq'}}; supported are 'compressed-tensors' in "
        "'nvfp4-pack-quantized' or 'mxfp4-pack-quantized', 'modelopt' in NVFP4, and 'bitsandbytes' in NF4",
    ),
    "unknown quantization format": (
        small.nvfp4,
        config(quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        f"{CONFIG}: quantization is {{'quant_method': 'compressed-tensors', 'format': 'pack-quantized'}}; supported "
        "are …",
    ),
    "8 bits by bitsandbytes": (
        small.nf4,
        config(quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}),
        f"{CONFIG}: quantization_config has load_in_8bit True, NF4 has False",
    ),
    "FP4 by bitsandbytes": (
        small.nf4,
        config(
            quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}
        ),
        f"{CONFIG}: quantization_config has bnb_4bit_quant_type 'fp4', NF4 has 'nf4'",
    ),
    "NF4 without its state": (
        small.nf4,
        tensors(lambda all_: all_.pop(STATE)),
        f"{FILE}: tensor '{STATE}' is missing from the checkpoint",
    ),
    "NF4 in blocks of 128": (
        small.nf4,
        tensors(lambda all_: all_.update({STATE: in_blocks(128)})),
        f"{FILE}: '{STATE}' has blocksize 128, expected is 64",
    ),
    "half-quantized NF4": (
        small.nf4,
        tensors(lambda all_: all_.update({f"{Q}.weight": np.zeros((64, 64), BF16)})),
        f"{FILE}: '{Q}' is not quantized (weight is bfloat16), but config.json says NF4",
    ),
    "quantized twice over": (
        small.nvfp4,
        config(quantization_config=None),
        f"{FILE}: '{Q}.weight_scale' quantizes '{Q}', but config.json has no quantization_config",
    ),
    "tokenizer larger than the embedding": (
        small.nvfp4,
        smaller_embedding,
        "MODEL: the tokenizer's ids reach 511, but the embedding has vocab_size 500 rows",
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
    "another architecture": (small.nvfp4, config(model_type="gpt2"), f"{CONFIG}: model_type is 'gpt2', …'qwen2'…"),
    "no model": (small.nvfp4, shutil.rmtree, "model directory MODEL does not exist"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(case, place, capfd):
    layout, damage, message = MODELS[case]
    damage(layout(place / "model"))
    assert_says(error_of(train.main, training(place), place, capfd), message)
    if case in ("truncated shard", "no tokenizer"):  # read by the same code
        assert_says(error_of(evaluate, evaluation(place), place, capfd), message)
    assert not (place / "run").exists()


def test_a_model_that_cannot_be_quantized(place, capfd):
    model = small.bf16(place / "model", 1)
    small.change_tensors(model, lambda all_: all_[f"{Q}.weight"].__setitem__((3, 4), np.inf))
    said = error_of(quantize, [str(model), str(place / "out")], place, capfd)
    assert_says(said, f"{FILE}: '{Q}.weight': rows 0 to 15 hold a value that is not finite")
    said = error_of(quantize, [str(model), str(place / "rows.jsonl" / "out")], place, capfd)
    assert_says(said, "the directory of the output DATA cannot be written: DATA is not a directory")
    said = error_of(quantize, [str(model), str(model)], place, capfd)
    assert_says(said, "MODEL already exists; --overwrite replaces it")
    assert sorted(path.name for path in place.iterdir()) == ["model", "rows.jsonl"]


# what is wrong: (content of the dataset, message)
DATASETS: dict[str, tuple[str, str]] = {
    "empty": ("", "DATA holds no problems"),
    "malformed line": (
        lines(ROWS[:2]) + '{"question": "What\n' + lines(ROWS[2:]),
        "DATA, line 3 is not JSON: …",
    ),
    "line that is no object": (
        lines([*ROWS[:2], ["What?", "4"]]),
        "DATA, line 3 is a list, expected an object with columns",
    ),
    "missing column": (lines([{"prompt": "What?", "answer": "4"}]), "DATA…'question'…['answer', 'prompt']…"),
    "no usable row": (lines([{"question": "What?", "answer": ""}] * 3), "DATA holds no problems: left out 3…"),
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
    assert_says(error_of(train.main, training(place), place, capfd), message)
    assert_says(error_of(evaluate, evaluation(place), place, capfd), message)
    assert not (place / "run").exists()


@pytest.mark.parametrize("case", test_export_command.BAD)
def test_adapters(case, place, capfd):
    """What `export` refuses about an adapter and its base, the other command lines refuse."""
    damage, message = test_export_command.BAD[case]
    test_export_command.put_model_and_adapter(place)
    damage(place)
    adapter, rank = place / "adapter", ("--lora-rank", "4")
    calls = (train.main, training(place, *rank)), (evaluate, evaluation(place)), (compare, [str(place / "model")])
    for main, arguments in calls:
        said = error_of(main, [*arguments, "--adapter", str(adapter)], place, capfd).replace(str(adapter), "ADAPTER")
        assert_says(said, message)
    assert not (place / "run").exists()
