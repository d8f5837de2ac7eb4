"""Layers that are divided over devices: on two simulated ones, on two GPUs, and compiled for them."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import h200
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
from qerl_kernels.formats import Nvfp4

from qerl_jax import driver
from qerl_jax.checkpoint.hf_config import model_config
from qerl_jax.partition import AXIS, DIVISIONS, Division, bytes_on_device, joined, leave, parts_of, specs

HERE = Path(__file__).parent
RANDOM = HERE.parent / "data" / "tiny-random-qwen2-hf"
LOCAL = {"decode_chunk", "prefill_layer", "forward", "forward_and_keep", "backward"}
"""Programs that compute layers."""
REDUCED = {"add_squares", "stays_finite"}
"""Programs that make one number of a layer's adapters."""


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def find(request, tmp_path_factory):
    """What `divided.py` finds of cases, by their names."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    if request.param == "cpu":
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    elif len(driver.gpus()) < 2:
        pytest.skip(f"needs two GPUs, this machine has {len(driver.gpus())}")
    else:  # beside what this process has taken
        environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    model = small.bf16(tmp_path_factory.mktemp("divided") / "model", num_attention_heads=4, num_key_value_heads=2)

    def run(*cases: str) -> dict:
        command = [sys.executable, HERE / "divided.py", model, *cases]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return dict(item for line in ran.stdout.splitlines() for item in json.loads(line).items())

    return run


@pytest.fixture(scope="module")
def found(find):
    return find("slices", "completions", "update")


def test_each_device_holds_its_heads_and_features_byte_for_byte(found):
    tensors = ["qkv_proj/weight", "qkv_proj/bias", "o_proj/weight", "gate_up_proj/weight", "down_proj/weight"]
    assert (found["slices"]["tensors"], found["slices"]["wrong"]) == (tensors, [])


def test_rows_share_a_scale_only_where_those_of_all_devices_do(found):
    assert found["slices"]["uniform"] == [True, False]


def test_completions_are_those_of_one_device(found):
    case = found["completions"]
    assert case["sampled"] and case["distinct"] > 3
    assert case["logprobs"] < 1e-5 and case["token_logprobs"] < 1e-5


def test_an_update_is_that_of_one_device(found):
    case = found["update"]
    assert case["state"] < (2e-6 if case["on"] == "cpu" else 2e-5) < 1e-3 < case["moved"]
    assert case["metrics"] < 1e-4
    assert case["restored"] == 0 and case["devices"] == [2]  # so that a restored state lies where a step expects it


def test_devices_share_adapters_and_moments_as_estimated(found):
    case = found["update"]
    assert case["bytes"] == case["wanted_bytes"] < 0.75 * case["whole_bytes"]


def test_programs_bring_nothing_together_but_sums(found):
    """No program gathers weights, caches or activations."""
    collectives = found["update"]["collectives"]
    assert {name for name, kinds in collectives.items() if kinds == ["all-reduce"]} == LOCAL
    assert {name for name, kinds in collectives.items() if kinds} == LOCAL | REDUCED


def test_sums_over_rows_or_columns_are_whole_on_each_device():
    """Of optax's Adafactor, beside factors that are divided along axis 0 of A or axis 1 of B."""
    adapter = {"a": jnp.zeros((8, 2)), "b": jnp.zeros((2, 6))}
    state = optax.scale_by_factored_rms(min_dim_size_to_factor=2).init({"lora": {"o_proj": adapter}})
    assert {leaf.shape for leaf in jax.tree.leaves((state.v_row, state.v_col, state.v))} == {(8,), (6,), (2,), (1,)}
    assert not any(any(spec) for spec in jax.tree.leaves(specs(state)))
    wanted = {"o_proj": [(AXIS,), ()], "gate_up_proj": [(), (None, AXIS)]}
    assert all(
        [*map(tuple, specs({name: {"lora": adapter}})[name]["lora"].values())] == wanted[name] for name in wanted
    )


@pytest.mark.nightly
def test_a_run_trains_resumes_and_is_read_by_one_device(find):
    case = find("run")["run"]
    assert case["steps"] == [1, 2] and max(case["rewards"]) > 0
    assert case["restored"] == 0 < case["moved"]
    assert case["unforeseen"] == []
    assert case["weights"][0] == case["weights"][1]  # the dry run's


@pytest.mark.skipif(h200.missing() is not None, reason=str(h200.missing()))
@pytest.mark.parametrize("sums", ["peer_sum", "no room", "psum"])
def test_a_decode_step_on_two_gpus_sums_twice_a_layer(sums):
    """Within the loop, by a kernel or by XLA in fp32; a mailbox is never copied, since packets could come before that;
    no weight or cache is gathered, and all kernels of one GPU's layers run.
    """
    ran = h200.run(HERE.with_name("rollout") / "divided_for_h200.py", sums)
    case = json.loads(ran.stdout.splitlines()[-1])
    assert case["outside"] == {} and case["copies"] == []
    assert case["separate"] == 11 + (sums == "peer_sum")  # compiled by themselves
    if sums == "peer_sum":
        assert case["inside"] == {} and case["kernels"] == 2 * (10 + 2)
        return
    shapes = [shape for each in case["inside"].values() for shape in each]
    assert {name.removesuffix("-start") for name in case["inside"]} == {"all-reduce"}
    assert len(shapes) == 2 * 2 and all("f32[8,1024]" in shape and "bf16" not in shape for shape in shapes)
    assert case["kernels"] == 2 * 10


def test_sums_over_devices_are_in_fp32_rounded_once():
    """256 + 1 is 256 in bf16, of four devices 256 + 1 + 1 + 1 is 260."""
    parts = jnp.asarray([[256.0], [1.0], [1.0], [1.0]], jnp.bfloat16)
    found = jax.vmap(leave, axis_name=AXIS)(parts)
    assert found.dtype == jnp.bfloat16 and found.tolist() == [[260.0]] * 4


@pytest.mark.parametrize(
    ("count", "message"), [(4, "4 does not divide num_key_value_heads 2"), (0, "at least 1, got 0")]
)
def test_sizes_that_cannot_be_divided_are_refused(count, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(model_config(RANDOM), tensor_parallel=count)
    with pytest.raises(ValueError, match="2 does not divide intermediate_size 63"):
        dataclasses.replace(model_config(RANDOM), intermediate_size=63, tensor_parallel=2)


def test_blocks_that_cannot_be_divided_are_refused():
    weight = Nvfp4(np.zeros((8, 24), np.uint8), np.zeros((8, 3), np.uint8), np.ones(8, np.float32), True)
    with pytest.raises(ValueError, match="3 features, or blocks of them, cannot be divided by 2"):
        parts_of(weight, Division.INPUTS, (8,), 2)


@pytest.mark.parametrize("numpy", [np, jnp])
@pytest.mark.parametrize(
    ("division", "rows", "wanted"),
    [
        (Division.OUTPUTS, (12,), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        (Division.OUTPUTS, (6, 3, 3), [[0, 1, 6, 9], [2, 3, 7, 10], [4, 5, 8, 11]]),  # q, k and v of each device
        (Division.INPUTS, (12,), [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_the_parts_of_three_devices(division, rows, wanted, numpy):
    """Rows of a weight and its bias, of each part of a fused one; or columns, and the bias whole. Joined they are the
    parts one behind the other.
    """
    weight, bias = numpy.arange(12 * 6).reshape(12, 6), numpy.arange(12)
    parts = parts_of({"weight": weight, "bias": bias}, division, rows, 3)
    whole, axis = joined(parts, division), 0 if division is Division.OUTPUTS else 1
    for part, own in zip(parts, wanted, strict=True):
        assert isinstance(part["weight"], numpy.ndarray)  # of the host, on the host
        assert part["weight"].tolist() == np.take(weight, own, axis).tolist()
        assert part["bias"].tolist() == (own if axis == 0 else list(range(12)))
    behind = [place for own in wanted for place in own]
    assert whole["weight"].tolist() == np.take(weight, behind, axis).tolist()
    assert whole["bias"].tolist() == (behind if axis == 0 else list(range(12)))


def test_what_is_divided_and_what_is_whole():
    """Column-parallel projections along their outputs, row-parallel ones along their inputs, the factor of an adapter
    on that side. All else is whole, and counts so.
    """
    a, b = np.zeros((8, 2), np.float32), np.zeros((2, 16), np.float32)
    layer = {name: {"weight": np.zeros((16, 8), np.float32), "bias": np.zeros(16, np.float32)} for name in DIVISIONS}
    layer |= {"norm": {"weight": np.zeros(8, np.float32)}}
    adapters = {name: {"lora": {"q_proj": {"a": a, "b": b}}} for name in DIVISIONS}
    tree = {"layers": [layer], "lora": adapters, "embed_tokens": np.zeros((32, 8), np.float32)}
    found = {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(spec)
             for path, spec in jax.tree_util.tree_leaves_with_path(specs(tree))}  # fmt: skip
    divided = {}
    for name in ("qkv_proj", "gate_up_proj"):
        divided |= {f"layers/0/{name}/weight": (AXIS,), f"layers/0/{name}/bias": (AXIS,)}
        divided |= {f"lora/{name}/lora/q_proj/a": (), f"lora/{name}/lora/q_proj/b": (None, AXIS)}
    for name in ("o_proj", "down_proj"):
        divided |= {f"layers/0/{name}/weight": (None, AXIS), f"layers/0/{name}/bias": ()}
        divided |= {f"lora/{name}/lora/q_proj/a": (AXIS,), f"lora/{name}/lora/q_proj/b": ()}
    assert found == divided | {"layers/0/norm/weight": (), "embed_tokens": ()}
    whole = 4 * (4 * (128 + 16 + 16 + 32) + 8 + 256)
    assert bytes_on_device(tree) == whole
    shared = 4 * (4 * 128 + 2 * 16 + 2 * 32 + 2 * 16)  # all weights; two biases, two B, two A
    assert bytes_on_device(tree, 4) == whole - shared * 3 // 4
