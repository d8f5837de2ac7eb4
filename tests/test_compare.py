"""`python -m qerl_jax.compare`: models that agree with transformers, planted errors that it must find where they are,
and bad input.
"""

import dataclasses
import importlib.util
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from command_lines import assert_says, error_of
from helpers import fp32_policy, randomized, with_norm_offsets
from oracles import torch_qwen2
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qerl_jax import compare
from qerl_jax.checkpoint import safetensors as st
from qerl_jax.checkpoint import torch_reference
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.hf_config import MODELOPT_FILE, model_config
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.torch_reference import Outputs
from qerl_jax.compare import Deviation, deviations, main, prompts_of, rounding_bounds

without_compressed_tensors = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is not None, reason="it is tested where it is not installed"
)


def rows(said: str) -> dict[str, list[float]]:
    """The table: name -> max, mean, relative, bound."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line[:1] == "│"]
    return {name: [float(figure) for figure in figures] for name, *figures in cells}


def bf16_model(place: Path, **changes: int) -> Path:
    """Three layers in bf16, and config.json says so."""
    model = small.bf16(place / "model", shards=1, num_hidden_layers=3, **changes)
    small.change_json(model / "config.json", dtype="bfloat16")
    return model


def adapter_of(model: Path) -> Path:
    """An adapter with trained norms."""
    adapter = model.with_name("adapter")
    export_adapter(with_norm_offsets(randomized(fp32_policy(model, 4), seed=1), seed=1), adapter)
    return adapter


def changed(source: Path, name: str, change: Callable[[np.ndarray], None], file: str = st.SINGLE_FILE) -> Path:
    """A copy of a model or adapter with one tensor changed in place."""
    copy = shutil.copytree(source, source.with_name(source.name + "-changed"))
    small.change_tensors(copy, lambda tensors: change(tensors[name]), file)
    return copy


def test_the_bundled_policy(capsys):
    assert main(["tiny"]) == 0
    said = capsys.readouterr().out
    version = re.escape(torch_reference._version("transformers"))
    assert re.match(rf"tiny in float32, 4 prompts; reference: transformers {version} in float32\n", said)
    assert said.endswith("all within the bound\n")
    table = rows(said)
    assert list(table) == ["embedding", *(f"layer {i}" for i in range(4)), "logits", "log-probabilities"]
    assert table["embedding"] == [0, 0, 0, 0]
    assert all(0 < mean <= largest for largest, mean, *_ in list(table.values())[1:])
    assert all(relative < bound / 4 for *_, relative, bound in list(table.values())[1:])  # no bound is near by luck


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
        ("Llama", {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}),
    ],
)
def test_every_family_agrees(tmp_path, capsys, kind, shape):
    torch_qwen2.make(tmp_path, seed=1, kind=kind, scale=0.2, **shape)
    assert main([str(tmp_path)]) == 0, capsys.readouterr().out


def test_stated_figures_are_those_of_the_arrays(tmp_path, capsys):
    """Another head: the deviation is known without this code. The longest sums are those over a prompt's 32 tokens."""
    model = bf16_model(tmp_path, intermediate_size=16)

    def double(array: np.ndarray) -> None:
        array *= array.dtype.type(2)

    other = changed(model, "lm_head.weight", double)
    assert main([str(model)], lambda path, *rest: load_policy(other, *rest)) == 1
    said = capsys.readouterr().out
    reference, prompts = torch_qwen2.load(model), prompts_of(model, model_config(model))
    logits, logprobs = [], []
    for prompt in prompts:
        ids = np.array([prompt])
        wanted = torch.tensor(torch_qwen2.logits(reference, ids))
        one, two = (torch.log_softmax(scale * wanted, -1)[0, :-1].numpy() for scale in (1, 2))
        logits.append(np.abs(wanted.numpy()).ravel())
        logprobs.append(np.abs(np.take_along_axis(one - two, ids[0, 1:, None], 1)).ravel())
    for name, differences in {"logits": np.concatenate(logits), "log-probabilities": np.concatenate(logprobs)}.items():
        largest, mean, *_ = rows(said)[name]
        assert (largest, mean) == pytest.approx((differences.max(), differences.mean()), rel=6e-3)  # three digits
    bound = 4 * (1 + math.sqrt(32)) * 2**-24 * math.sqrt(13)
    assert rows(said)["layer 0"][3] == pytest.approx(bound, rel=6e-3)


def test_an_adapter_with_trained_norms(tmp_path, capsys):
    """It agrees, and a norm or a LoRA B that only one side has does not."""
    model = bf16_model(tmp_path)
    adapter = adapter_of(model)
    command = [str(model), "--adapter", str(adapter), "--weight-format", "bf16"]
    assert main(command) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "float32, 4 prompts" in said and ", adapter by peft " in said and "our loader" not in said
    names = ("input_layernorm.weight", "self_attn.v_proj.lora_B.weight")

    def shift(array: np.ndarray) -> None:
        array += 0.5

    for name in names:
        other = changed(adapter, f"base_model.model.model.layers.1.{name}", shift, "adapter_model.safetensors")
        assert main(command, lambda *args, other=other: load_policy(*args[:-1], other)) == 1
        assert "\nfirst beyond the bound: layer 1: " in capsys.readouterr().out
        shutil.rmtree(other)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.1.self_attn.k_proj.bias", "layer 1"),
        ("model.layers.2.mlp.down_proj.weight", "layer 2"),
        ("lm_head.weight", "logits"),
    ],
)
def test_a_wrong_weight_is_named(tmp_path, capsys, name, first):
    """One column, or for a vector one half, of one tensor is 5 % too large in the policy."""
    model = bf16_model(tmp_path)

    def enlarge(array: np.ndarray) -> None:
        array[..., : max(1, array.shape[-1] // 2)] *= array.dtype.type(1.05)

    other = changed(model, name, enlarge)
    assert main([str(model)], lambda path, *rest: load_policy(other, *rest)) == 1
    said = capsys.readouterr().out
    assert f"\nfirst beyond the bound: {first}: " in said
    table = rows(said)
    before = list(table)[: list(table).index(first)]
    assert all(table[row][2] <= table[row][3] for row in before)


def test_a_number_that_is_none_is_beyond_the_bound(capsys):
    good, bad = Deviation("layer 0", 1e-6, 1e-7, 1e-6), Deviation("layer 1", math.nan, math.nan, math.nan)
    assert compare._show([good, bad], [1e-5, 1e-5]) == 1
    assert "first beyond the bound: layer 1: nan, bound 1e-05" in capsys.readouterr().out


def test_deviations_by_hand():
    """Two states of two tokens; the second token's state shrinks, so that its deviation counts by the first's norm."""
    wanted = np.array([[[3.0, 4.0], [0.0, 50.0]], [[6.0, 8.0], [0.0, 5.0]]], np.float32)
    found = wanted.copy()
    found[1, :, 0] += np.array([0.5, 1.0], np.float32)
    logits = np.array([[1.0, 0, 0, 0], [0, 2.0, 0, 0]], np.float32)
    moved = logits + np.array([[0.25, 0, 0, 0], [0, 0, 0.5, 0]], np.float32)
    logp = np.array([-1.5], np.float32)
    rows = deviations([Outputs(found, moved, logp + np.float32(0.5))], [Outputs(wanted, logits, logp)])
    assert rows == [
        Deviation("embedding", 0, 0, 0),
        Deviation("layer 0", 1.0, 0.375, 0.05),  # 0.5 / 10 and 1 / 50
        Deviation("logits", 0.5, 0.09375, 0.25),  # 0.25 / 1 and 0.5 / (2 * 50 / 5)
        Deviation("log-probabilities", 0.5, 0.5, 0.25),  # 0.5 / (1 / sqrt(4) + 1.5)
    ]


def test_bounds_by_hand(tiny_dir):
    """Three layers; F = 352 is the longest sum of short prompts, T = 1024 that of long ones; elsewhere N H, or D."""
    config = model_config(tiny_dir)
    assert config.num_layers == 3 and config.intermediate_size == 352
    wide_heads, wide_states = (dataclasses.replace(config, **own) for own in ({"head_dim": 128}, {"hidden_size": 400}))
    for model, length, widest in ((config, 8, 352), (config, 1024, 1024), (wide_heads, 8, 512), (wide_states, 8, 400)):
        layers = [4 * (1 + math.sqrt(widest)) * 2**-24 * math.sqrt(13 * layer) for layer in range(5)]
        assert rounding_bounds(model, length) == pytest.approx([*layers, 2 * layers[-1]])


def test_prompts_are_no_longer_than_the_positions(tiny_dir):
    """With a tokenizer and without one."""
    for path, most in ((tiny_dir, 32), (model_path("tiny"), None)):
        config = model_config(path)
        lengths = {len(prompt) for prompt in prompts_of(path, config)}
        assert len(lengths) == 1 and lengths <= set(range(8, 33)) and most in (None, *lengths)
        few = dataclasses.replace(config, max_position_embeddings=7)
        assert [len(prompt) for prompt in prompts_of(path, few)] == [7] * 4


def test_prompts_are_as_long_as_the_shortest_of_their_texts(tiny_dir, tmp_path):
    """Tokenized by words, all are shorter than a prompt may be."""
    texts = [text.split() for text in compare._TEXTS]
    ids = {word: i for i, word in enumerate(dict.fromkeys(itertools.chain(*texts)))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=texts[0][0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    shortest = min(map(len, texts))
    expected = [[ids[word] for word in words][:shortest] for words in texts]
    assert prompts_of(tmp_path, model_config(tiny_dir)) == expected and shortest < compare._TOKENS


@pytest.mark.parametrize(
    ("layout", "with_adapter"), [("modelopt", False), pytest.param("nvfp4", True, marks=without_compressed_tensors)]
)
def test_quantized_models_by_our_loader(tmp_path, capsys, layout, with_adapter):
    model = getattr(small, layout)(tmp_path / "model")
    small.change_json(model / "config.json", dtype="bfloat16")
    adapter = ["--adapter", str(adapter_of(model))] if with_adapter else []
    assert main([str(model), *adapter]) == 0
    said = capsys.readouterr().out
    why = " (compressed-tensors is not installed)" if layout == "nvfp4" else ""
    assert f" in float32, weights dequantized by our loader{why}" in said


def test_a_quantization_that_modelopt_describes_beside_the_config(tmp_path, capsys):
    model = small.modelopt(tmp_path / "model")
    raw = json.loads((model / "config.json").read_text())
    small.write_json(model / MODELOPT_FILE, {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}})
    small.write_json(model / "config.json", {key: raw[key] for key in raw.keys() - {"quantization_config"}})
    assert main([str(model)]) == 0
    assert "weights dequantized by our loader" in capsys.readouterr().out


def test_nvfp4_by_compressed_tensors(tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    model = small.nvfp4(tmp_path / "model")
    assert main([str(model)]) == 0
    said = capsys.readouterr().out
    assert ", weights dequantized by compressed-tensors " in said and "our loader" not in said


def test_a_format_chosen_while_loading(capsys):
    assert main(["tiny", "--weight-format", "nf4"]) == 0
    assert "weights dequantized by our loader" in capsys.readouterr().out


def test_weights_are_replaced_only_where_they_are_rounded(tmp_path):
    """As from compressed-tensors: rounded to bf16 in one layer, and one weight in 64 wrong in the other."""
    exact = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    model = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(2))
    with torch.no_grad():
        for layer, values in zip(model, exact, strict=True):
            layer.weight.copy_(torch.tensor(values).bfloat16().float())
        model[1].weight[3, 4] *= 1.01
    kept = model[1].weight.detach().clone()
    st.save(tmp_path / "exact.safetensors", {f"{i}.weight": exact[i] for i in range(2)})
    torch_reference._fill(model, st.open_files([tmp_path / "exact.safetensors"]), where_close=True)
    np.testing.assert_array_equal(model[0].weight.detach(), exact[0])
    np.testing.assert_array_equal(model[1].weight.detach(), kept)


def test_what_does_not_fit_is_refused(tmp_path, capfd):
    """Of adapters: `test_bad_input.py`."""
    narrow = small.bf16(tmp_path / "narrow", shards=1, vocab_size=128)
    said = error_of(main, [str(narrow)], tmp_path, capfd)
    assert_says(said, f"{narrow}: the tokenizer's ids reach …, but the embedding has vocab_size 128 rows")
