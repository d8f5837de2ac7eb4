"""What keeps the kernels from running is named: on other GPUs, other versions, other weights."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qerl_kernels import dispatch
from qerl_kernels.decode_attention import api as attention
from qerl_kernels.formats import Mxfp4, PackedNvfp4
from qerl_kernels.gpu import H200, user_table
from qerl_kernels.nvfp4_matmul import tuning
from qerl_kernels.nvfp4_matmul.skinny.config import SkinnyConfig

from qerl_jax.checkpoint.reader import kernel_form


def device(capability: str, **more: int) -> types.SimpleNamespace:
    """A GPU of this compute capability as JAX describes it."""
    return types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind=f"GPU {capability}", **more)


@pytest.mark.parametrize(
    "capability, version, dtype, missing",
    [
        ("7.5", "0.11.2", jnp.bfloat16, "compute capability 8.0 or later (this is GPU 7.5, 7.5)"),
        ("8.0", "0.11.2", jnp.bfloat16, None),
        ("12.0", "0.12.0", jnp.bfloat16, None),
        ("9.0", "0.10.2", jnp.bfloat16, "jax 0.11 or later (this is 0.10.2)"),
        ("9.0", "0.11.2", jnp.float32, "bf16 activations (these are float32)"),
        ("9.0", "1.0.0", jnp.bfloat16, None),
    ],
)
def test_where_the_kernels_run(caplog, capability, version, dtype, missing):
    gpu = dispatch.facts(device(capability))
    assert dispatch.missing_for_mosaic_gpu(dtype, gpu, version) == missing
    dispatch.say_once.cache_clear()
    with dispatch.lowering_for(gpu):
        chosen = [dispatch.choose("nvfp4_matmul", None, missing) for _ in range(2)]
    assert chosen == ["xla" if missing else "mosaic_gpu"] * 2
    said = f"nvfp4_matmul: the XLA path runs, because Mosaic GPU needs {missing}"
    assert [record.message for record in caplog.records] == [said] * bool(missing)
    if missing:
        with pytest.raises(ValueError, match="implementation 'mosaic_gpu' needs"):
            dispatch.choose("nvfp4_matmul", "mosaic_gpu", missing)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what holds without a GPU")
def test_without_an_nvidia_gpu_xla_runs_and_nothing_is_said(caplog):
    """The facts are those of an H200, for which programs are compiled there."""
    missing = dispatch.missing_for_mosaic_gpu(jnp.bfloat16)
    assert missing == "an NVIDIA GPU (the default device is cpu)"
    dispatch.say_once.cache_clear()
    assert dispatch.choose("nvfp4_matmul", None, missing) == "xla" and not caplog.records
    assert dispatch.this_gpu() == H200 and dispatch.facts(device("gfx942")) is None


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "slots", "missing"),
    [
        (8, 1, 64, (8, 16), None),
        (16, 2, 128, (8, 8), None),
        (16, 1, 128, (8, 8), "at most 8 query heads a key/value head (these are 16 and 1)"),
        (8, 1, 96, (8, 8), "a head dim of 64 or 128 (this is 96)"),
        (8, 1, 64, (12, 8), "caches whose slots are a multiple of 8 (these are 12 and 8)"),
        (8, 1, 64, (8, 12), "caches whose slots are a multiple of 8 (these are 8 and 12)"),
        (8, 1, 64, (0, 8), "caches whose slots are a multiple of 8 (these are 0 and 8)"),
    ],
)
def test_which_decode_attention_the_kernel_computes(heads, kv_heads, width, slots, missing):
    shapes = (3, heads, width), (2, kv_heads, slots[0], width), (3, kv_heads, slots[1], width)
    assert attention._missing(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)) == missing


@pytest.mark.parametrize("span", [30, 31])
def test_mxfp4_of_a_wide_span_stays_as_it_is_and_is_said_once(caplog, span):
    exponents = np.full((64, 2), 100, np.uint8)
    exponents[5, 1] += span
    weight = Mxfp4(jnp.full((64, 32), 0x22, jnp.uint8), jnp.asarray(exponents))
    dispatch.say_once.cache_clear()
    with dispatch.lowering_for(H200):
        found = [kernel_form(weight, "auto", None) for _ in range(2)]
    if span == 30:
        assert all(isinstance(one, PackedNvfp4) for one in found) and not caplog.records
    else:
        assert all(one is weight for one in found)
        assert [record.message for record in caplog.records] == [
            "nvfp4_matmul: the XLA path runs, because Mosaic GPU needs the block exponents of a row to span at most 30 "
            "binades (they span 31)"
        ]


@pytest.mark.parametrize(
    ("capability", "sms", "smem_kib", "clusters", "tier"),
    [
        ("9.0", 132, 227, [132, 66, 39, 30, 7], "wgmma"),
        ("9.0", 114, 227, [114, 57, 33, 25, 0], "wgmma"),  # H100 PCIe: 14 of its SMs' GPCs may lack 16
        ("8.0", 108, 163, [108, 0, 0, 0, 0], "warp"),
        ("8.9", 128, 99, [128, 0, 0, 0, 0], "warp"),
        ("12.0", 170, 99, [170, 0, 0, 0, 0], "warp"),
        ("10.3", 148, 227, [148, 0, 0, 0, 0], "warp"),
    ],
)
def test_facts_of_a_gpu(capability, sms, smem_kib, clusters, tier):
    """As of JAX's device; shared memory by compute capability where that does not say."""
    known = device(capability, core_count=sms, shared_memory_per_block_optin=100 * 1024)
    assert dispatch.facts(known).smem_bytes == 100 * 1024
    gpu = dispatch.facts(device(capability, core_count=sms))
    assert (gpu.arch / 10, gpu.sms, gpu.smem_bytes, gpu.tier) == (float(capability), sms, smem_kib * 1024, tier)
    assert [gpu.resident_clusters(ctas) for ctas in (1, 2, 3, 4, 16)] == clusters
    assert gpu.has_tcgen05 == (capability == "10.3")


ROW = {"kernel": "skinny", "direction": "forward", "n": 3584, "k": 3584, "m": 8, "us": 9.5,
       "config": {"tile_m": 8, "m16_tiles": 1, "warps": 8, "cluster": 1, "stages": 2}}  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "fault"),
    [
        ({"meta": {"gpu": "GPU 8.9"}, "rows": [ROW]}, None),
        ("{", "no tuning table (JSONDecodeError"),
        ([], "no tuning table (TypeError"),
        ({"meta": {"gpu": "GPU 8.9"}, "rows": [ROW | {"m": "8"}]}, "no tuning table (TypeError"),
        ({"meta": {"gpu": "GPU 8.9"}, "rows": [ROW | {"kernel": "wide"}]}, "no tuning table (KeyError: 'wide')"),
        ({"meta": {"gpu": "GPU 8.9"}, "rows": {"row": ROW}}, "no tuning table (AttributeError"),
        ({"meta": {"gpu": "GPU 8.6"}, "rows": [ROW]}, "timed on GPU 8.6, this is GPU 8.9"),
        ({"meta": {"gpu": "GPU 8.9"}, "rows": [ROW | {"config": ROW["config"] | {"cluster": 2}}]}, "does not run"),
        ({"meta": {"gpu": "GPU 8.9"}, "rows": [ROW | {"config": ROW["config"] | {"stages": 99}}]}, "does not run"),
    ],
)  # fmt: skip
def test_a_gpu_takes_its_own_table_where_that_is_sound(monkeypatch, tmp_path, caplog, stored, fault):
    """Its rows come before those of the tier's; what is no table for this GPU is left out in one line."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    borrowed = tuning.config_for(8, 3584, 3584, gpu=dispatch.facts(device("8.9")))
    path = user_table("GPU 8.9")
    path.parent.mkdir(parents=True)
    path.write_text(stored if isinstance(stored, str) else json.dumps(stored))
    dispatch.say_once.cache_clear()
    gpus = [dispatch.facts(device("8.9")) for _ in range(2)]
    assert gpus[0].own_table == (None if fault else str(path))
    found = tuning.config_for(8, 3584, 3584, gpu=gpus[0])
    assert found == (borrowed if fault else SkinnyConfig(**ROW["config"])) and found != (
        borrowed if not fault else None
    )
    assert tuning.config_for(32, 3584, 3584, gpu=gpus[0]).tile_m == 32  # for more rows, the tier's table
    said = [record.message for record in caplog.records]
    assert len(said) == (1 if fault else 0) and all(f"{path}: left out, " in one and fault in one for one in said)


def test_the_users_table_comes_before_the_one_that_comes_with_the_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    theirs, path_of = tmp_path / "tuning_gpu-8-9.json", tuning.path_of
    monkeypatch.setattr(tuning, "path_of", lambda name: theirs if name == theirs.name else path_of(name))
    mine = user_table("GPU 8.9")
    mine.parent.mkdir(parents=True)
    for table in (theirs, mine):
        table.write_text(json.dumps({"meta": {"gpu": "GPU 8.9"}, "rows": [ROW]}))
        assert dispatch.facts(device("8.9")).own_table == str(table)
