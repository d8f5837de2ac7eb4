"""What every test shares: the CPU, strict annotations, and the data as files.

jaxtyping's import hook checks the shape annotations of `qerl_jax` with beartype while the tests run; it must be
installed before anything of `qerl_jax` is imported, so nothing above it imports the package.
"""

import gc
import importlib
import importlib.metadata
import lzma
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path

gc.disable()  # until pytest_collection_finish

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # PyTorch's other threads wait in loops, on the other worker's core
# Workers share a GPU: each takes its part when it starts; a fifth is for their contexts and libraries.
if (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", f"{0.8 / workers:.3f}")
# Compiling is most of the tests' time, and half of that are LLVM's optimizations and XLA's emitters through MLIR, which
# alter results by rounding alone. Both cores are busy, so a program is not split among threads either. XLA of jax 0.11
# and later, with which tests compile for a GPU, ends at the first flag.
QUICK_COMPILES = os.environ["JAX_PLATFORMS"] == "cpu" and importlib.metadata.version("jaxlib").startswith("0.10.")
if QUICK_COMPILES:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    flags = os.environ.get("XLA_FLAGS", "")  # workers of xdist have it
    if "xla_cpu_use_fusion_emitters" not in flags:
        os.environ["XLA_FLAGS"] = (
            f"{flags} --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        )
# What one test, worker or subprocess of a session compiles, the others load.
_OWN_CACHE = None if "JAX_COMPILATION_CACHE_DIR" in os.environ else tempfile.mkdtemp(prefix="qerl-jax-tests-")
if _OWN_CACHE is not None:  # workers of xdist inherit it
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _OWN_CACHE
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # storing one costs 2 ms, compiling it 25

import typecheck

typecheck.install()

import jax
import pytest

# Of every version of jax; mutate.py has imported JAX already.
jax.config.update("jax_disable_most_optimizations", os.environ["JAX_PLATFORMS"] == "cpu")
if QUICK_COMPILES:
    import shared_context

    shared_context.install()

DATA = Path(__file__).parent / "data"
TOOLS = Path(__file__).parent.parent / "tools"
sys.path.append(str(TOOLS))  # for `tool`; tests that compile for an H200 import `h200`

MOST_MAPPINGS = 20_000

# Files of twenty CPU seconds or more.
LONGEST = {
    *("test_bad_runs.py", "test_compare.py", "test_docs.py", "test_evaluate.py", "test_export_page.py"),
    *("test_fuzz.py", "test_kills.py", "test_launch.py", "test_learning.py"),
    *("test_parallel.py", "test_programs.py", "test_research.py", "test_shared_update.py"),
    *("test_tensor_parallel.py", "test_three_steps.py", "test_train.py", "test_vllm_commands.py"),
    *("test_update.py", "test_step.py", "test_engine.py", "test_first_rollout.py"),
    *("test_batch_invariant.py", "test_vllm_engine.py", "test_memory.py"),
}

# Third-party warnings only, each for one message of one library; everything else is an error (pyproject).
IGNORED_WARNINGS: tuple[str, ...] = (
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # peft 0.21 asks transformers 5 by the old name
)


def pytest_configure(config: pytest.Config) -> None:
    for line in IGNORED_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole runs first: a worker that began one last would leave the others idle. (A worker runs whole files,
    so that fixtures are made, and functions traced, once.)
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """What is imported and collected lives as long as the process, so the garbage collector need not look at it, before
    or after; nor need it look as often as by default, with what JAX allocates while it traces.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_unconfigure() -> None:
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def few_mappings() -> Iterator[None]:
    """Frees the programs of a worker before their mapped memory reaches Linux's limit (vm.max_map_count, 65530), beyond
    which XLA ends in a segmentation fault.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def kept_programs_forgotten() -> Iterator[None]:
    """For a module that traces programs while they are kept lowered: JAX forgets them behind it. It would call them in
    later modules, where their results are committed to a device although no argument is (`call_exported`).
    """
    yield
    jax.clear_caches()


@pytest.fixture
def nothing_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled while a run's input is read, for tests of many runs that are refused or stopped there. A run
    that goes on compiles each program at its first call.
    """
    from qerl_jax.programs import Ahead

    monkeypatch.setattr(Ahead, "submit", lambda *_: None)


@pytest.fixture(scope="module")
def nothing_drawn() -> Iterator[None]:
    """No run draws its plots when it ends, which takes 0.8 s."""
    from qerl_jax.run import recorder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "write_plots", lambda *_: [])
        yield


@pytest.fixture
def tool() -> Callable[[str], types.ModuleType]:
    """Imports a program of `tools`."""
    return importlib.import_module


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `tests/data` with the .xz files unpacked. Tests that change files copy them first."""
    root = tmp_path_factory.mktemp("data")
    for source in sorted(DATA.rglob("*")):
        target = root / source.relative_to(DATA)
        if source.is_dir():
            target.mkdir()
        elif source.suffix == ".xz":
            target.with_suffix("").write_bytes(lzma.decompress(source.read_bytes()))
        else:
            shutil.copyfile(source, target)
    return root


@pytest.fixture(scope="session")
def tiny_dir(data: Path) -> Path:
    """Random three-shard Qwen2: 3 layers, hidden 128, 4 / 2 heads, untied head, biases."""
    return data / "tiny-random-qwen2-hf"


@pytest.fixture(scope="session")
def stories_dir(data: Path) -> Path:
    """Really trained 260k-parameter model: 5 layers, hidden 64, 8 / 4 heads, tied head."""
    return data / "stories260K-qwen2-hf"


@pytest.fixture(scope="session")
def micro_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Qwen2: 2 layers, hidden 32, 4 / 2 heads, vocab 64, own head."""
    from oracles import torch_qwen2

    directory = tmp_path_factory.mktemp("micro")
    torch_qwen2.make(directory, seed=0, scale=0.3)
    return directory
