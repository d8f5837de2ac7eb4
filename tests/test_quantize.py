"""The quantizer writes the names, dtypes, shapes, bytes and config of llm-compressor."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import small
from helpers import assert_trees_equal, fp32_policy
from oracles import llm_compressor, mxfp4_goldens, numpy_formats

from qerl_jax import LoraConfig, load_policy, quantize
from qerl_jax.checkpoint import hf_config
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.of_run import loaded_format
from qerl_jax.checkpoint.policy_tensors import dense_tensors
from qerl_jax.checkpoint.quantize import quantize_checkpoint
from qerl_jax.checkpoint.safetensors import DTYPES, CheckpointError, open_checkpoint, open_files, save

DATA = Path(__file__).parent / "data"
SOURCE = DATA / "tiny-random-qwen2-hf"
GOLDEN = json.loads((llm_compressor.GOLDEN / "golden.json").read_text())


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "nvfp4"
    assert quantize.main([str(SOURCE), str(out)]) == 0
    return out


@pytest.mark.parametrize("model", llm_compressor.SOURCES)
def test_bytes_equal_llm_compressor(model, quantized, tmp_path):
    """SHA-256 of every quantized tensor; all others are copied."""
    source, expected = llm_compressor.SOURCES[model], GOLDEN["sha256"][model]
    if source != SOURCE:
        quantize_checkpoint(source, tmp_path / "nvfp4")
    ours = open_checkpoint(quantized if source == SOURCE else tmp_path / "nvfp4")
    assert {name: llm_compressor.digest(ours[name]) for name in ours if "_proj.weight" in name} == expected
    copied = {name: array for name, array in open_checkpoint(source).items() if "_proj.weight" not in name}
    assert set(ours) == {*expected, *copied}
    for name, array in copied.items():
        assert ours.entries[name].dtype == array.dtype, name
        np.testing.assert_array_equal(ours[name].view(np.uint8), array.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("dtype", llm_compressor.STRESS)
def test_bytes_equal_llm_compressor_where_rounding_decides(dtype, tmp_path):
    """Ties, blocks of zeros, of -0 and of values below any block scale, and a weight too small for a global scale."""
    quantize_checkpoint(llm_compressor.stress_checkpoint(tmp_path / "source", dtype), tmp_path / "nvfp4")
    ours = open_checkpoint(tmp_path / "nvfp4")
    theirs = open_files([llm_compressor.GOLDEN / f"stress-{dtype}.safetensors"])
    assert {name for name in ours if "_proj.weight" in name} == set(theirs)
    for name in theirs:
        assert ours.entries[name][1:3] == theirs.entries[name][1:3], name
        np.testing.assert_array_equal(ours[name].view(np.uint8), theirs[name].view(np.uint8), err_msg=name)


def test_shards_index_and_config(quantized):
    assert sorted(p.name for p in quantized.glob("*.safetensors")) == sorted(
        p.name for p in SOURCE.glob("*.safetensors")
    )
    index = json.loads((quantized / "model.safetensors.index.json").read_text())
    ours = open_checkpoint(quantized)
    assert index["weight_map"] == {name: ours.file_of(name).name for name in ours}
    assert index["metadata"]["total_size"] == sum(ours[name].nbytes for name in ours)
    config = json.loads((quantized / "config.json").read_text())
    assert config["quantization_config"] == GOLDEN["quantization_config"]
    assert hf_config.stored_quantization(quantized).layout.name == "compressed-tensors"
    assert (quantized / "generation_config.json").read_bytes() == (SOURCE / "generation_config.json").read_bytes()


def test_a_single_shard_of_another_name_has_an_index(tmp_path):
    source, name = small.bf16(tmp_path / "source", shards=1), "model-00001-of-00001.safetensors"
    (source / "model.safetensors").rename(source / name)
    entries = open_files([source / name])
    small.write_json(source / "model.safetensors.index.json", {"weight_map": dict.fromkeys(entries, name)})
    quantize_checkpoint(source, tmp_path / "nvfp4")
    ours = open_checkpoint(tmp_path / "nvfp4")
    assert {ours.file_of(tensor).name for tensor in ours} == {name} and len(ours) > len(entries)


def test_refusals_leave_nothing_behind(quantized, tmp_path, capsys):
    out = tmp_path / "out"
    assert quantize.main([str(quantized), str(out)]) == 2
    assert "quantized already (compressed-tensors)" in capsys.readouterr().err
    assert quantize.main([str(tmp_path / "none"), str(out)]) == 2
    assert quantize.main([str(SOURCE), str(quantized)]) == 2
    assert "already exists" in capsys.readouterr().err
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in SOURCE.glob("*.json"):
        (broken / file.name).write_bytes(file.read_bytes())
    for file in SOURCE.glob("*.safetensors"):
        tensors = {name: np.array(array) for name, array in open_files([file]).items()}
        if "model.layers.1.mlp.down_proj.weight" in tensors:
            tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = np.nan
        save(broken / file.name, tensors)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight.*rows 0 to .* not finite"):
        quantize_checkpoint(broken, out)
    other = small.bf16(tmp_path / "other", shards=1)
    gate, spare = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.router.weight"
    for change, words in (
        (lambda all_: all_.update({spare: all_[gate]}), f"1 tensors have no place in the model, first '{spare}'"),
        (lambda all_: (all_.pop(spare), all_.pop(gate)), f"tensor '{gate}' is missing from the checkpoint"),
    ):
        small.change_tensors(other, change)
        with pytest.raises(CheckpointError, match=re.escape(words)):
            quantize_checkpoint(other, out)
    assert {p.name for p in tmp_path.iterdir()} == {"broken", "other"}


def test_overwrite_replaces_no_source_and_nothing_but_a_model(tmp_path, capsys):
    models = tmp_path / "models"
    source = small.bf16(models / "bf16", shards=2)
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "config.json").write_text("{}")
    linked = tmp_path / "linked"  # a source whose files lie elsewhere, as the hub's cache has them
    linked.mkdir()
    for file in source.iterdir():
        (linked / file.name).symlink_to(file)
    adapter = tmp_path / "adapter"
    export_adapter(load_policy(source, lora=LoraConfig(rank=4)), adapter)
    used = small.bf16(tmp_path / "used", shards=1)
    (used / "runs").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for src, dst, said in (
        (source, source, "is or holds the source"),
        (source, models / "other" / ".." / "bf16", "is or holds the source"),
        (source, models, "is or holds the source"),
        (linked, source, "is or holds the source"),
        (source, notes, "is no model directory"),
        (source, adapter, "is no model directory"),
        (source, notes / "config.json", "is no model directory"),
        (source, used, "also holds the directory 'runs'"),
        (source, notes / "config.json" / "out", "the directory of the output"),
    ):
        (models / "other").mkdir(exist_ok=True)
        assert quantize.main([str(src), str(dst), "--overwrite"]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    quantize_checkpoint(source, tmp_path / "out")
    kept = {path.name for path in source.iterdir()}
    for others in ("m.gguf", "tf_model.h5", "flax_model.msgpack", "m.onnx", "pytorch_model.bin.index.json"):
        (source / others).touch()
    assert quantize.main([str(source), str(tmp_path / "out"), "--overwrite"]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == kept  # no stale weights
    written, command = capsys.readouterr().out.splitlines()[-2:]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 2 and (size := sum(file.stat().st_size for file in files) / 1e9)
    assert written == f"wrote {tmp_path}/out: nvfp4, {size:.3g} GB; train it with"
    assert f"--model {tmp_path}/out --dataset" in command


@pytest.fixture(scope="module")
def mxfp4_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "mxfp4"
    assert quantize.main([str(SOURCE), str(out), "--format", "mxfp4"]) == 0
    return out


def test_mxfp4_is_written_as_compressed_tensors_stores_it(mxfp4_dir):
    """Names, dtypes, config; bytes by the slow quantizer, which the library's goldens confirm; the rest is copied."""
    ours, source = open_checkpoint(mxfp4_dir), open_checkpoint(SOURCE)
    weights = {name.removesuffix(".weight") for name in source if name.endswith("_proj.weight")}
    expected = {f"{module}.{suffix}" for module in weights for suffix in ("weight_packed", "weight_scale")}
    assert set(ours) == expected | {name for name in source if not name.endswith("_proj.weight")}
    goldens = open_files([mxfp4_goldens.GOLDEN])
    for module in sorted(weights)[:4]:
        for suffix in ("weight_packed", "weight_scale"):
            assert ours.entries[f"{module}.{suffix}"].dtype == goldens.entries[f"bfloat16.{suffix}"].dtype
        codes, exponents = numpy_formats.quantize_mxfp4(np.asarray(source[f"{module}.weight"]))
        np.testing.assert_array_equal(numpy_formats.nibbles(ours[f"{module}.weight_packed"]), codes)
        np.testing.assert_array_equal(ours[f"{module}.weight_scale"], exponents)
    for name in set(source) & set(ours):
        np.testing.assert_array_equal(ours[name].view(np.uint8), source[name].view(np.uint8), err_msg=name)
    config = json.loads((mxfp4_dir / "config.json").read_text())
    assert config["quantization_config"] == json.loads(mxfp4_goldens.CONFIG.read_text())


def test_a_stored_mxfp4_model_is_the_one_quantized_while_loading(mxfp4_dir, tmp_path):
    """Weights bit for bit; as a dense checkpoint too; scales may be stored as E8M0."""
    loaded = fp32_policy(SOURCE, weight_format="mxfp4")
    for weight_format in (None, "mxfp4"):
        assert_trees_equal(fp32_policy(mxfp4_dir, weight_format=weight_format).frozen, loaded.frozen)
    dense = dense_tensors(mxfp4_dir, dtype=np.float32)
    for name, values in dense_tensors(SOURCE, "mxfp4", dtype=np.float32).items():
        np.testing.assert_array_equal(dense[name], values, err_msg=name)
    tensors = {name: np.array(array) for name, array in open_checkpoint(mxfp4_dir).items()}
    shutil.copytree(mxfp4_dir, tmp_path / "e8m0", ignore=shutil.ignore_patterns("*.safetensors*"))
    scales = {name: array.view(DTYPES["F8_E8M0"]) for name, array in tensors.items() if name.endswith("_scale")}
    save(tmp_path / "e8m0" / "model.safetensors", {**tensors, **scales})
    assert_trees_equal(fp32_policy(tmp_path / "e8m0").frozen, loaded.frozen)


def test_what_contradicts_an_mxfp4_checkpoint(mxfp4_dir, tmp_path, capsys):
    """Another weight_format, a scale that is no number, a second quantization, a format that cannot be written; and a
    run's dry run takes the stored one.
    """
    for name in ("bf16", "nvfp4", "nf4"):
        with pytest.raises(ValueError, match=f"holds MXFP4 weights .*'{name}'"):
            load_policy(mxfp4_dir, name)
    tensors = {name: np.array(array) for name, array in open_checkpoint(mxfp4_dir).items()}
    module = "model.layers.1.mlp.up_proj"
    shutil.copytree(mxfp4_dir, tmp_path / "nan", ignore=shutil.ignore_patterns("*.safetensors*"))
    scales = tensors[f"{module}.weight_scale"].copy()
    scales[3, 1] = 255
    save(tmp_path / "nan" / "model.safetensors", {**tensors, f"{module}.weight_scale": scales})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_scale'\[3, 1\] is 255"):
        fp32_policy(tmp_path / "nan")
    out = str(tmp_path / "out")
    for arguments, said in (
        ([str(mxfp4_dir), out], "quantized already (compressed-tensors, MXFP4)"),
        ([str(SOURCE), out, "--format", "int4"], "format 'int4' is not one of ['nvfp4', 'mxfp4', 'nf4']"),
    ):
        assert quantize.main(arguments) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert loaded_format(mxfp4_dir, None) == "mxfp4"
