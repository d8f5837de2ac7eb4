"""Directories to policies: single and sharded, tied and untied, and every defect named."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import small
from helpers import assert_trees_equal, fp32_policy
from oracles import torch_qwen2
from qerl_kernels.nvfp4_matmul.packing import unpack

from qerl_jax import keys
from qerl_jax.checkpoint import safetensors as st
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.reader import kernel_form
from qerl_jax.checkpoint.safetensors import CheckpointError
from qerl_jax.models.formats import Dense, Mxfp4, Nf4, Nvfp4, PackedNvfp4, mxfp4, nf4, nvfp4
from qerl_jax.models.lora import PROJECTIONS, LoraConfig

Q = "model.layers.0.self_attn.q_proj"


def rewritten(source: Path, target: Path, change=lambda tensors: None) -> Path:
    """A single-file copy of a checkpoint after `change(dict of arrays)`."""
    target.mkdir(parents=True)
    tensors = {name: np.array(array) for name, array in st.open_checkpoint(source).items()}
    change(tensors)
    st.save(target / st.SINGLE_FILE, tensors)
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    return target


@pytest.fixture(scope="module")
def micro_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("micro") / "m"
    torch_qwen2.make(path, seed=0, hidden_size=64, intermediate_size=128)
    return path


@pytest.fixture(scope="module")
def nvfp4_dir(data) -> Path:
    return data / "nvfp4/fixture-compressed-tensors-tiny-qwen2"


def test_sharded_equals_single(tiny_dir, tmp_path):
    assert len(list(tiny_dir.glob("*.safetensors"))) == 3
    single = rewritten(tiny_dir, tmp_path / "single")
    assert_trees_equal(fp32_policy(single).frozen, fp32_policy(tiny_dir).frozen)


def test_every_leaf_is_the_files_tensor(micro_dir):
    """Fused projections are their parts, one below the other; every parameter is used once."""
    tensors = st.open_checkpoint(micro_dir)
    policy = fp32_policy(micro_dir)
    layer = policy.frozen["layers"][1]
    prefix = "model.layers.1."
    for block, fused, parts in (("self_attn", "qkv_proj", "qkv"), ("mlp", "gate_up_proj", ("gate", "up"))):
        expected = np.concatenate([tensors[f"{prefix}{block}.{p}_proj.weight"] for p in parts])
        np.testing.assert_array_equal(layer[block][fused]["weight"].values, expected)
    bias = np.concatenate([tensors[f"{prefix}self_attn.{p}_proj.bias"] for p in "qkv"])
    np.testing.assert_array_equal(layer["self_attn"]["qkv_proj"]["bias"], bias)
    norms = policy.norms["layers"][1]
    np.testing.assert_array_equal(norms["input_layernorm"]["weight"], tensors[f"{prefix}input_layernorm.weight"])
    assert policy.tokenizer is None  # the directory has none
    count = sum(leaf.size for leaf in jax.tree.leaves((policy.frozen, policy.norms)))
    assert count == sum(array.size for array in tensors.values()) == policy.config.parameter_count()


def test_a_tied_head_may_stand_in_the_file_once_more(tmp_path):
    """The same bits: not one other value, nor another shape or dtype."""
    torch_qwen2.make(tmp_path / "tied", seed=1, tie_word_embeddings=True)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    twice = rewritten(tmp_path / "tied", tmp_path / "twice", add)
    assert_trees_equal(fp32_policy(twice).frozen, fp32_policy(tmp_path / "tied").frozen)
    head = st.open_checkpoint(twice)["lm_head.weight"]
    for i, other in enumerate((np.where(head == head.max(), 2, head), head[:-1], head.view(np.int32))):
        changed = rewritten(twice, tmp_path / str(i), lambda own, other=other: own.update({"lm_head.weight": other}))
        with pytest.raises(CheckpointError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
            fp32_policy(changed)


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16])
def test_dtypes_and_formats(micro_dir, dtype):
    """4-bit weights are packed where the kernels run and nowhere else."""
    for name, kind in (("bf16", Dense), (None, Dense), ("nvfp4", Nvfp4), ("mxfp4", Mxfp4), ("nf4", Nf4)):
        policy = load_policy(micro_dir, name, LoraConfig(rank=2), dtype)
        layer = policy.frozen["layers"][0]
        for block, fused in (
            ("self_attn", "qkv_proj"), ("self_attn", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj"),
        ):  # fmt: skip
            weight = layer[block][fused]["weight"]
            assert isinstance(weight, kind) and kernel_form(weight, "auto", "a GPU") is weight
            packed = kernel_form(weight, "auto", None)
            assert isinstance(packed, PackedNvfp4) == (kind in (Nvfp4, Mxfp4))
            assert isinstance(unpack(packed) if packed is not weight else weight, kind)
        assert policy.frozen["embed_tokens"].dtype == dtype == policy.dtype
        assert {x.dtype for x in jax.tree.leaves((policy.norms, policy.lora))} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4", "nf4"])
def test_layers_quantized_in_threads_keep_their_places(tmp_path, weight_format):
    """Five different layers: each is the quantization of its own tensors, told in order."""
    torch_qwen2.make(tmp_path / "m", seed=2, hidden_size=64, intermediate_size=128, num_hidden_layers=5)
    tensors = st.open_checkpoint(tmp_path / "m")
    told: list[tuple[int, int]] = []
    policy = load_policy(
        tmp_path / "m",
        weight_format,
        LoraConfig(rank=0),
        matmul_kernel="xla",
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, 5) for done in range(1, 6)]
    for i in range(5):
        layer = policy.frozen["layers"][i]
        for block, fused, parts in (
            ("self_attn", "qkv_proj", ("q", "k", "v")),
            ("self_attn", "o_proj", ("o",)),
            ("mlp", "gate_up_proj", ("gate", "up")),
            ("mlp", "down_proj", ("down",)),
        ):
            matrix = np.concatenate([tensors[f"model.layers.{i}.{block}.{part}_proj.weight"] for part in parts])
            quantize = {"nvfp4": nvfp4.quantize, "mxfp4": mxfp4.quantize, "nf4": nf4.quantize}[weight_format]
            assert_trees_equal(layer[block][fused]["weight"], quantize(matrix))


def test_fused_parts_of_two_dtypes_share_a_global_scale_in_fp32(micro_dir, tmp_path):
    def narrow(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].astype(ml_dtypes.bfloat16)

    policy = load_policy(rewritten(micro_dir, tmp_path / "m", narrow), "nvfp4", LoraConfig(rank=0), matmul_kernel="xla")
    parts = [st.open_checkpoint(tmp_path / "m")[Q.replace("q_proj", f"{part}_proj") + ".weight"] for part in "qkv"]
    assert [part.dtype.name for part in parts] == ["bfloat16", "float32", "float32"]
    scale = np.float32(1) / max(np.abs(part.astype(np.float32)).max() for part in parts) * np.float32(448 * 6)
    found = np.asarray(policy.frozen["layers"][0]["self_attn"]["qkv_proj"]["weight"].global_scale)
    assert (found == scale).all() and scale.astype(ml_dtypes.bfloat16) != scale


def test_fused_biases_of_bf16_and_fp16_keep_their_values(micro_dir, tmp_path):
    """numpy has no dtype for both."""

    def narrow(tensors: dict[str, np.ndarray]) -> None:
        for part, dtype in (("q_proj", ml_dtypes.bfloat16), ("v_proj", np.float16)):
            name = Q.replace("q_proj", part) + ".bias"
            tensors[name] = tensors[name].astype(dtype)

    policy = fp32_policy(rewritten(micro_dir, tmp_path / "m", narrow))
    stored = [st.open_checkpoint(tmp_path / "m")[Q.replace("q_proj", f"{part}_proj") + ".bias"] for part in "qkv"]
    found = policy.frozen["layers"][0]["self_attn"]["qkv_proj"]["bias"]
    np.testing.assert_array_equal(found, np.concatenate([part.astype(np.float32) for part in stored]))


@pytest.mark.parametrize(
    "targets", [PROJECTIONS, ("q_proj", "v_proj"), ("up_proj",), ("o_proj", "down_proj", "k_proj")], ids=len
)
def test_fresh_adapters(micro_dir, targets):
    """A uniform within 1 / sqrt(K), drawn by the key of its seed, layer and projection, B zero."""
    policies = [
        load_policy(micro_dir, lora=LoraConfig(3, 6.0, target_modules=targets), seed=s, dtype=jnp.float32)
        for s in (0, 1)
    ]
    from qerl_jax.checkpoint.adapter import map_layers

    seen, previous = {}, {}
    for policy, found in zip(policies, (previous, seen), strict=True):
        map_layers(lambda layer, part, lora, found=found: found.setdefault((layer, part), lora), policy.lora)
    assert set(seen) == {(layer, part) for layer in range(2) for part in targets}
    shapes = policies[0].config.projection_shapes()
    drawn, seeds = [], keys.for_step(1, keys.Purpose.LORA_INIT, 0)
    for (layer, part), lora in seen.items():
        n, k = shapes[part]
        assert lora.a.shape == (k, 3) and lora.b.shape == (3, n) and lora.scale == 2.0
        a = np.asarray(lora.a)
        assert 0.8 / k**0.5 < np.abs(a).max() <= 1 / k**0.5 and (np.asarray(lora.b) == 0).all()
        own = jax.random.fold_in(jax.random.fold_in(seeds, layer), PROJECTIONS.index(part))
        np.testing.assert_allclose(a, (2 * jax.random.uniform(own, (k, 3)) - 1) / k**0.5, rtol=0, atol=1e-6)
        drawn += [a.tobytes(), np.asarray(previous[layer, part].a).tobytes()]
    assert len(set(drawn)) == len(drawn)


def test_rank_zero_has_no_adapters(micro_dir):
    policy = load_policy(f"{micro_dir}/", lora=LoraConfig(rank=0))
    assert jax.tree.leaves(policy.lora) == [] and policy.source == str(micro_dir)


def _set(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


def _poison(name, index, value):
    def change(tensors):
        tensors[name][index] = value

    return change


NORM = "model.layers.0.input_layernorm.weight"
F8 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(f"{Q}.weight"), (f"'{Q}.weight' is missing",)),
        (_set("model.layers.2.extra", np.ones(2, np.float32)), ("'model.layers.2.extra'", "no place")),
        (_set(f"{Q}.weight", np.ones((64, 63), np.float32)), (f"'{Q}.weight'", "[64, 63]", "[64, 64]")),
        (_set(NORM, np.ones(65, np.float32)), (f"'{NORM}'", "[65]", "[64]")),
        (_set(f"{Q}.weight", np.ones((64, 64), np.int32)), (f"'{Q}.weight'", "int32", "bfloat16")),
        (_poison(f"{Q}.weight", (3, 4), np.nan), (f"'{Q}.weight'", "not finite")),
        (_poison(NORM, 4, -np.inf), (f"'{NORM}'", "not finite")),
        # of a quantized one
        (lambda t: t.pop(f"{Q}.weight_scale"), (f"'{Q}.weight_scale' is missing",)),
        (_poison(f"{Q}.weight_scale", (5, 1), F8(np.nan)), (f"'{Q}.weight_scale'[5, 1] is nan",)),
        (_poison(f"{Q}.weight_scale", (0, 0), F8(-0.0)), (f"'{Q}.weight_scale'[0, 0] is -0",)),
        (_poison(f"{Q}.weight_global_scale", 0, 0.0), (f"'{Q}.weight_global_scale' is 0.0",)),
        (
            _set(f"{Q}.weight_packed", np.ones((128, 128), np.uint8)),
            (f"'{Q}.weight_packed'", "[128, 128]", "[128, 64]"),
        ),
        (_set(f"{Q}.weight_scale", np.ones((128, 8), np.float32)), (f"'{Q}.weight_scale'", "float32", "float8_e4m3fn")),
        (_set(f"{Q}.zero_point", np.ones(2, np.float32)), (f"'{Q}.zero_point'", "no place")),
    ],
)
def test_defects_of_a_checkpoint(micro_dir, nvfp4_dir, tmp_path, change, named):
    is_quantized = any(part in named[0] for part in ("_scale", "_packed", "zero_point"))
    folder = rewritten(nvfp4_dir if is_quantized else micro_dir, tmp_path / "bad", change)
    with pytest.raises(CheckpointError) as error:
        fp32_policy(folder)
    for word in (*named, *([] if "missing" in named[0] else [str(folder / st.SINGLE_FILE)])):
        assert word in str(error.value)


def test_a_value_beyond_bf16_is_refused_in_bf16_alone(micro_dir, tmp_path):
    folder = rewritten(micro_dir, tmp_path / "large", _poison(f"{Q}.weight", (3, 4), 3.4e38))
    fp32_policy(folder)
    words = rf"{st.SINGLE_FILE}: '{Q}.weight' holds a value of magnitude 3.4e\+38, which bfloat16 cannot hold"
    with pytest.raises(CheckpointError, match=words):
        load_policy(folder)


UNUSED = {
    "activation scales of W4A4": [f"{Q}.input_global_scale"],
    "KV cache, ModelOpt": ["model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.v_proj.v_scale"],
    "KV cache, compressed-tensors": ["model.layers.1.self_attn.k_scale", "model.layers.1.self_attn.v_scale"],
    "KV cache, deprecated": ["model.layers.1.self_attn.kv_scale"],
    "rotary frequencies": ["model.layers.1.self_attn.rotary_emb.inv_freq"],
}


@pytest.mark.parametrize("names", UNUSED.values(), ids=UNUSED)
def test_tensors_that_are_known_and_unused(nvfp4_dir, tmp_path, names):
    def add(tensors):
        tensors |= dict.fromkeys(names, np.ones(1, np.float32))

    folder = rewritten(nvfp4_dir, tmp_path / "more", add)
    assert_trees_equal(fp32_policy(folder).frozen, fp32_policy(nvfp4_dir).frozen)


def test_config_and_weights_that_contradict(nvfp4_dir, tiny_dir, tmp_path):
    folder = rewritten(nvfp4_dir, tmp_path / "a")
    small.change_json(folder / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match=r"quantizes .*, but config\.json has no quantization_config"):
        fp32_policy(folder)
    section = json.loads((nvfp4_dir / "config.json").read_text())["quantization_config"]
    folder = rewritten(tiny_dir, tmp_path / "b")
    small.change_json(folder / "config.json", quantization_config=section)
    with pytest.raises(CheckpointError, match=r"is not quantized \(weight is bfloat16\), but config\.json says NVFP4"):
        fp32_policy(folder)
    for name in ("bf16", "nf4"):
        with pytest.raises(ValueError, match=f"holds NVFP4 weights .*'{name}'"):
            load_policy(nvfp4_dir, name)


def test_arguments_that_cannot_be(micro_dir, tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none"))):
        load_policy(tmp_path / "none")
    with pytest.raises(ValueError, match="'int4' is not one of"):
        load_policy(micro_dir, "int4")
    with pytest.raises(ValueError, match="bfloat16 or float32, got float16"):
        load_policy(micro_dir, dtype=jnp.float16)
    narrow = tmp_path / "narrow"
    torch_qwen2.make(narrow, seed=0, hidden_size=40)
    with pytest.raises(
        CheckpointError, match=r"self_attn.q_proj.weight': NF4 needs input features divisible by 64, got .* x 40"
    ):
        load_policy(narrow, "nf4")


LOAD = """
import importlib.util, json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)  # as if not installed
from qerl_jax.checkpoint.tokenizer import load_tokenizer
place = Path(sys.argv[1])
with ThreadPoolExecutor(2) as pool:
    tokenizers = list(pool.map(load_tokenizer, 2 * [place]))
cases = json.loads((place / "golden_encodings.json").read_text())
print(*(sum(tokenizer.encode(case["text"]) == case["ids"] for case in cases) for tokenizer in tokenizers), len(cases))
"""


def test_nothing_is_said_while_threads_load_a_sound_tokenizer_at_once(data, tmp_path):
    """Neither of PyTorch's absence nor of the pattern of Mistral's tokenizers, of which transformers warns where
    config.json names no model_type; the ids of all golden encodings are exact. It is the first import of transformers
    in a fresh process, of which a second thread used to find a half.
    """
    shutil.copytree(data / "qwen2.5_tokenizer", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS_")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.stderr == ""
    *exact, count = map(int, run.stdout.split())
    assert exact == 2 * [count] and count > 5
