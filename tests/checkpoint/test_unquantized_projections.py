"""Quantized checkpoints that leave some projections unquantized."""

import json
import re

import jax
import numpy as np
import pytest
import small
from helpers import assert_trees_equal, fp32_policy, logits_of
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from qerl_jax import quantize
from qerl_jax.checkpoint import safetensors as st
from qerl_jax.checkpoint.adapter import policy_format
from qerl_jax.checkpoint.hf_config import model_config, stored_quantization
from qerl_jax.checkpoint.layouts import NF4, NVFP4, Quantization, quantization_of
from qerl_jax.checkpoint.policy_tensors import dense_tensors
from qerl_jax.checkpoint.quantize import quantize_checkpoint
from qerl_jax.checkpoint.reader import WeightReader
from qerl_jax.checkpoint.safetensors import CheckpointError
from qerl_jax.config import Config
from qerl_jax.models.config import tensors_of
from qerl_jax.models.formats import Dense, Mxfp4, Nf4, Nvfp4
from qerl_jax.run.abstract import abstract_run
from qerl_jax.run.memory import memory_report

QKV = ("q_proj", "k_proj", "v_proj")
PATHS = (("self_attn", "qkv_proj"), ("self_attn", "o_proj"), ("mlp", "gate_up_proj"), ("mlp", "down_proj"))
Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return small.bf16(
        tmp_path_factory.mktemp("source") / "bf16", num_attention_heads=8, hidden_size=64, intermediate_size=64
    )


def weights_of(policy, layer):
    return [policy.frozen["layers"][layer][block][name]["weight"] for block, name in PATHS]


@pytest.mark.parametrize(("weight_format", "kind"), [("nvfp4", Nvfp4), ("mxfp4", Mxfp4), ("nf4", Nf4)])
def test_ignored_projections_are_the_sources_bits_and_the_others_those_of_a_whole_quantization(
    source, tmp_path, weight_format, kind
):
    out = tmp_path / "mixed"
    assert quantize.main([str(source), str(out), "--format", weight_format, "--ignore", *QKV]) == 0
    quantize_checkpoint(source, tmp_path / "whole", weight_format)
    mixed, whole, plain = (fp32_policy(path) for path in (out, tmp_path / "whole", source))
    assert policy_format(mixed) == weight_format
    for layer in range(2):
        found = weights_of(mixed, layer)
        assert [type(weight) for weight in found] == [Dense, kind, kind, kind]
        assert_trees_equal(found[0], weights_of(plain, layer)[0])
        assert_trees_equal(found[1:], weights_of(whole, layer)[1:])
    values, quantized = (dense_tensors(folder, dtype=np.float32) for folder in (out, tmp_path / "whole"))
    for name, array in st.open_checkpoint(source).items():
        wanted = array if name.rpartition(".")[0].endswith(QKV) else quantized[name]
        np.testing.assert_array_equal(values[name], wanted.astype(np.float32), err_msg=name)


def test_config_json_names_every_ignored_module_as_llm_compressor_does(source, tmp_path):
    """By its full name, the head last; of bitsandbytes under the name that transformers reads."""
    for weight_format in ("nvfp4", "nf4"):
        quantize_checkpoint(source, tmp_path / weight_format, weight_format, ignore=QKV)
    names = [f"model.layers.{layer}.self_attn.{part}" for layer in range(2) for part in QKV]
    assert stored_quantization(tmp_path / "nvfp4") == Quantization(NVFP4, (*names, "lm_head"))
    assert stored_quantization(tmp_path / "nf4") == Quantization(NF4, (*names, "lm_head"))
    section = json.loads((tmp_path / "nvfp4" / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == [*names, "lm_head"]
    section = json.loads((tmp_path / "nf4" / "config.json").read_text())["quantization_config"]
    assert BitsAndBytesConfig.from_dict(section).llm_int8_skip_modules == [*names, "lm_head"]


def test_logits_are_those_of_transformers_with_the_same_values(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "mixed", ignore=QKV)
    values = dense_tensors(tmp_path / "mixed", dtype=np.float32)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32", local_files_only=True)
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(np.array(values[name])))
        tokens = np.arange(3, 19)[None]
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(fp32_policy(tmp_path / "mixed"), tokens), expected, rtol=1e-4, atol=1e-4)


def test_a_run_is_planned_with_the_arrays_it_loads(source, tmp_path):
    out = tmp_path / "mixed"
    quantize_checkpoint(source, out, ignore=(*QKV, "down_proj"))
    config = Config(model=str(out), output_dir=str(tmp_path / "run"), dtype="float32", lora_rank=4)
    abstract, _ = abstract_run(config)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), fp32_policy(out).frozen)
    assert_trees_equal(abstract.frozen, shapes)
    rows = [(row.stored, row.parameters) for row in memory_report(config).parameters[:2]]
    # Widths: 64 hidden, 8 query heads and 1 key/value head of 8, 64 in the MLP; two layers
    qkv, o, gate_up, down = 80 * 64, 64 * 64, 128 * 64, 64 * 64
    assert sorted(rows) == [("Nvfp4", 2 * (o + gate_up)), ("float32", 2 * (qkv + down))]


def test_the_kernels_are_asked_for_quantized_projections_alone(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "mixed", ignore=QKV)
    tensors, config = st.open_checkpoint(tmp_path / "mixed"), model_config(source)
    reader = WeightReader(tensors, config, stored_quantization(tmp_path / "mixed"), "nvfp4", np.float32, "mosaic_gpu")
    qkv, o = (next(spec for spec in tensors_of(config) if spec.path[:2] == path) for path in PATHS[:2])
    assert isinstance(reader.to_device(reader.read(qkv, 1), qkv), Dense)
    with pytest.raises(ValueError, match="'mosaic_gpu' needs"):
        reader.to_device(reader.read(o, 1), o)


def test_parts_of_a_fused_projection_are_ignored_together(source, tmp_path, capsys):
    for names, said in (
        (("q_proj", "k_proj"), "ignore names ['q_proj', 'k_proj'] of ['q_proj', 'k_proj', 'v_proj'], which are one"),
        (("gate_proj",), "ignore names ['gate_proj'] of ['gate_proj', 'up_proj']"),
        ((*QKV, "o_proj", "gate_proj", "up_proj", "down_proj"), "ignore names all projections"),
        (("lm_head",), "ignore names 'lm_head', which is not one of"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            quantize_checkpoint(source, tmp_path / "out", ignore=names)
        assert quantize.main([str(source), str(tmp_path / "out"), "--ignore", *names]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    quantize_checkpoint(source, tmp_path / "half", ignore=QKV)
    change_ignored(tmp_path / "half", [f"re:.*layers.0.*{part}$" for part in QKV[1:]])
    with pytest.raises(
        CheckpointError, match=r"'model\.layers\.0\.self_attn\.k_proj' is not quantized and '.*q_proj' is"
    ):
        fp32_policy(tmp_path / "half")


def change_ignored(directory, names):
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["ignore"] = names
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("ignored", "said"),
    [
        (["lm_head"], rf"'{Q0}' is not quantized \(weight is bfloat16\), but config.json says NVFP4"),
        (
            [f"re:.*{part}$" for part in (*QKV, "o_proj")],
            r"o_proj\.weight_scale' quantizes '.*o_proj', but config\.json leaves it unquantized",
        ),
        ("q_proj", r"ignore is 'q_proj', must be a list of modules"),
        ([1], r"ignore is \[1\], must be a list of modules"),
        (["re:("], r"'re:\(' is no regular expression"),
    ],
)
def test_what_config_json_ignores_is_what_the_files_hold(source, tmp_path, ignored, said):
    quantize_checkpoint(source, tmp_path / "mixed", ignore=QKV)
    change_ignored(tmp_path / "mixed", ignored)
    with pytest.raises(CheckpointError, match=said):
        fp32_policy(tmp_path / "mixed")


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        (Q0, {Q0}),
        ("q_proj", {Q0, "model.layers.10.self_attn.q_proj"}),
        ("model.layers.1", set()),
        ("model.layers.0.self_attn", {Q0, "model.layers.0.self_attn.o_proj"}),
        ("self_attn", set()),
        ("model.layers.*.self_attn*", {Q0, "model.layers.0.self_attn.o_proj", "model.layers.10.self_attn.q_proj"}),
        (r"re:.*\.q_proj$", {Q0, "model.layers.10.self_attn.q_proj"}),
        (r"re:self_attn", set()),
        (r"re:model\.layers\.1\d?\.", {"model.layers.10.self_attn.q_proj"}),
    ],
)
def test_names_of_unquantized_modules(name, matches):
    """compressed-tensors: full names, or regular expressions from the beginning (`match_name`). ModelOpt: wildcards.
    bitsandbytes in transformers (`should_convert_module`): a name, the end of one, or a module that holds it.
    """
    modules = {Q0, "model.layers.0.self_attn.o_proj", "model.layers.10.self_attn.q_proj", "model.layers.0.mlp.up_proj"}
    assert {module for module in modules if Quantization(NVFP4, (name,)).layout_of(module) is None} == matches


def test_where_names_of_unquantized_modules_stand():
    nested = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    assert quantization_of(nested, "here").ignored == ("lm_head",)
    assert quantization_of({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["a*"]}, "").ignored == ("a*",)
    skipped = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert quantization_of({**skipped, "llm_int8_skip_modules": None}, "").ignored == ()
    assert quantization_of({**skipped, "llm_int8_skip_modules": ["lm_head"]}, "").ignored == ("lm_head",)
