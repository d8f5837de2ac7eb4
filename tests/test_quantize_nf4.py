"""NF4 on disk: written in the bytes of bitsandbytes, and read as transformers and unsloth leave it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import small
from helpers import assert_trees_equal, fp32_policy, logits_of
from oracles import llm_compressor, nf4_goldens

from qerl_jax import load_policy, quantize
from qerl_jax.checkpoint import layout_nf4
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.layout_nf4 import NF4
from qerl_jax.checkpoint.policy_tensors import dense_tensors
from qerl_jax.checkpoint.safetensors import CheckpointError, Tensors, open_checkpoint, open_files
from qerl_jax.config import Config
from qerl_jax.models.formats import Nf4, nf4
from qerl_jax.partition import bytes_on_device
from qerl_jax.run.abstract import abstract_run

GOLDEN = json.loads((nf4_goldens.GOLDEN / "golden.json").read_text())
DOUBLE = nf4_goldens.GOLDEN / "double-quantized"
Q = "model.layers.0.self_attn.q_proj"
STATE = f"{Q}.{layout_nf4.STATE}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "nf4"
    assert quantize.main(["tiny", str(out), "--format", "nf4"]) == 0
    return out


@pytest.fixture
def copied(tmp_path):
    """Copies a model and changes its tensors, or the keys of its quantization_config."""

    def copy(source: Path, change=None, **section: object) -> Path:
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        if change is not None:
            small.change_tensors(folder, change)
        stored = json.loads((folder / "config.json").read_text())["quantization_config"]
        small.change_json(folder / "config.json", quantization_config={**stored, **section})
        return folder

    return copy


def state(**keys: object):
    """Changes the JSON text of `Q`; None takes a key away."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        known = {**json.loads(tensors[STATE].tobytes()), **keys}
        text = json.dumps({key: value for key, value in known.items() if value is not None})
        tensors[STATE] = np.frombuffer(text.encode(), np.uint8)

    return change


def element(suffix: str, at: int, value: float):
    return lambda tensors: tensors[f"{Q}.{suffix}"].__setitem__(at, value)


def read(tensors: Tensors, module: str) -> Nf4:
    return NF4.read(tensors, module, (18, 960))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantized_bytes_equal_bitsandbytes_where_rounding_decides(dtype):
    """Codes and absmax of weights on, and one ulp beside, the boundaries between codes; of zeros and tiny values."""
    goldens, weight = open_files([nf4_goldens.GOLDEN / "stress.safetensors"]), nf4_goldens.weights()[dtype]
    ours = nf4.quantize(weight)
    np.testing.assert_array_equal(ours.codes.reshape(-1, 1), goldens[f"{dtype}.plain.weight"])
    np.testing.assert_array_equal(ours.absmax.reshape(-1), goldens[f"{dtype}.plain.weight.absmax"])
    assert layout_nf4.quant_state((18, 960), dtype).tobytes() == (
        goldens[f"{dtype}.plain.{layout_nf4.STATE}"].tobytes()
    )
    for module in ("plain", "double"):
        stored = read(goldens, f"{dtype}.{module}")
        np.testing.assert_array_equal(stored.codes, ours.codes)
    np.testing.assert_array_equal(stored.absmax.reshape(-1), goldens[f"{dtype}.dequantized_absmax"])


def test_a_checkpoint_has_the_bytes_that_transformers_saves(plain):
    """SHA-256 of every tensor of the bundled policy, quantized or copied, dtypes and config."""
    ours = open_checkpoint(plain)
    assert {name: llm_compressor.digest(array) for name, array in ours.items()} == GOLDEN["sha256"]
    theirs, module = open_checkpoint(DOUBLE), f"{Q}."
    for name in ours:
        if name.startswith(module) and not name.endswith((".absmax", ".bias")):  # 8 bits where double-quantized
            assert ours.entries[name].dtype == theirs.entries[name].dtype, name
    config = json.loads((plain / "config.json").read_text())
    assert config["quantization_config"] == GOLDEN["quantization_config"]
    assert config == {**json.loads((model_path("tiny") / "config.json").read_text()), **config}


def test_the_compute_dtype_is_that_of_the_projections(tmp_path):
    source = small.bf16(tmp_path / "source", 1, hidden_size=64, intermediate_size=128, head_dim=32)

    wide = "model.layers.1.mlp.up_proj.weight"

    def widen(tensors: dict) -> None:
        names = [name for name in tensors if "_proj." not in name or name == wide]
        tensors.update({name: tensors[name].astype(np.float32) for name in names})

    small.change_tensors(source, widen)
    assert quantize.main([str(source), str(tmp_path / "nf4"), "--format", "nf4"]) == 0
    section = json.loads((tmp_path / "nf4" / "config.json").read_text())["quantization_config"]
    assert section["bnb_4bit_compute_dtype"] == "bfloat16"
    written = open_checkpoint(tmp_path / "nf4")
    for name, dtype in ((wide, "float32"), (wide.replace("up", "gate"), "bfloat16")):  # of each one's own values
        assert json.loads(written[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())["dtype"] == dtype


def test_a_stored_model_is_the_one_quantized_while_loading(plain):
    """Weights bit for bit, as a dense checkpoint too, in a dry run and in the memory that it foresees."""
    loaded = fp32_policy(model_path("tiny"), weight_format="nf4")
    for weight_format in (None, "nf4"):
        assert_trees_equal(fp32_policy(plain, weight_format=weight_format).frozen, loaded.frozen)
    dense = dense_tensors(plain, dtype=np.float32)
    expected = dict(dense_tensors(model_path("tiny"), "nf4", dtype=np.float32))
    assert set(dense) == set(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(dense[name], values, err_msg=name)
    foreseen = abstract_run(Config(model=str(plain), dtype="float32"))[0].frozen
    assert bytes_on_device(foreseen) == bytes_on_device(loaded.frozen)


def test_logits_of_a_double_quantized_checkpoint_are_those_of_transformers():
    """Saved by transformers; there the weights are fp32, so that nothing is rounded to bf16."""
    with np.load(DOUBLE / "logits.npz") as file:
        golden = dict(file)
    policy = fp32_policy(DOUBLE, rank=0)
    logits = np.asarray(logits_of(policy, golden["tokens"]))
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=2e-5 * np.abs(golden["logits"]).max())
    assert isinstance(policy.frozen["layers"][0]["mlp"]["down_proj"]["weight"], Nf4)


def test_keys_that_change_nothing_are_read_over(copied, plain):
    """unsloth names skipped modules and another dtype; older configs have neither storage nor private keys."""
    expected = fp32_policy(plain).frozen
    other = {
        "llm_int8_skip_modules": ["lm_head"],
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "float16",
    }
    assert_trees_equal(fp32_policy(copied(plain, state(dtype="float16"), **other)).frozen, expected)
    folder = copied(plain)
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    small.change_json(folder / "config.json", quantization_config=section)
    assert_trees_equal(fp32_policy(folder).frozen, expected)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "quantization_config has bnb_4bit_quant_type 'fp4', NF4 has 'nf4'"),
        ({"load_in_8bit": True}, "quantization_config has load_in_8bit True, NF4 has False"),
    ],
)
def test_other_configs_of_bitsandbytes_are_refused(copied, plain, section, said):
    folder = copied(plain, **section)
    with pytest.raises(CheckpointError) as error:
        fp32_policy(folder)
    assert str(error.value) == f"{folder / 'config.json'}: {said}"


def fp4(tensors) -> None:
    tensors[STATE.replace("nf4", "fp4")] = tensors.pop(STATE)


def unquantized(tensors) -> None:
    for name in [name for name in tensors if name.startswith(f"{Q}.weight")]:
        del tensors[name]
    tensors[f"{Q}.weight"] = np.ones((128, 128), np.float32)


@pytest.mark.parametrize(
    ("source", "change", "said"),
    [
        ("plain", fp4, f"'{STATE.replace('nf4', 'fp4')}': '{Q}' is stored as 'fp4', supported is 'nf4'"),
        ("plain", state(quant_type="fp4"), f"'{STATE}' has quant_type 'fp4', expected is 'nf4'"),
        ("plain", state(blocksize=128), f"'{STATE}' has blocksize 128, expected is 64"),
        ("double", state(nested_blocksize=None), f"'{STATE}' has nested_blocksize None, expected is 256"),
        ("double", state(nested_offset="x"), f"'{STATE}' has nested_offset 'x', which must be a finite number"),
        ("plain", lambda t: t.pop(STATE), f"tensor '{STATE}' is missing from the checkpoint"),
        (
            "plain",
            element("weight.absmax", 5, np.nan),
            f"'{Q}.weight.absmax'[5] is nan, must lie between 0 and 3.39e+38",
        ),
        (
            "plain",
            element("weight.quant_map", 3, -0.4),
            f"'{Q}.weight.quant_map'[3] is -0.4000000059604645, NF4 has -0.39491748809814453",
        ),
        (
            "double",
            element("weight.nested_absmax", 0, np.inf),
            f"'{Q}.weight.absmax'[0] is -inf, must lie between -3.39e+38 and 3.39e+38",
        ),
        ("plain", unquantized, f"'{Q}' is not quantized (weight is float32), but config.json says NF4"),
    ],
)
def test_tensors_that_are_not_nf4_are_refused(copied, plain, source, change, said):
    """By the loader, and those that headers show by an export's check as well."""
    folder = copied(plain if source == "plain" else DOUBLE, change)
    with pytest.raises(CheckpointError) as error:
        fp32_policy(folder)
    assert said in str(error.value)
    assert str(folder / "model.safetensors") in str(error.value)
    if change in (fp4, unquantized):
        with pytest.raises(CheckpointError) as again:
            dense_tensors(folder)
        assert str(again.value) == str(error.value)


def test_what_contradicts_an_nf4_checkpoint(plain, copied, tmp_path, capsys):
    """Another weight_format, no quantization_config, a second quantization, input features that are no whole blocks."""
    for name in ("bf16", "nvfp4", "mxfp4"):
        with pytest.raises(ValueError, match=f"holds NF4 weights .*'{name}'"):
            load_policy(plain, name)
    folder = copied(plain)
    small.change_json(folder / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight\.absmax' quantizes .* no quantization_config"):
        fp32_policy(folder)
    narrow = small.bf16(tmp_path / "narrow", 1)
    for arguments, said in (
        ([str(plain), str(tmp_path / "out")], "quantized already (bitsandbytes)"),
        ([str(narrow), str(tmp_path / "out"), "--format", "nf4"], "NF4 needs input features divisible by 64, got"),
    ):
        assert quantize.main(arguments) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    section = json.loads((plain / "config.json").read_text())["quantization_config"]
    small.change_json(narrow / "config.json", quantization_config=section)
    for suffix in ("q_proj", "k_proj", "v_proj"):
        name = f"{Q.removesuffix('q_proj')}{suffix}.weight"
        small.change_tensors(narrow, lambda tensors, name=name: tensors.update({name: np.zeros((128, 1), np.uint8)}))
    with pytest.raises(CheckpointError, match=r"q_proj' has 16 input features, but NF4 needs whole blocks of 64"):
        fp32_policy(narrow)
