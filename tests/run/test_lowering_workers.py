"""Processes that lower programs for a run."""

import contextlib
import functools
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import pytest
import runs
from qerl_kernels.gpu import H200, gpu_of

from qerl_jax.config import Config
from qerl_jax.driver import Described
from qerl_jax.lowered import LoweredPrograms, as_in_sources
from qerl_jax.parallel import ALONE, Replicas
from qerl_jax.programs import program, record
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.hooks import Hooks
from qerl_jax.run.lowering_workers import LoweringWorkers, useful_workers
from qerl_jax.run.rehearsal import rehearse_evaluation_of_run, rehearse_run
from qerl_jax.train import parse

pytestmark = pytest.mark.usefixtures("kept_programs_forgotten")

ON_GPU = "--weight-format nvfp4 --dtype bfloat16 --matmul-kernel mosaic_gpu"
WIDE = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 1}


def config_of(folder: Path, model: Path, flags: str = "", sizes: Mapping[str, int] = MappingProxyType({})) -> Config:
    """The tiny run of a model of other sizes, of which there is nothing but its config."""
    (folder / "model").mkdir()
    fields = json.loads((model / "config.json").read_text()) | sizes
    (folder / "model" / "config.json").write_text(json.dumps(fields))
    return with_rewards(parse(["--config", "tiny", "--model", str(folder / "model"), *flags.split()]))


def text(exported: jax.export.Exported) -> str:
    """A program without the places of its operations in the sources, which have numbers."""
    return re.sub(r"(?m)^#loc.*\n| loc\((?:[^()]|\([^()]*\))*\)", "", exported.mlir_module())


@pytest.mark.parametrize("is_on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_worker_lowers_what_the_run_would(tmp_path, tiny_dir, is_on_gpu):
    """The programs of an evaluation, to the same text, under the same names; on a GPU for that, which the worker does
    not see, and those of a step, too.
    """
    config = config_of(tmp_path, tiny_dir, *([ON_GPU, WIDE] if is_on_gpu else []))
    own, kept = (LoweredPrograms(tmp_path / name, b"same") for name in ("own", "kept"))
    with contextlib.closing(LoweringWorkers(1)) as workers:
        for _ in range(2):
            workers.begin(kept)
        rehearsals = [(rehearse_evaluation_of_run, config, None, 5, 9), (rehearse_run, config, Hooks(), 1e10)]
        for rehearsal in rehearsals[: 1 + is_on_gpu]:
            workers.submit(*rehearsal)
            record(*rehearsal, kept=own)
        names, end = set(os.listdir(own.directory)), time.monotonic() + 60
        while not names <= {file.name for file in kept.directory.glob("*")} and time.monotonic() < end:
            time.sleep(0.05)
        [worker] = workers.processes
        worker.stdin.write(b"\x80\x05\x95")  # a part of a message
        worker.stdin.close()  # as the end of this process would, whatever ends it
        assert worker.wait(60) == 0
    found = [{file.name: pickle.loads(file.read_bytes()[32:]) for file in x.directory.iterdir()} for x in (own, kept)]
    # What an earlier test of this process has traced is not lowered here again.
    assert found[0].keys() <= found[1].keys() and len(found[0]) >= 8
    for name, (expected, results) in found[0].items():
        ours, own_results = found[1][name]
        assert text(ours) == text(expected) and own_results == results
        assert (ours.platforms, str(ours.in_avals)) == (expected.platforms, str(expected.in_avals))


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "wb")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def test_a_program_that_another_process_lowers(tmp_path):
    """Is left to it by a worker, and waited for by the run, until that process has died."""

    def scaled(x):
        return 2 * x

    scaled.__module__, scaled.__qualname__ = "qerl_jax.made", "scaled"
    folder, shape = tmp_path / "lowered", jax.ShapeDtypeStruct((3,), "float32")
    command, pipes = [sys.executable, "-c", HOLD, f"{folder}.claims"], {"stdin": subprocess.PIPE}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **pipes) as other:
        other.stdout.readline()
        [traced] = record(program(scaled), shape, kept=LoweredPrograms(folder, b"", waits=False))
        assert traced.results.shape == (3,) and not folder.exists() and other.poll() is None
        threading.Timer(0.2, other.kill).start()
        missing, kept = [], LoweredPrograms(folder, b"")
        kept.on_missing = functools.partial(missing.append, "scaled")
        record(program(scaled), shape, kept=kept)
        assert other.wait(0) is not None and len(list(folder.iterdir())) == 1
        record(program(scaled), shape, kept=kept)
        assert missing == ["scaled"]


def test_a_folder_without_claims(tmp_path):
    """The run lowers what it needs; a worker cannot know what others lower, and lowers nothing."""
    (tmp_path / "file").touch()
    for waits in (True, False):
        with LoweredPrograms(tmp_path / "file" / "lowered", b"", waits)._claimed(1) as is_ours:
            assert is_ours == waits


def test_a_program_that_takes_too_long_elsewhere_is_the_last_that_is_waited_for(tmp_path):
    folder, times = LoweredPrograms(tmp_path / "lowered", b""), []
    folder._patience = 0.1
    command, pipes = [sys.executable, "-c", HOLD, f"{folder.directory}.claims"], {"stdin": subprocess.PIPE}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **pipes) as other:
        other.stdout.readline()
        for number in range(2):
            begin = time.monotonic()
            with folder._claimed(number) as is_ours:
                times.append(time.monotonic() - begin)
                assert is_ours
        other.kill()
    assert times[0] >= 0.1 > times[1]


def test_no_more_workers_than_the_system_starts():
    with runs.limited(resource.RLIMIT_NOFILE, 3), contextlib.closing(LoweringWorkers(2)) as workers:
        assert workers.processes == []


def test_where_workers_are_useful(tmp_path):
    """Beside the first process of a command, with a cache, on a Hopper of its own with cores to spare."""
    hopper, ada = (Described(gpu, 1 << 34) for gpu in (H200, gpu_of("NVIDIA RTX 4090", 89, 128)))

    def workers(gpus=(hopper,), cores=16, replicas=ALONE, **functions):
        return useful_workers(Hooks(**functions), replicas, gpus, cores)

    was = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert workers() == 0
        with as_in_sources():
            assert [workers(cores=cores) for cores in (2, 8, 16, 128)] == [0, 2, 4, 4]
            assert [workers(gpus) for gpus in ((ada,), (), (hopper, hopper))] == [0, 0, 4]
            assert [workers(replicas=Replicas(index, 2)) for index in range(2)] == [4, 0]
            assert workers(with_reference=True) == workers(replicas=Replicas(tensor_parallel=2)) == 0
            jax.config.update("jax_compilation_cache_dir", None)
            assert workers() == 0
    finally:
        jax.config.update("jax_compilation_cache_dir", was)
