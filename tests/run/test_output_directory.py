"""One run at a time in an output directory; `--overwrite` deletes only what a run made."""

import dataclasses
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from qerl_jax.checkpoint.orbax import written
from qerl_jax.config import Config, ConfigError, load
from qerl_jax.run import directory as run_directory
from qerl_jax.run.lock import locked, refuse_locked
from qerl_jax.run.prepare import check_output

HOLD = """
import sys
from pathlib import Path
from qerl_jax.run.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_with_host_and_process(tmp_path):
    """The lock is another process's; its death, even by SIGKILL, frees the directory."""
    refuse_locked(tmp_path / "run")
    assert not (tmp_path / "run").exists()  # looking for a lock writes nothing
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        said = f"output_dir {tmp_path}/run is in use by another run, process {process.pid} on host "
        with pytest.raises(ConfigError, match=re.escape(said + socket.gethostname())):
            refuse_locked(tmp_path / "run")
        with pytest.raises(ConfigError, match=re.escape(said)):
            check_output(config_of(tmp_path / "run"))
        with pytest.raises(ConfigError, match=re.escape(said)), locked(tmp_path / "run"):
            pass
    finally:
        process.kill()
        process.communicate()
    refuse_locked(tmp_path / "run")
    with locked(tmp_path / "run"):
        assert (tmp_path / "run" / "run.lock").read_text() == f"{socket.gethostname()} {os.getpid()}\n"
    with locked(tmp_path / "run"):
        pass


def config_of(directory: Path, **changes: object) -> Config:
    return runs.config(directory, overwrite=True, **changes)


def made_by_a_run(directory: Path) -> dict[str, str]:
    run_directory.write_config(directory, config_of(directory))
    files = (
        "checkpoints/3/manifest.json checkpoints/3/state/d/0 checkpoints/.4.writing/x evaluation.json "
        "metrics.jsonl completions/step_000003.parquet adapter/adapter_model.safetensors "
        "plots/reward.png nonfinite/step_000002.npz report.md "
        "tensorboard/events.out.tfevents.1.host.from0 wandb/run-1/files/x wandb.json"
    )
    return write(directory, files.split())


def write(directory: Path, names: list[str]) -> dict[str, str]:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    return dict.fromkeys(names, "")


def test_a_folder_without_what_a_run_writes_is_no_run(tmp_path):
    """That of a run killed at once is empty; one of a user's has the same name."""
    config = runs.config(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    run_directory.check(tmp_path / "run", config)
    write(tmp_path / "run", ["checkpoints/notes.txt", "plots/own.png"])
    run_directory.check(tmp_path / "run", config)
    write(tmp_path / "run", ["checkpoints/3/manifest.json"])
    with pytest.raises(ConfigError, match="holds checkpoints of a run already"):
        run_directory.check(tmp_path / "run", config)


def test_a_run_is_resumed_from_its_config_or_its_checkpoints(tmp_path):
    for number, file in enumerate(("config.yaml", "checkpoints/3/manifest.json")):
        directory = tmp_path / str(number)
        write(directory, [file, "report.md"])
        run_directory.check(directory, runs.config(directory, resume="auto"))
    write(tmp_path / "1", ["config.yaml", "adapter/adapter_model.safetensors"])
    run_directory.check(tmp_path / "1", runs.config(tmp_path / "1", resume="auto"))
    (tmp_path / "1/checkpoints/3/manifest.json").unlink()
    (tmp_path / "1/checkpoints/3").rmdir()
    with pytest.raises(ConfigError, match=r"1 holds a finished run without checkpoints/, .* adapter .*1/adapter and"):
        run_directory.check(tmp_path / "1", runs.config(tmp_path / "1", resume="auto"))
    write(tmp_path / "report", ["report.md"])
    with pytest.raises(ConfigError, match=r"holds report\.md, but neither config\.yaml nor checkpoints/ to res"):
        run_directory.check(tmp_path / "report", runs.config(tmp_path / "report", resume="auto"))


def test_overwrite_deletes_only_what_a_run_made(tmp_path):
    directory = tmp_path / "run"
    made_by_a_run(directory)
    lasting = load(directory / "config.yaml")  # with which a later run neither overwrites nor resumes unasked
    assert (lasting.overwrite, lasting.resume, lasting.allow_changed_inputs) == (False, "never", False)
    foreign = write(
        directory,
        [
            *(
                "notes.md", "checkpoints/README", "checkpoints/mine/weights", "checkpoints/007/x",
                "checkpoints/3-best/manifest.json", "completions/step_best.parquet", "adapter/README.md",
            ),
            *("plots/mine.svg", "plots/own.png", "nonfinite/why.txt", "tensorboard/other/events", "wandb/mine"),
        ],
    )  # fmt: skip
    run_directory.check(directory, config_of(directory))
    deleted = (
        "checkpoints evaluation.json metrics.jsonl completions adapter plots nonfinite report.md tensorboard wandb"
    )
    assert run_directory.clear(directory) == [*deleted.split(), "wandb.json", "config.yaml"]
    left = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert left == set(foreign)


def test_checkpoints_are_not_looked_through_for_each_of_them(tmp_path, monkeypatch):
    """Of 1,600 that took a minute and a half."""
    calls, counts = [], []
    monkeypatch.setattr(run_directory, "written", lambda path: calls.append(path) or written(path))
    for names in (["3"], ["5", "7", "9"]):
        write(tmp_path, [f"checkpoints/{name}/manifest.json" for name in names])
        run_directory.check(tmp_path, runs.config(tmp_path, resume="auto"))
        counts.append(len(calls))
    assert counts[1] == 2 * counts[0] > 0


@pytest.mark.parametrize("change", [{}, {"resume": "auto", "overwrite": False}])
def test_a_directory_in_the_place_of_a_checkpoint_is_refused(tmp_path, change):
    made_by_a_run(tmp_path)
    write(tmp_path, ["checkpoints/007/weights"])  # a name that no checkpoint has
    run_directory.check(tmp_path, dataclasses.replace(config_of(tmp_path), **change))
    write(tmp_path, ["checkpoints/7/weights"])
    with pytest.raises(ConfigError, match="checkpoints/7 is no checkpoint, and one of the run would replace it: move"):
        run_directory.check(tmp_path, dataclasses.replace(config_of(tmp_path), **change))


@pytest.mark.parametrize("name", ["run.lock", "config.yaml", "metrics.jsonl", "plots/reward.png", "wandb.json"])
def test_a_link_in_the_place_of_a_runs_file_is_refused(tmp_path, name):
    """In a directory that came from somebody else it may lead to any file of the user's."""
    directory = tmp_path / "run"
    made_by_a_run(directory)
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(tmp_path / "mine")
    config = config_of(directory)
    for change in ({}, {"resume": "auto", "overwrite": False}):
        with pytest.raises(ConfigError, match=f"{name} is a link to {tmp_path}/mine, which the run would write to"):
            run_directory.check(directory, dataclasses.replace(config, **change))


def test_links_that_wandb_makes_are_no_danger(tmp_path):
    made_by_a_run(tmp_path / "run")
    (tmp_path / "run" / "wandb" / "latest-run").symlink_to("run-1")
    (tmp_path / "run" / "wandb" / "debug.log").symlink_to("run-1/files/x")
    run_directory.check(tmp_path / "run", config_of(tmp_path / "run"))


@pytest.mark.parametrize("mine", [["mine"], []])
def test_overwrite_follows_a_link_to_checkpoints_and_keeps_it(tmp_path, mine):
    directory, scratch = tmp_path / "run", tmp_path / "scratch"
    write(scratch, ["5/manifest.json", *mine])
    run_directory.write_config(directory, config_of(directory))
    (directory / "checkpoints").symlink_to(scratch)
    run_directory.clear(directory)
    assert [path.name for path in scratch.iterdir()] == mine and (directory / "checkpoints").is_symlink()


@pytest.mark.parametrize(
    ("files", "first"),
    [
        (["config.yaml", "adapter/adapter_config.json"], "adapter"),
        (["report.md"], "report.md"),
        (["checkpoints/7/state/x"], "checkpoints"),
    ],
)
def test_overwrite_refuses_a_directory_that_is_no_run(tmp_path, files, first):
    write(tmp_path, files)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path} holds {first}, but no config.yaml of a run")):
        run_directory.check(tmp_path, config_of(tmp_path))
