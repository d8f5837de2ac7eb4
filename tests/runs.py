"""Short training runs of the bundled policy, in processes of their own, and what two runs must share."""

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
import small

from qerl_jax.checkpoint.orbax import Checkpointer
from qerl_jax.checkpoint.run_files import CONFIG_FILE
from qerl_jax.config import Config
from qerl_jax.programs import calling
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.rl.state import init_state
from qerl_jax.run.prepare import load
from qerl_jax.types import TrainState

PROBLEMS, COUNT = Path(__file__).parent / "data" / "arithmetic", 96
"""The first problems of the bundled dataset, and how many: all of it takes a second to encode."""

# Small enough for seconds, but every part of the program at work: two iterations, micro-batches, norms, KL, refills,
# noise.
SMALL = {
    "model": "tiny", "weight_format": "nvfp4", "dtype": "float32", "dataset": str(PROBLEMS), "max_steps": 12,
    "batch_size": 8, "num_generations": 4, "num_iterations": 2, "tokens_per_micro_batch": 512,
    "max_prompt_length": 96, "max_completion_length": 24, "learning_rate": 1e-3, "lora_rank": 4, "train_norms": True,
    "beta": 0.01, "sigma_start": 1e-2, "sigma_end": 5e-4, "reward_funcs": ("answer", "soft_format"),
    "reward_weights": (2.0, 0.2), "num_stages": 3, "dynamic_sampling": True, "max_refill_rounds": 1, "save_steps": 1,
    "save_total_limit": 2,
}  # fmt: skip
TIMES = ("time/", "step_time", "tokens_per_second", "compilations")  # metrics of the machine, not of the algorithm


@contextlib.contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    """This process has a limit of the system's, `resource.RLIMIT_NOFILE` for one."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def full_disk(size: int) -> contextlib.AbstractContextManager[None]:
    """A file cannot grow beyond `size` bytes (EFBIG): what a quota or a full disk does, for any user."""
    return limited(resource.RLIMIT_FSIZE, size)


def in_the_second_update(act: Callable[[], None]) -> Callable[[dict[str, float], TrainState], None]:
    """A hook `on_step` of a run, by which `act` is called once, between the second rollout and its update."""
    calls = contextlib.ExitStack()

    def call(program: Callable, args: tuple, kwargs: dict) -> object:
        if program.__name__ == "zeros_like":
            calls.close()
            act()
        return program(*args, **kwargs)

    def on_step(_: dict[str, float], state: TrainState) -> None:
        if int(state.step) == 1:
            calls.enter_context(calling(call))

    return on_step


def config(directory: Path, **changes: object) -> Config:
    """A small run into `directory`."""
    return Config(**(SMALL | {"output_dir": str(directory)} | changes))


def on_small(place: Path, quantized: bool = True) -> dict[str, object]:
    """Settings of a run on a random model of 20,000 parameters, which is rewarded for different letters. Model and
    reward are made in `place`.
    """
    (place / "letters.py").write_text(
        "def reward(completions, **_):\n    return [float(len(set(c))) for c in completions]\n"
    )
    model = small.nvfp4(place / "model") if quantized else small.bf16(place / "model")
    settings = {"model": str(model), "weight_format": None, "max_prompt_length": 120, "reward_workers": 0}
    return settings | {"reward_funcs": (f"{place / 'letters.py'}:reward",), "reward_weights": None}


def learning(directory: Path, **changes: object) -> Config:
    """A run of the bundled policy into `directory`, of 32 completions a step, that learns within some steps."""
    settings = {
        "batch_size": 32,
        "num_generations": 8,
        "num_iterations": 1,
        "tokens_per_micro_batch": 2048,
        "max_completion_length": 52,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0.0,
        "train_norms": False,
        "beta": 0.0,
        "dynamic_sampling": False,
        "eval_dataset": "arithmetic",
        "eval_samples": 24,
        "eval_temperature": 0.0,
        "eval_batch_size": 24,  # one number of slots, and so one program
    }
    return config(directory, **(settings | changes))


def command(config_file: Path, *flags: str) -> list[str]:
    """Command line of a run."""
    return [sys.executable, "-m", "qerl_jax.train", "--config", str(config_file), *flags]


def start(config_file: Path, *flags: str, output: Path | None = None, **environment: str) -> subprocess.Popen:
    """Start a run in its own process, its output appended to a file or piped."""
    arguments = {"stderr": subprocess.STDOUT, "text": True, "env": os.environ | environment}
    if output is None:
        return subprocess.Popen(command(config_file, *flags), stdout=subprocess.PIPE, **arguments)
    with output.open("a") as file:
        return subprocess.Popen(command(config_file, *flags), stdout=file, **arguments)


def finish(process: subprocess.Popen, timeout: float = 300) -> str:
    """Output of a run that must end well."""
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return output


def wait_for_step(directory: Path, step: int, process: subprocess.Popen, timeout: float = 240) -> None:
    """Wait until the run has written that step's metrics."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if any(row["step"] >= step for row in read_metrics(directory)):
            return
        if process.poll() is not None:
            raise AssertionError(f"the run ended early with {process.returncode}: {process.stdout.read()}")
        time.sleep(0.02)
    raise AssertionError(f"no step {step} after {timeout} s")


def final_arrays(directory: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, as bytes compare them."""
    resolved = run_config(directory)
    checkpoints = Checkpointer(directory, 2)
    state = checkpoints.restore(init_state(load(resolved), resolved))
    import jax

    return {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }


def run_config(directory: Path) -> Config:
    """The resolved config of a run."""
    from qerl_jax.config import load as load_config

    return load_config(directory / CONFIG_FILE)


def assert_same_run(one: Path, other: Path) -> None:
    """Bit-identical state, metrics but for times, completions and adapter."""
    first, second = final_arrays(one), final_arrays(other)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name
    rows = [
        [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(d)] for d in (one, other)
    ]
    assert rows[0] == rows[1]
    files = [sorted(path.name for path in (d / "completions").iterdir()) for d in (one, other)]
    assert files[0] == files[1] == [f"step_{i + 1:06d}.parquet" for i in range(len(rows[0]))]
    for name in files[0]:
        assert pyarrow.parquet.read_table(one / "completions" / name) == pyarrow.parquet.read_table(
            other / "completions" / name
        )
    for path in (one / "adapter").rglob("*.safetensors"):
        assert path.read_bytes() == (other / path.relative_to(one)).read_bytes()


def read_json(path: Path) -> dict:
    """A JSON file."""
    return json.loads(path.read_text())
