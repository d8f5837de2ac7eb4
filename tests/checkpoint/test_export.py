"""Exports: transformers and peft load them and compute the policy. A weight is rounded once, or is the policy's to the
bit.
"""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import peft
import pytest
import small
import torch
import transformers
from helpers import assert_trees_equal, fp32_policy, logits_of, randomized, with_norm_offsets
from oracles import numpy_formats, torch_qwen2

from qerl_jax.checkpoint import safetensors as st
from qerl_jax.checkpoint.adapter import adapter_tensors, export_adapter, norm_tensors
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.quantize import quantize_checkpoint
from qerl_jax.export import export
from qerl_jax.models.lora import PROJECTIONS, LoraConfig
from qerl_jax.types import Policy

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 9)).astype(np.int32)
ALL = LoraConfig(3, 6.0)
RANK_STABILIZED = LoraConfig(4, 10.0, use_rslora=True, target_modules=("q_proj", "v_proj", "down_proj"))
# kind, shape, adapters, whether norms were trained, dtype of the stored base
CASES = {
    "qwen2, untied": ("Qwen2", {"tie_word_embeddings": False}, ALL, True, torch.bfloat16),
    "qwen2, tied, rsLoRA": ("Qwen2", {"tie_word_embeddings": True}, RANK_STABILIZED, False, torch.bfloat16),
    "qwen2, fp32": ("Qwen2", {"tie_word_embeddings": True}, ALL, True, torch.float32),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, RANK_STABILIZED, True, torch.bfloat16),
    "llama": (
        "Llama",
        {"rope_parameters": torch_qwen2.LLAMA_ROPE, "tie_word_embeddings": False},
        ALL,
        False,
        torch.bfloat16,
    ),
}


def make(directory: Path, kind: str = "Qwen2", dtype: torch.dtype = torch.bfloat16, **shape: object) -> Path:
    """A random model stored in `dtype`."""
    torch_qwen2.make(directory, seed=0, scale=0.3, kind=kind, **shape).to(dtype).save_pretrained(directory)
    return directory


def trained(base: Path, lora: LoraConfig, norms: bool = True, **options: object) -> Policy:
    """Random A and B, and moved norms."""
    policy = randomized(load_policy(base, lora=lora, dtype=jnp.float32, **options), 1, 0.3)
    return with_norm_offsets(policy, 2) if norms else policy


def stored(policy: Policy, directory: Path, norms: bool = True) -> Path:
    export_adapter(policy, directory, norms=norms)
    return directory


def of_torch(directory: Path) -> np.ndarray:
    return torch_qwen2.logits(torch_qwen2.load(directory), TOKENS)


def exact(policy: Policy, values: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """`W + scale · B A` and norms in float64, from the policy's arrays and the base's values, each with the sum of the
    magnitudes that were added, of which fp32 loses a part.
    """
    result = {name: value.astype(np.float64) for name, value in (values | norm_tensors(policy)).items()}
    sums = {name: np.abs(value) for name, value in result.items()}
    lora = adapter_tensors(policy)
    for name in lora:
        if name.endswith("lora_A.weight"):
            scale = policy.lora_config.scale
            weight = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            a, b = (lora[key].astype(np.float64) for key in (name, name.replace("lora_A", "lora_B")))
            result[weight] = result[weight] + scale * (b @ a)
            sums[weight] = sums[weight] + scale * (np.abs(b) @ np.abs(a))
    return {name: (value, sums[name]) for name, value in result.items()}


def assert_rounded_once(written: st.Tensors, wanted: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Each value is the nearest bf16 to the exact one, or to one that differs by the error of a few sums in fp32."""
    assert set(written) == set(wanted)
    for name, (value, magnitude) in wanted.items():
        assert written[name].dtype == ml_dtypes.bfloat16, name
        half_unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(value), 1e-30)))) * 2.0**-8
        error = np.abs(written[name].astype(np.float64) - value)
        assert np.count_nonzero(error > half_unit * (1 + 2.0**-20) + 2.0**-21 * magnitude) == 0, name


@pytest.mark.parametrize("case", CASES)
def test_merged(tmp_path, case):
    """The merged model against float64, and in transformers, which loads it as it is, against the adapter in peft."""
    kind, shape, lora, norms, dtype = CASES[case]
    base = make(tmp_path / "base", kind, dtype, **shape)
    policy = trained(base, lora, norms)
    adapter, out = stored(policy, tmp_path / "adapter", norms), tmp_path / "out"
    export(adapter, out, "merged", str(base))
    assert_rounded_once(st.open_checkpoint(out), exact(policy, dict(st.open_checkpoint(base))))
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert loaded.dtype == torch.bfloat16 and not any(map(len, report.values())), report
    with_adapter = peft.PeftModel.from_pretrained(torch_qwen2.load(base), adapter).eval()
    theirs = torch_qwen2.logits(with_adapter, TOKENS)
    rounding = np.abs(of_torch(out) - theirs).mean()
    assert 0 < rounding < 0.05 * np.abs(theirs - of_torch(base)).mean()  # trained far beyond bf16's resolution


def with_biases(scheme: str, base: Path) -> dict[str, np.ndarray]:
    """Values of a quantized checkpoint in float64, from the format's description."""
    tensors, suffixes = st.open_checkpoint(base), ("weight_packed", "weight_scale", "weight_global_scale")
    if scheme == "modelopt":
        suffixes = ("weight", "weight_scale", "weight_scale_2")
    values = {}
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        if f"{module}.{suffixes[1]}" not in tensors:
            values[name] = tensors[name]
        elif suffix == suffixes[0]:
            parts = (tensors[f"{module}.{other}"] for other in suffixes)
            values[f"{module}.weight"] = numpy_formats.nvfp4(*parts, divides=scheme != "modelopt")
    return values | {name: tensors[name] for name in tensors if name.endswith(".bias")}


@pytest.mark.parametrize("scheme", ["compressed-tensors", "modelopt"])
def test_merged_from_an_nvfp4_base(tmp_path, scheme):
    """Nothing of the quantization stays, nor scales of activations, stored frequencies and ModelOpt's own file."""
    base = (small.nvfp4 if scheme == "compressed-tensors" else small.modelopt)(tmp_path / "base")
    activation = "input_global_scale" if scheme == "compressed-tensors" else "input_scale"
    unused = f"model.layers.0.mlp.up_proj.{activation}", "model.layers.0.self_attn.rotary_emb.inv_freq"
    small.change_tensors(base, lambda tensors: tensors.update(dict.fromkeys(unused, np.ones(1, np.float32))))
    (base / "hf_quant_config.json").write_text("{}")
    (base / "README.md").write_text("the base's")
    config = json.loads((base / "config.json").read_text())
    config.pop("dtype", None)
    small.write_json(base / "config.json", config | {"torch_dtype": "float16"})  # as transformers 4 names it
    policy, out = trained(base, ALL), tmp_path / "out"
    export(stored(policy, tmp_path / "adapter"), out, "merged", str(base))
    values = {name: value for name, value in with_biases(scheme, base).items() if name not in unused}
    assert_rounded_once(st.open_checkpoint(out), exact(policy, values))
    written = json.loads((out / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16" and not {"quantization_config", "dtype"} & written.keys()
    assert not (out / "hf_quant_config.json").exists() and not (out / "README.md").exists()
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == (base / "chat_template.jinja").read_text()
    export(tmp_path / "adapter", tmp_path / "served", "vllm", str(base))  # whose base stays quantized
    assert (tmp_path / "served/base/hf_quant_config.json").is_file()
    assert not (tmp_path / "served/base/README.md").exists()


@pytest.mark.parametrize("weight_format", ["nvfp4", "mxfp4", "nf4"])
def test_merged_from_a_base_quantized_while_loading(tmp_path, weight_format):
    """The oracle dequantizes the weights of the loaded policy; the quantized base on disk makes the same model. What
    vLLM serves beside the adapter has those values, too: NVFP4 itself, or of another format in bf16.
    """
    base = make(tmp_path / "base", hidden_size=64, intermediate_size=128)
    policy = trained(base, ALL, weight_format=weight_format)
    out = tmp_path / "out"
    export(stored(policy, tmp_path / "adapter"), out, "merged", str(base), weight_format)
    values = {name: value for name, value in st.open_checkpoint(base).items() if "_proj.weight" not in name}
    shapes = policy.config.projection_shapes()
    for layer, blocks in policy.frozen["layers"].items():
        for block, fused, parts in (
            ("self_attn", "qkv_proj", PROJECTIONS[:3]),
            ("self_attn", "o_proj", PROJECTIONS[3:4]),
            ("mlp", "gate_up_proj", PROJECTIONS[4:6]),
            ("mlp", "down_proj", PROJECTIONS[6:]),
        ):
            weight = jax.tree.leaves(blocks[block][fused]["weight"])
            options = {"divides": True} if weight_format == "nvfp4" else {}
            whole, row = getattr(numpy_formats, weight_format)(*map(np.asarray, weight), **options), 0
            for part in parts:
                n = shapes[part][0]
                values[f"model.layers.{layer}.{block}.{part}.weight"] = whole[row : row + n]
                row += n
    merged = st.open_checkpoint(out)
    assert_rounded_once(merged, exact(policy, values))
    quantize_checkpoint(base, tmp_path / "quantized", weight_format)
    export(tmp_path / "adapter", tmp_path / "again", "merged", str(tmp_path / "quantized"))
    again = st.open_checkpoint(tmp_path / "again")
    assert {name: array.tobytes() for name, array in again.items()} == {n: a.tobytes() for n, a in merged.items()}
    export(tmp_path / "adapter", tmp_path / "served", "vllm", str(base), weight_format)
    served = st.open_checkpoint(tmp_path / "served/base")
    if weight_format == "nvfp4":
        quantized = st.open_checkpoint(tmp_path / "quantized")
        assert all(served[name].tobytes() == quantized[name].tobytes() for name in quantized if "_proj." in name)
    for name in (name for name in values if "_proj.weight" in name and weight_format != "nvfp4"):
        np.testing.assert_array_equal(served[name], values[name].astype(ml_dtypes.bfloat16), err_msg=name)


def test_vllm_adapter_and_base(tmp_path):
    """LoRA alone, and the base with the norms in fp32: by transformers and peft they give the policy."""
    base = make(tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 1}')
    policy, out = trained(base, dataclasses.replace(ALL, rank=8)), tmp_path / "out"  # vLLM has a maximum of 8
    (use,) = export(stored(policy, tmp_path / "adapter"), out, "vllm", str(base))
    lora = f"--enable-lora --max-lora-rank 8 --lora-modules trained={out}/adapter"
    assert use == f"vllm serve {out}/base {lora}"
    config = json.loads((out / "adapter/adapter_config.json").read_text())
    assert not config["modules_to_save"] and sorted(config["target_modules"]) == sorted(PROJECTIONS)
    assert config["base_model_name_or_path"] == str(out / "base")
    names = st.open_files([out / "adapter/adapter_model.safetensors"])
    assert all(re.search(r"\.lora_[AB]\.weight$", name) for name in names)
    model = peft.PeftModel.from_pretrained(torch_qwen2.load(out / "base"), out / "adapter").eval()
    np.testing.assert_allclose(np.asarray(logits_of(policy, TOKENS)), torch_qwen2.logits(model, TOKENS), atol=2e-4)
    back = load_policy(out / "base", dtype=jnp.float32, adapter=out / "adapter")
    assert_trees_equal((back.lora, back.norms, back.frozen), (policy.lora, policy.norms, policy.frozen))
    copied = "generation_config.json"
    assert (out / "base" / copied).read_bytes() == (base / copied).read_bytes()


def test_vllm_base_keeps_quantized_shards(tmp_path):
    """Codes, scales and every other tensor stay bit for bit, in their shards; the norms are fp32."""
    quantize_checkpoint(small.bf16(tmp_path / "bf16", shards=2), tmp_path / "nvfp4")
    policy, out = trained(tmp_path / "nvfp4", ALL), tmp_path / "out"
    told: list[tuple[int, int]] = []
    given = stored(policy, tmp_path / "adapter"), out, "vllm", str(tmp_path / "nvfp4")
    export(*given, progress=lambda *call: told.append(call))
    before, after = (st.open_checkpoint(folder) for folder in (tmp_path / "nvfp4", out / "base"))
    assert told[-1] == (len(after), len(after))
    assert set(before) == set(after) and len({after.file_of(name) for name in after}) == 2
    for name in before:
        assert after.file_of(name).name == before.file_of(name).name
        if "layernorm" in name:
            assert after[name].dtype == np.float32
        else:
            np.testing.assert_array_equal(after[name].view(np.uint8), before[name].view(np.uint8), err_msg=name)
    assert_trees_equal(load_policy(out / "base", lora=LoraConfig(0)).norms, policy.norms)


def test_vllm_base_is_written_only_where_it_differs(tmp_path):
    """A run that quantized its base while loading is served on that, one that trained LoRA alone on the original."""
    base = make(tmp_path / "base")
    adapter = stored(trained(base, ALL, norms=False), tmp_path / "adapter", norms=False)
    (use,) = export(adapter, tmp_path / "plain", "vllm", str(base))
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["adapter"]
    assert use.startswith(f"vllm serve {base} --enable-lora")
    export(adapter, tmp_path / "quantized", "vllm", str(base), "nvfp4")
    quantize_checkpoint(base, tmp_path / "expected")
    ours, theirs = (st.open_checkpoint(folder) for folder in (tmp_path / "quantized/base", tmp_path / "expected"))
    assert set(ours) == set(theirs)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_peft_loads_as_it_is(tmp_path):
    """By the base that its config names, with the tokenizer beside it."""
    base = small.bf16(tmp_path / "base", shards=1)
    policy = trained(base, RANK_STABILIZED)
    export(stored(policy, tmp_path / "adapter"), tmp_path / "out", "peft", str(base))
    model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    np.testing.assert_allclose(np.asarray(logits_of(policy, TOKENS)), torch_qwen2.logits(model, TOKENS), atol=2e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("17 + 4")["input_ids"] == policy.tokenizer("17 + 4")["input_ids"]


def test_an_imported_adapter_and_its_export_are_one(tmp_path):
    """Dropout, alpha and A and B bit for bit, through the export as PEFT."""
    base = make(tmp_path / "base")
    policy = trained(base, RANK_STABILIZED)
    policy = policy.replace(lora_config=dataclasses.replace(RANK_STABILIZED, dropout=0.1))
    adapter = stored(policy, tmp_path / "adapter")
    export(adapter, tmp_path / "out", "peft", str(base))
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (adapter / name).read_bytes()
    assert fp32_policy(base, rank=1).config == policy.config
