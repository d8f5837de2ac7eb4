"""A run's checkpoints: damage is named and never restored, a failed save leaves the earlier ones as they were."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
import small
from rich.console import Console

from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.orbax import MANIFEST_FILE, Checkpointer, latest_step
from qerl_jax.checkpoint.safetensors import CheckpointError
from qerl_jax.config import Config, ConfigError
from qerl_jax.reporting.metrics import MetricsFile
from qerl_jax.rl.state import init_state
from qerl_jax.run import lifecycle
from qerl_jax.types import TrainState


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> TrainState:
    """A state whose adapters are large enough that orbax keeps their bytes without a checksum of its own."""
    config = Config(
        model=str(small.nvfp4(tmp_path_factory.mktemp("model") / "m")),
        lora_rank=64,
        learning_rate=1e-5,
        train_norms=True,
        max_steps=10,
    )
    return init_state(load_policy(config.model, lora=config.lora), config)


def at(state: TrainState, step: int) -> TrainState:
    """The state of a step, whose every part is other than that of every other step."""
    noise = np.random.default_rng(step)

    def moved(leaf: jax.Array) -> jax.Array:
        by = noise.normal(size=leaf.shape) if jnp.issubdtype(leaf.dtype, jnp.floating) else step
        return leaf + jnp.asarray(by, leaf.dtype)

    parts = {name: jax.tree.map(moved, getattr(state, name)) for name in ("lora", "norms", "opt_state")}
    return state.replace(step=jnp.int32(step), cursor=jnp.int32(7 * step), **parts)


def assert_same(one: TrainState, other: TrainState) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory) -> Path:
    """A run with checkpoints of steps 1 and 2. Tests copy it."""
    directory = tmp_path_factory.mktemp("run")
    checkpoints = Checkpointer(directory, 3)
    for step in (1, 2):
        checkpoints.save(at(state, step))
    return directory


def test_a_run_resumes_from_the_whole_state(state, saved, tmp_path):
    """Step, cursor, adapters and optimizer of the newest checkpoint."""
    directory = tmp_path / "run"
    shutil.copytree(saved, directory)
    for step in (1, 2):
        MetricsFile(directory).append(step, {"num_tokens": step})
    config = dataclasses.replace(state.config, output_dir=str(directory), resume="auto")
    checkpoints = Checkpointer(directory, 3)
    assert_same(lifecycle.restore(config, checkpoints, state, Console(quiet=True)), at(state, 2))


def test_the_newest_few_are_kept_and_restored_bit_for_bit(state, tmp_path):
    """By the steps' numbers, not by their texts."""
    (tmp_path / "checkpoints" / ".6.writing").mkdir(parents=True)  # of a process that was killed
    (tmp_path / "checkpoints" / "12").mkdir()  # without a manifest, and newer
    (tmp_path / "checkpoints" / "00").mkdir()  # somebody else's, as are
    (tmp_path / "checkpoints" / ".trash").mkdir()
    (tmp_path / "checkpoints" / ".DS_Store").touch()
    checkpoints = Checkpointer(tmp_path, 2)
    for step in (1, 9, 10):
        checkpoints.save(at(state, step))
    left = {path.name for path in checkpoints.directory.iterdir()}
    assert left == {".DS_Store", ".trash", "00", "9", "10", "12"} and checkpoints.latest_step() == 10
    assert_same(checkpoints.restore(state), at(state, 10))
    norms, _ = jax.tree_util.tree_flatten_with_path(at(state, 10).norms)
    paths = [f"norms/{jax.tree_util.keystr(path, simple=True, separator='/')}" for path, _ in norms]
    found = checkpoints.read(10, ("norms/",))
    assert sorted(found) == sorted(paths)
    assert all(np.array_equal(found[path], leaf) for path, (_, leaf) in zip(paths, norms, strict=True))
    assert_same(Checkpointer(tmp_path, keep=None).restore(state, step=9), at(state, 9))
    shutil.copytree(checkpoints.directory / "9", checkpoints.directory / "9 (copy)")
    assert latest_step(tmp_path) == 10


def test_a_random_key_is_restored_as_one(state, tmp_path):
    """Of an optimizer that draws noise; by its kind, which the state to be replaced has."""

    def drawn(implementation: str, seed: int) -> TrainState:
        return state.replace(opt_state={"key": jax.random.key(seed, impl=implementation)}, step=jnp.int32(seed))

    for implementation in ("threefry2x32", "rbg"):
        checkpoints = Checkpointer(tmp_path / implementation, 1)
        checkpoints.save(drawn(implementation, 3))
        found = checkpoints.restore(drawn(implementation, 1)).opt_state["key"]
        assert (
            found == jax.random.key(3, impl=implementation)
            and found.dtype == drawn(implementation, 1).opt_state["key"].dtype
        )


def test_a_place_that_cannot_hold_checkpoints_is_refused_before_the_first(tmp_path):
    """And one that is only read is not made."""
    (tmp_path / "checkpoints").touch()
    with pytest.raises(FileExistsError, match=str(tmp_path / "checkpoints")):
        Checkpointer(tmp_path, 2)
    assert Checkpointer(tmp_path / "none", None).latest_step() is None and not (tmp_path / "none").exists()


def test_a_complete_checkpoint_is_not_written_again(state, saved, tmp_path):
    """A signal may ask for one in a step that has just been saved."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)

    def files() -> dict[Path, tuple]:
        found = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}

    before = files()
    Checkpointer(tmp_path, 3).save(at(state, 2))
    assert files() == before


def test_the_way_on_from_a_damaged_checkpoint_is_the_newest_before_it(state, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    damaged = tmp_path / "checkpoints" / "3"
    shutil.copytree(tmp_path / "checkpoints" / "2", damaged)
    manifest = json.loads((damaged / MANIFEST_FILE).read_text())
    lacking = [{key: value for key, value in manifest.items() if key != part} for part in manifest]
    for text in ("{", *map(json.dumps, (*lacking, manifest | {"inputs": []}))):
        (damaged / MANIFEST_FILE).write_text(text)
        with pytest.raises(CheckpointError, match=f"delete {damaged} to resume from step 2$"):
            Checkpointer(tmp_path, 3).restore(state)


@pytest.mark.parametrize(
    "damage", ["cut", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("removed", "emptied"))]
)
def test_a_torn_checkpoint_is_refused_in_one_line_or_restored_as_saved(state, saved, tmp_path, damage, capfd):
    """Each file in turn. Without its manifest it is no checkpoint: the one before it counts."""
    newest, refused = tmp_path / "checkpoints" / "2", 0
    states = {step: at(state, step) for step in (1, 2)}
    files = [path.relative_to(saved) for path in (saved / "checkpoints" / "2").rglob("*") if path.is_file()]
    for file in files:
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
        path = tmp_path / file
        os.truncate(path, path.stat().st_size // 2 if damage == "cut" else 0)
        if damage == "removed":
            path.unlink()
        checkpoints = Checkpointer(tmp_path, 3)
        expected = 1 if damage == "removed" and file.name == MANIFEST_FILE else 2
        assert checkpoints.latest_step() == expected
        try:
            assert_same(checkpoints.restore(state), states[expected])
        except CheckpointError as error:
            refused += 1
            assert str(newest) in str(error) and "\n" not in str(error)
            assert f"delete {newest} to resume from step 1" in str(error)
            if refused == 1:
                assert_same(checkpoints.restore(state, step=1), states[1])
    assert refused >= 3  # orbax does not read all of its files
    output = capfd.readouterr()
    assert "Traceback" not in output.err + output.out


def test_a_checkpoint_of_another_config_or_model(state, saved):
    other = Config(**{**vars(state.config), "learning_rate": 3e-4, "seed": 5})
    with pytest.raises(ConfigError, match=r"checkpoints/2 .*seed: 0 -> 5") as error:
        Checkpointer(saved, keep=None).restore(state.replace(config=other))
    assert "learning_rate: 1e-05 -> 0.0003" in str(error.value)
    wider = state.replace(norms=jax.tree.map(lambda leaf: jnp.ones(leaf.size + 1), state.norms))
    with pytest.raises(
        CheckpointError, match=r"was saved as \['float32', \[16\]\], this run's is \['float32', \[17\]\]"
    ):
        Checkpointer(saved, keep=None).restore(wider)


@pytest.mark.parametrize(("limit", "keep"), [(0, 2), (100, 1), (4_000, 2), (20_000, 1), (900_000, 1)])
def test_a_save_that_fails_says_where_and_leaves_the_earlier_ones(state, saved, tmp_path, limit, keep, capfd):
    """In its arrays, or in a manifest of a megabyte."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    checkpoints = Checkpointer(tmp_path, keep, {"new": "x" * 1_000_000})
    with runs.full_disk(limit), pytest.raises(OSError, match="cannot be written") as error:
        checkpoints.save(at(state, 3))
    path = tmp_path / "checkpoints" / "3"
    assert re.match(rf"checkpoint {path} cannot be written: [A-Za-z]\w*: .", str(error.value))  # a kind and its words
    assert str(error.value).endswith("the one of step 2 is there to resume from")
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["1", "2"]
    assert_same(Checkpointer(tmp_path, keep).restore(state), at(state, 2))
    checkpoints.save(at(state, 3))  # once there is room again
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["1", "2", "3"][-keep:]
    assert_same(Checkpointer(tmp_path, keep).restore(state), at(state, 3))
    output = capfd.readouterr()
    assert "Traceback" not in output.err + output.out


def test_a_checkpoint_without_manifest_is_written_again(state, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    Checkpointer(tmp_path, 3).save(at(state, 3))
    (tmp_path / "checkpoints" / "3" / MANIFEST_FILE).unlink()
    again = Checkpointer(tmp_path, 1)
    assert again.latest_step() == 2
    assert_same(again.restore(state), at(state, 2))
    again.save(at(state, 3))
    assert [path.name for path in again.directory.iterdir()] == ["3"]


def test_an_end_while_an_old_checkpoint_is_deleted(state, saved, tmp_path):
    """Half deleted it is none, and goes with the next that is saved. A link to it cannot be deleted."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    old, elsewhere = tmp_path / "checkpoints" / "1", tmp_path / "old"
    old.rename(elsewhere)
    old.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        Checkpointer(tmp_path, 2).save(at(state, 3))
    old.unlink()
    elsewhere.rename(old)
    again = Checkpointer(tmp_path, 2)
    assert again.latest_step() == 3
    again.save(at(state, 4))
    assert sorted(path.name for path in again.directory.iterdir()) == ["3", "4"]


def test_a_disk_too_small_is_noticed_before_writing(state, tmp_path):
    huge = np.broadcast_to(np.int8(0), (1 << 60,))  # of one byte in memory
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state.replace(lora=huge)))
    with pytest.raises(OSError, match=rf"up to {needed:,} bytes are needed, [\d,]+ are free; there is no earlier one"):
        Checkpointer(tmp_path, 2).save(state.replace(lora=huge))
