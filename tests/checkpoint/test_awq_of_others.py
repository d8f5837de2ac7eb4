"""NVFP4 checkpoints that llm-compressor's and ModelOpt's AWQ made: read exactly, or refused with the reason."""

import json
import re

import jax
import numpy as np
import pytest
import small
import torch
from helpers import fp32_policy, logits_of
from oracles import llm_compressor, numpy_formats, torch_qwen2

from qerl_jax.checkpoint import safetensors as st
from qerl_jax.checkpoint.check import check_names
from qerl_jax.checkpoint.hf_config import stored_quantization
from qerl_jax.checkpoint.quantize import quantize_checkpoint
from qerl_jax.checkpoint.safetensors import CheckpointError
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.data.problems import Problem
from qerl_jax.data.prompts import encode
from qerl_jax.models.lora import PROJECTIONS

TOKENS = np.random.default_rng(0).integers(3, 512, (2, 40))


def test_llm_compressors_awq(tmp_path):
    """A directory as its AWQModifier left it: logits of transformers with the weights that the formula gives for its
    bytes. Channel scales moved its norms and biases, and it is as near to its unquantized model as round-to-nearest.
    """
    bundled, stored = llm_compressor.SOURCES["bundled"], st.open_checkpoint(llm_compressor.AWQ)
    source, reference = st.open_checkpoint(bundled), torch_qwen2.load(bundled)
    exact = torch_qwen2.logits(reference, TOKENS)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in PROJECTIONS and name != module:
                parts = (
                    stored[f"{module}.{part}"] for part in ("weight_packed", "weight_scale", "weight_global_scale")
                )
                value = numpy_formats.nvfp4(*parts, divides=True)
            else:
                value = stored[name]
            parameter.copy_(torch.tensor(np.asarray(value, np.float32)))
    ours = np.asarray(logits_of(fp32_policy(llm_compressor.AWQ), TOKENS))
    np.testing.assert_allclose(ours, torch_qwen2.logits(reference, TOKENS), rtol=0, atol=1e-4)

    moved = [name for name in source if name in stored and not np.array_equal(source[name], stored[name])]
    assert {name.split(".", 3)[-1] for name in moved} >= {"input_layernorm.weight", "post_attention_layernorm.weight"}
    quantize_checkpoint(bundled, tmp_path / "nearest")
    nearest = np.asarray(logits_of(fp32_policy(tmp_path / "nearest"), TOKENS))
    assert 0 < _divergence(exact, ours) < 1.2 * _divergence(exact, nearest)


def test_the_truncation_of_calibration_cuts_no_prompt():
    """tokenizer.json of that directory still says 128 tokens, as the tool's last call left it."""
    assert json.loads((llm_compressor.AWQ / "tokenizer.json").read_text())["truncation"]["max_length"] == 128
    problems = [Problem(0, "Ana has 15 shells. " * 60, "15")]
    paths = (llm_compressor.AWQ, llm_compressor.SOURCES["bundled"])
    theirs, ours = (encode(problems, load_tokenizer(path), "") for path in paths)
    assert theirs == ours and len(theirs[0]) > 400


def _divergence(one: np.ndarray, other: np.ndarray) -> float:
    first, second = (jax.nn.log_softmax(logits.astype(np.float64)) for logits in (one, other))
    return float((np.exp(first) * (first - second)).sum(-1).mean())


def test_modelopts_awq(tmp_path):
    """Its layout is that of NVFP4 where every channel scale was folded into a weight; elsewhere `pre_quant_scale`
    stands beside a projection (modelopt/torch/export/quant_utils.py: for Qwen2 beside o and down, with grouped heads
    beside o).
    """
    model = small.modelopt(tmp_path / "model")
    plain = logits_of(fp32_policy(model), TOKENS)
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "producer": {"name": "modelopt"}}
    small.change_json(model / "config.json", quantization_config=section)
    policy = fp32_policy(model)
    np.testing.assert_array_equal(logits_of(policy, TOKENS), plain)
    names = [f"model.layers.{place}_proj.pre_quant_scale" for place in ("0.mlp.down", "1.self_attn.o")]
    small.change_tensors(model, lambda tensors: tensors.update(dict.fromkeys(names, np.ones(16, np.float32))))
    said = f"{model / st.SINGLE_FILE}: 2 scales of projections' inputs, first '{names[0]}': ModelOpt's AWQ folds"
    said = re.escape(said)
    with pytest.raises(CheckpointError, match=said):
        fp32_policy(model)
    with pytest.raises(CheckpointError, match=said):
        check_names(st.open_checkpoint(model), policy.config, stored_quantization(model))
