"""Files mapped by us against the safetensors library with torch, and files and indices that are wrong."""

import json
import re
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch

from qerl_jax.checkpoint import safetensors as st
from qerl_jax.checkpoint.safetensors import CheckpointError

TORCH_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8,
    "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def torch_tensors() -> dict[str, torch.Tensor]:
    """One tensor of each dtype with random bytes in it, odd sizes so that the ones behind are misaligned, and a scalar
    and an empty one.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for i, (name, dtype) in enumerate(sorted(TORCH_DTYPES.items())):
        size = torch.empty((), dtype=dtype).element_size()
        raw = torch.randint(
            0, 2 if name == "BOOL" else 256, (3, (5 + 2 * i) * size), dtype=torch.uint8, generator=generator
        )
        tensors[f"t.{name}"] = raw.view(dtype)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty((0, 7), dtype=torch.bfloat16)
    return tensors


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("st") / "model.safetensors"
    safetensors.torch.save_file(torch_tensors(), path, metadata={"format": "pt"})
    return path


def test_every_dtype_reads_as_the_library_wrote_it(file):
    tensors, expected = st.open_files([file]), torch_tensors()
    assert set(TORCH_DTYPES) == set(st.DTYPES)
    assert set(tensors) == set(expected) and len(tensors) == len(expected)
    for name, tensor in expected.items():
        array = tensors[name]
        assert array.shape == tuple(tensor.shape) and array.tobytes() == raw_bytes(tensor), name
        assert tensors.entries[name][1:3] == (array.dtype, array.shape)
        assert tensors.file_of(name) == file
    np.testing.assert_array_equal(tensors["t.BF16"].astype(np.float32), expected["t.BF16"].float().numpy())
    np.testing.assert_array_equal(tensors["t.F8_E4M3"].astype(np.float32), expected["t.F8_E4M3"].float().numpy())


def test_arrays_are_mapped_and_read_only(file):
    array = st.open_files([file])["t.F32"]
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    base = array
    while not isinstance(base, np.memmap):
        base = base.base
    assert Path(base.filename) == file


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_opening_a_large_file_reads_nothing(tmp_path):
    path, size = tmp_path / "large.safetensors", 400_000_000
    header = json.dumps({"w": {"dtype": "U8", "shape": [1000, size // 1000], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # a sparse file: takes no room on the disk
    before = _resident()
    array = st.open_files([path])["w"]
    assert array.shape == (1000, size // 1000) and array[999, 5] == 0
    assert _resident() - before < size // 10


def test_written_bytes_are_those_that_torch_writes(tmp_path, file):
    tensors = st.open_files([file])
    st.save(tmp_path / "ours.safetensors", {name: tensors[name] for name in reversed(list(tensors))})
    assert (tmp_path / "ours.safetensors").read_bytes() == file.read_bytes()
    (tmp_path / "another").touch()
    assert (tmp_path / "ours.safetensors").stat().st_mode == (tmp_path / "another").stat().st_mode


def test_a_column_of_a_matrix_is_written_in_order(tmp_path):
    st.save(tmp_path / "x.safetensors", {"w": np.arange(6, dtype=np.float32).reshape(2, 3).T, "s": np.float32(2.5)})
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert loaded["w"].tolist() == [[0, 3], [1, 4], [2, 5]] and loaded["s"].shape == () and loaded["s"] == 2.5


def _write(path: Path, header: bytes | dict, data: bytes = b"", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"w": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


BROKEN = {
    "header longer than the file": (b"{}", b"", 10**6, "header"),
    "data cut short": (entry(), b"1234", None, "not fully covered"),
    "bytes that belong to no tensor": (entry(), b"12345678" + b"x", None, "not fully covered"),
    "another tensor's bytes": ({**entry(), "v": entry()["w"]}, b"12345678", None, "invalid offset"),
    "a hole": ({**entry(), "v": entry(offsets=(12, 20))["w"]}, bytes(20), None, "invalid offset for tensor `v`"),
    "unknown dtype": (entry("F4", shape=(16,)), b"12345678", None, "'w' has dtype F4"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_named_with_what_is_wrong(tmp_path, case):
    """Positions in the file are sums of sizes, which holds because the library refuses holes and overlaps."""
    header, data, length, message = BROKEN[case]
    path = tmp_path / "bad.safetensors"
    _write(path, header, data, length)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        st.open_files([path])
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_tensor_in_two_files(tmp_path):
    for name in ("a", "b"):
        st.save(tmp_path / f"{name}.safetensors", {"w": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"'w' stands in both .*a\.safetensors and .*b\.safetensors"):
        st.open_files([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


def _sharded(folder: Path, weight_map: dict | None = None) -> Path:
    for shard, names in (("one.safetensors", "ab"), ("two.safetensors", "c")):
        st.save(folder / shard, {name: np.full(2, ord(name), ml_dtypes.bfloat16) for name in names})
    default = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / st.INDEX_FILE).write_text(json.dumps({"weight_map": default if weight_map is None else weight_map}))
    return folder


def test_shards_by_index(tmp_path):
    tensors = st.open_checkpoint(_sharded(tmp_path))
    assert sorted(tensors) == ["a", "b", "c"]
    assert tensors["c"].astype(np.float32).tolist() == [99.0, 99.0]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "two.safetensors"}, "puts 'b' into two.safetensors, found in one.safetensors"),
        (
            {"model.layers.0.self_attn.rotary_emb.inv_freq": "one.safetensors", "a": "two.safetensors"},
            "puts 'a' into two.safetensors, found in one.safetensors",  # behind one that may be absent
        ),
        ({"a": "one.safetensors", "z": "one.safetensors"}, "puts 'z' into one.safetensors, found in no shard"),
        ({"a": "one.safetensors", "c": "gone.safetensors"}, "['gone.safetensors'] are missing"),
        ({"a": 3}, "weight_map must map"),
        ({}, "weight_map must map tensor names to file names, got {}"),
        ([], "weight_map must map"),
    ],
)
def test_index_errors(tmp_path, weight_map, message):
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        st.open_checkpoint(_sharded(tmp_path, weight_map))
    assert st.INDEX_FILE in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', "\x00"])
def test_index_that_is_none(tmp_path, text):
    _sharded(tmp_path)
    (tmp_path / st.INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(st.INDEX_FILE)):
        st.open_checkpoint(tmp_path)


def test_a_single_file_counts_before_an_index_as_in_transformers(tmp_path):
    st.save(tmp_path / "model.safetensors", {"a": np.ones(2, np.float32)})
    st.save(tmp_path / "shard.safetensors", {"a": np.zeros(2, np.float32)})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "shard.safetensors"}}')
    tensors = st.open_checkpoint(tmp_path)
    assert tensors["a"].tolist() == [1, 1] and tensors.file_of("a").name == "model.safetensors"


def test_no_weights_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match=st.SINGLE_FILE):
        st.open_checkpoint(tmp_path)


def test_the_real_index_of_the_32b(data):
    """771 tensors in 17 shards: 64 layers of 12, embedding, head and norm."""
    weight_map = st.read_index(data / "qwen2.5_configs/Qwen2.5-32B-Instruct" / st.INDEX_FILE)
    assert len(weight_map) == 64 * 12 + 3 and len(set(weight_map.values())) == 17
