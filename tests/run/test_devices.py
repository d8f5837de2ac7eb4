"""Determinism is asked for before a device starts, or refused."""

import dataclasses
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from qerl_kernels import dispatch
from qerl_kernels.gpu import Gpu, gpu_of

from qerl_jax import driver, train
from qerl_jax.evaluate import main as evaluate
from qerl_jax.run.devices import (
    DETERMINISTIC_FLAGS,
    KERNELS_SLOWER_WITH_JAX,
    MEMORY,
    _tier_note,
    device_bytes,
    kernels_note,
    make_deterministic,
    usable_bytes,
    use_device_memory,
)

PROGRAM = """
import os
os.environ["XLA_FLAGS"] = "--xla_cpu_enable_fast_math=false"
from qerl_kernels.gpu import H200
from qerl_jax.config import Config
from qerl_jax.run.devices import make_deterministic
from qerl_jax.run.memory import evaluation_fits, run_fits
config = Config("tiny", weight_format="nvfp4", eval_dataset="arithmetic")
print(*(fits(config, memory, 1, 2, H200) for fits in (run_fits, evaluation_fits) for memory in (1e6, 1e10)))
make_deterministic()
make_deterministic()
print(os.environ["XLA_FLAGS"])
import jax
print(jax.jit(lambda x: x + 1)(1))
"""


def test_flags_are_added_once_and_xla_knows_them():
    """A memory estimate for a GPU that is named starts no device before."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    fits, flags, result = run.stdout.splitlines()
    assert fits == "False True False True"
    assert flags.split() == ["--xla_cpu_enable_fast_math=false", *DETERMINISTIC_FLAGS] and result == "2"


@pytest.mark.parametrize(
    ("version", "capability", "kernel", "python", "words"),
    [
        ("0.10.2", "9.0", "auto", "3.11.9", ["jax 0.11 or later (this is 0.10.2)", "Python 3.12", ">=0.11,<0.12'"]),
        ("0.10.2", "9.0", "auto", "3.12.1", ["pip install -U 'jax[cuda13]>=0.11,<0.12'"]),
        ("0.10.2", "9.0", "xla", "3.11.9", None),
        ("0.11.0", "9.0", "xla", "3.12.1", None),
        ("0.10.2", "8.0", "auto", "3.11.9", ["jax 0.11 or later"]),
        ("0.10.2", "7.5", "auto", "3.11.9", None),
    ],
)
def test_a_gpu_with_an_older_jax_is_told_what_to_install(version, capability, kernel, python, words):
    device = SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="NVIDIA H100")
    note = kernels_note(kernel, device, version, python)
    if words is None:
        assert note is None
        return
    assert all(word in note for word in ["NVIDIA H100", *words]) and "\n" not in note
    assert ("Python 3.12" in note) == python.startswith("3.11")


def test_a_gpu_is_told_its_kernels_and_whose_configs_they_have():
    """Those of `tune` once it has left a table."""

    def note(capability, sms):
        device = SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="GPU A", core_count=sms)
        return kernels_note("auto", device, "0.11.2")

    assert note("9.0", 132).startswith("GPU A (compute capability 9.0): 4-bit kernels for prefill, decode and update")
    assert note("9.0", 132).endswith("configs timed on an H200")
    assert "never measured here" in note("9.0", 114)
    assert "prefill, decode of up to 128 sequences and the update's forward pass" in note("10.3", 148)
    ada = note("8.9", 132)  # as many SMs as an H200
    assert "update by dequantization" in ada and ada.endswith("python -m qerl_jax.tune MODEL times them")
    tuned = dataclasses.replace(gpu_of("GPU A", 89, 128), own_table="table.json")
    assert _tier_note(tuned).endswith("; configs of table.json")


@pytest.mark.parametrize(
    ("version", "capability", "is_told"),
    [("0.11.2", "9.0", False), ("0.12.0.1", "9.0", True), ("0.12.0", "8.9", False)],
)
def test_a_hopper_is_told_which_jax_makes_its_kernels_slower(version, capability, is_told):
    device = SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="GPU A", core_count=132)
    note = kernels_note("auto", device, version)
    assert note.endswith(f"; slower with jax {version}: pip install -U 'jax[cuda13]>=0.11,<0.12'") == is_told


def test_the_packages_for_a_gpu_stop_before_the_jax_that_makes_kernels_slower():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["cuda13"] == [f"jax[cuda13]<{'.'.join(map(str, KERNELS_SLOWER_WITH_JAX))}"]


def test_a_cpu_is_told_nothing():
    assert kernels_note("auto") is None


def test_too_late_is_an_error(tmp_path, capsys):
    jax.devices()
    with pytest.raises(ValueError, match="JAX has started its devices already"):
        make_deterministic({})
    flags = ["--dataset", "arithmetic", "--deterministic", "--max-completion-length", "8", "--max-prompt-length", "96"]
    for main, own in ((train.main, ["--model", "tiny", "--output-dir", str(tmp_path)]), (evaluate, ["tiny"])):
        assert main([*own, *flags]) == 2
        assert "JAX has started its devices already" in capsys.readouterr().err
    make_deterministic({"XLA_FLAGS": " ".join(DETERMINISTIC_FLAGS)})


OLD_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {MEMORY: "0.94"}), ({MEMORY: "0.5"}, {MEMORY: "0.5"}), ({OLD_NAME: "0.3"}, {OLD_NAME: "0.3"})],
)
def test_jax_takes_most_of_the_memory_unless_told(before, after):
    """What a program estimates with. JAX itself, without a word, takes three quarters."""
    use_device_memory(environment=before)
    assert before == after and usable_bytes(1000, before) == 1000 * float(*after.values())
    assert usable_bytes(1000, {}) == 750


def test_jax_leaves_vllm_its_share():
    use_device_memory(0.4, environment := {})
    assert environment == {MEMORY: "0.54"}


@pytest.mark.parametrize(
    ("program", "share"), [("train", "0.54"), pytest.param("evaluate", "0.09", marks=pytest.mark.nightly)]
)
def test_the_programs_ask_before_a_device_starts(program, share):
    """With a reader of the environment in the place of what starts the device, less what vLLM takes."""
    flags = {"train": ["--model", "nowhere", "--rollout-backend", "vllm"]}
    flags |= {"evaluate": ["nowhere", "--dataset", "arithmetic", "--backend", "vllm"]}
    code = f"""
import os, sys
import qerl_jax.{program}, jax
program = sys.modules["qerl_jax.{program}"]
from qerl_jax.run import devices, prepare
def started(*_):
    raise ValueError(os.environ["{MEMORY}"])
program.check_vllm = prepare.check = jax.devices = jax.local_devices = started
sys.argv[1:] = {flags[program]}
sys.exit(program.main())
"""
    environment = {name: value for name, value in os.environ.items() if "MEM_FRACTION" not in name}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert run.stderr.strip().endswith(f"error: {share}"), run.stderr


@pytest.mark.parametrize(
    ("plugins", "platforms", "uses"),
    [
        (["xla_cuda13"], None, True), (["xla_cuda13"], "cpu,cuda", True), (["xla_cuda13"], "gpu", True),
        (["xla_cuda13"], "cpu", False), (["tpu"], None, False),
    ],
)  # fmt: skip
def test_gpus_are_those_that_jax_would_start(plugins, platforms, uses):
    assert driver._uses_cuda(plugins, platforms) is uses


def test_each_gpu_is_described_by_its_own_attributes():
    """CUDA's attributes 75 and 76, 16, 97: compute capability, SMs, bytes of shared memory that a block may ask for."""
    own = {10: {75: 9, 76: 0, 16: 132, 97: 232448}, 11: {75: 8, 76: 9, 16: 128, 97: 101376}}

    class Driver:
        """Devices have handles 10 and 11; each function writes through the pointer that it is given."""

        def cuInit(self, flags):
            return flags

        def cuDeviceGetCount(self, count):
            count._obj.value = 2
            return 0

        def cuDeviceGet(self, device, ordinal):
            device._obj.value = 10 + ordinal
            return 0

        def cuDeviceTotalMem_v2(self, memory, device):
            memory._obj.value = {10: 150_000_000_000, 11: 25_000_000_000}[device.value]
            return 0

        def cuDeviceGetName(self, name, size, device):
            name.value = {10: b"NVIDIA X", 11: b"NVIDIA RTX"}[device.value]
            return 0 if size == 256 else 1

        def cuDeviceGetAttribute(self, value, number, device):
            value._obj.value = own[device.value][number]
            return 0

    first = driver.Described(Gpu("NVIDIA X", 90, 132, 232448), 150_000_000_000)
    second = driver.Described(Gpu("NVIDIA RTX", 89, 128, 101376), 25_000_000_000)
    assert driver.described(Driver()) == [first, second]


@pytest.mark.gpu
def test_the_driver_describes_the_gpus_that_jax_starts():
    """Facts, number and the memory that a run may use."""
    described, device = driver.gpus(), jax.local_devices()[0]
    assert len(described) == jax.local_device_count()
    assert described[0].gpu == dataclasses.replace(dispatch.facts(device), own_table=None)
    environment = {name: os.environ[name] for name in os.environ if name.endswith("MEM_FRACTION")}
    assert usable_bytes(described[0].bytes, environment) == pytest.approx(device_bytes(), rel=0.01)
