"""Bad runs through the command line: settings that contradict, directories that cannot be used or are damaged, a full
disk. One line that names what is wrong and both values, exit code 2, everything that was there left as it was.

`OUT`, `MODEL` and `DATA` in a message stand for the directories and files of the test.
"""

import contextlib
import shutil
from pathlib import Path

import jax
import pytest
import runs
import small
from command_lines import ROWS, assert_says, error_of, evaluation, lines, replaced, training

from qerl_jax import train
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.checkpoint.of_run import find_source
from qerl_jax.checkpoint.orbax import latest_step
from qerl_jax.command import STOPPED
from qerl_jax.evaluate import main as evaluate
from qerl_jax.evaluation import Evaluation
from qerl_jax.models.lora import LoraConfig
from qerl_jax.reporting.metrics import read_evaluations, read_metrics, write_evaluations
from qerl_jax.types import TrainState

PRESETS = Path(__file__).parent / "data" / "presets"

pytestmark = pytest.mark.usefixtures("nothing_compiled_ahead", "nothing_drawn")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A place with model, dataset and a run of two steps, which met a full disk in the second and then continued. Tests
    copy the run.
    """
    place = tmp_path_factory.mktemp("place")
    (place / "rows.jsonl").write_text(lines(ROWS))
    small.bf16(place / "model", shards=1)  # whose programs another test has, too
    with contextlib.ExitStack() as disk, pytest.raises(OSError) as full:

        def no_room_for_the_second(_, state: TrainState) -> None:
            if int(state.step) == 2:
                disk.enter_context(runs.full_disk(1_000))

        train.train(train.parse(training(place)), on_step=no_room_for_the_second)
    (place / "full_disk.txt").write_text(f"error: {full.value}".replace(str(place / "run"), "OUT"))
    (place / "left.txt").write_text(str([path.name for path in (place / "run/checkpoints").iterdir()]))
    assert train.main(training(place, "--resume", "auto")) == 0
    return place


@pytest.fixture
def place(finished, tmp_path) -> Path:
    """The same model and dataset, as links, so that messages can be compared; no run."""
    for name in ("model", "rows.jsonl"):
        (tmp_path / name).symlink_to(finished / name)
    return tmp_path


@pytest.fixture
def used(finished, tmp_path) -> Path:
    """A copy of the run, in the place of the original while the test lasts: its config names where it is. The problems
    are those of the original afterwards.
    """
    shutil.copy(finished / "rows.jsonl", tmp_path)
    (finished / "run").rename(tmp_path / "kept")
    shutil.copytree(tmp_path / "kept", finished / "run")
    yield finished
    shutil.rmtree(finished / "run")
    (tmp_path / "kept").rename(finished / "run")
    shutil.copy(tmp_path / "rows.jsonl", finished)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


FLAGS: dict[str, tuple[list[str], str]] = {
    "rollout memory": (
        ["--rollout-memory-gb", "1e-6"],
        "rollout_memory_gb … cannot hold 1 completions of 6 tokens and 1 prompts of 120: …raise it",
    ),
    "output under a file": (
        ["--output-dir", "DATA/run"],
        "output_dir DATA/run cannot be written: DATA is not a directory",
    ),
    "output is a file": (["--output-dir", "DATA"], "output_dir DATA cannot be written: DATA is not a directory"),
    "no adapter there": (
        ["--adapter", "MODEL"],
        "MODEL/adapter_config.json does not exist: an adapter is a PEFT directory",
    ),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags(case, place, capfd):
    flags, message = FLAGS[case]
    named = {"DATA": place / "rows.jsonl", "MODEL": place / "model"}
    for short, path in named.items():
        flags = [flag.replace(short, str(path)) for flag in flags]
    assert_says(error_of(train.main, training(place, *flags), place, capfd), message)
    assert not (place / "run").exists()


def damage(name: str, old: bytes, new: bytes):
    def change(run: Path) -> None:
        data = (run / name).read_bytes()
        assert old in data
        (run / name).write_bytes(data.replace(old, new, 1))

    return change


# what is wrong: (damage, flags, message)
RUNS = {
    "used directory": (
        lambda run: None,
        [],
        "output_dir OUT holds a run already: resume it (resume: auto), start anew (overwrite: true), or name another "
        "output_dir",
    ),
    "another config": (
        lambda run: (run.parent / "rows.jsonl").write_text("no JSON"),  # which is read later
        ["--resume", "auto", "--learning-rate", "2e-3", "--seed", "7"],
        "OUT/checkpoints/2 was saved under other settings (seed: 0 -> 7; learning_rate: 0.001 -> 0.002), which may not "
        "change on resume: leave them as they were, or begin a new run with adapter OUT/adapter and another output_dir",
    ),
    "manifest of other arrays": (
        damage("checkpoints/2/manifest.json", b'"int32"', b'"int64"'),
        ["--resume", "auto"],
        "OUT/checkpoints/2: array … was saved as ['int64', …], this run's is ['int32', …]: the checkpoint is of "
        "another model; delete OUT/checkpoints/2 to resume from step 1",
    ),
    "damaged metrics": (
        damage("metrics.jsonl", b'{"step": 1', b'{"step" 1'),
        ["--resume", "auto"],
        "OUT/metrics.jsonl, line 1 is not a step's metrics: …; mend or delete the line to resume",
    ),
    "damaged evaluation": (
        lambda run: (run / "evaluation.json").write_text('{"before": {"accuracy": 1}}'),
        ["--resume", "auto"],
        "OUT/evaluation.json: 'before' is not the result of an evaluation (…); delete the file to evaluate anew",
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_runs(case, used, capfd):
    change, flags, message = RUNS[case]
    change(used / "run")
    before = contents(used / "run")
    assert_says(error_of(train.main, training(used, *flags), used, capfd), message)
    assert contents(used / "run") == before


# how a run is asked for that cannot work: (flags, message)
MISSING: dict[str, tuple[list[str], str]] = {
    "permission to run code": (
        ["--eval-dataset", f"codeforces:{PRESETS / 'codeforces'}"],
        "reward 'code' runs programs that the policy wrote: refused without allow_code_execution …",
    ),
    "W&B, or who its user is": (["--report-to", "wandb"], "report_to 'wandb'…"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_run_that_cannot_begin_does_not_overwrite(case, used, capfd):
    flags, message = MISSING[case]
    before = contents(used / "run")
    assert_says(error_of(train.main, training(used, "--overwrite", *flags), used, capfd), message)
    assert contents(used / "run") == before


def test_checkpoints_without_a_config_are_not_begun_over(used, capfd):
    """They are somebody's; as if their config.yaml had been lost."""
    for name in [path.name for path in (used / "run").iterdir() if path.name != "checkpoints"]:
        shutil.rmtree(used / "run" / name) if (used / "run" / name).is_dir() else (used / "run" / name).unlink()
    before = contents(used / "run")
    said = error_of(train.main, training(used), used, capfd)
    assert "output_dir OUT holds checkpoints of a run already: resume it (resume: auto), or name another" in said
    assert contents(used / "run") == before


def test_a_run_that_ends_early_says_truly_what_is_saved(place, capfd):
    """An error in step 3, an interrupt in step 4, which loses no finished step either, and one in a first step."""
    name, run, raised = f"{place / 'mine.py'}:reward", place / "run", place / "raised"
    (place / "mine.py").write_text(
        "import pathlib\n"
        "calls = 0\n"
        "def reward(completions, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"
        f"    exec(pathlib.Path({str(raised)!r}).read_text())\n"  # calls: one before the run, then one for each prompt
        "    return [float(len(text)) for text in completions]\n"
    )
    flags = [*training(place, "--reward-funcs", name, "--reward-workers", "0", "--max-steps", "7")]
    flags[flags.index("--save-steps") + 1] = "50"
    raised.write_text("if calls > 5: raise KeyError('late')")
    assert train.main(flags) == 2
    said = capfd.readouterr()
    assert_says(said.err.strip(), f"reward '{name}' raised KeyError('late') in {place / 'mine.py'}, line …")
    assert "--resume auto\nand with allow_changed_inputs once the reward's source is mended\n" in said.out
    assert [row["step"] for row in read_metrics(run)] == [1, 2] and latest_step(run) == 2

    raised.write_text("if calls > 3: raise KeyboardInterrupt")
    assert train.main([*flags, "--resume", "auto"]) == STOPPED
    said = capfd.readouterr()
    assert "resuming after step 2 of 7" in said.out
    assert "interrupted; the newest checkpoint is that of step 3, resume from it with" in said.err
    assert f"--config {run}/config.yaml --resume auto" in said.err
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3] and latest_step(run) == 3
    raised.write_text("if calls > 1: raise KeyboardInterrupt")
    assert train.main(replaced(flags, "--output-dir", str(place / "new"))) == STOPPED
    assert capfd.readouterr().err.splitlines() == [
        "interrupted; there is no checkpoint yet, start again with",
        f"  python -m qerl_jax.train --config {place}/new/config.yaml --resume auto",
    ]
    assert train.interrupted(place) == train.interrupted(None) == "interrupted; nothing was written"


def test_a_run_goes_on_with_the_memory_settings_that_its_error_names(place):
    """The device has no memory left in the second update: one line of advice, step 1 saved, and the advice works."""

    def exhausted() -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")

    flags = training(place)
    flags[flags.index("--save-steps") + 1] = "50"
    with pytest.raises(MemoryError) as failed:
        train.train(train.parse(flags), on_step=runs.in_the_second_update(exhausted))
    assert_says(
        f"error: {failed.value}",
        "the update ran out of memory: …; lower update_memory_gb below …, tokens_per_micro_batch or …",
    )
    assert latest_step(place / "run") == 1
    smaller = ["--update-memory-gb", "0.001", "--tokens-per-micro-batch", "128", "--logprob-chunk-size", "8"]
    assert train.main([*flags, "--resume", "auto", *smaller]) == 0
    assert [row["step"] for row in read_metrics(place / "run")] == [1, 2]


def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(finished):
    """What the run of this module has been through: no room for its second checkpoint, then resumed."""
    message = "checkpoint OUT/checkpoints/2 cannot be written: …; the one of step 1 is there to resume from"
    assert_says((finished / "full_disk.txt").read_text(), message)
    assert (finished / "left.txt").read_text() == "['1']"
    assert [row["step"] for row in read_metrics(finished / "run")] == [1, 2]
    assert (finished / "run/adapter/adapter_model.safetensors").exists()


def test_a_finished_run_goes_on_to_more_steps(used, capfd):
    """The third step has the learning rate of a run of three: one of warm-up, half of a cosine over two. An evaluation
    after the second is no longer that of the trained policy, nor is the adapter until the end.
    """
    run = used / "run"
    write_evaluations(run, {"after": Evaluation(0.5, 0.4, 0.6, 0.5, 0.0, 0.0, 1.0, 8, 1)})
    for name in b"grad_norm", b"learning_rate":  # else nothing was trained in three steps
        damage("metrics.jsonl", b'"%s": 0.0' % name, b'"%s": 1.0' % name)(run)
    before, rows = (run / "adapter/adapter_model.safetensors").read_bytes(), read_metrics(run)
    longer, seen = training(used, "--resume", "auto", "--max-steps", "3"), []

    def look(*_: object) -> None:
        seen.append((find_source(run).step, (run / "report.md").exists()))

    train.train(train.parse(longer), on_step=look)
    assert seen == [(2, False)]
    assert "max_steps: 2 -> 3; learning rate of step 3: 0 -> 0.0005\n" in capfd.readouterr().out
    assert read_metrics(run)[:2] == rows and read_metrics(run)[2]["learning_rate"] == pytest.approx(1e-3 / 2)
    assert read_evaluations(run) == {} and find_source(run).adapter == run / "adapter"
    assert (run / "adapter/adapter_model.safetensors").read_bytes() != before
    write_evaluations(run, {"after": Evaluation(0.5, 0.4, 0.6, 0.5, 0.0, 0.0, 1.0, 8, 1)})
    assert train.main(longer) == 0 and set(read_evaluations(run)) == {"after"}  # once it is over, it stays
    said = error_of(train.main, training(used, "--resume", "auto"), used, capfd)
    assert_says(said, "OUT/checkpoints/3 is that of step 3, but max_steps 2 ends at step 2")


def test_a_completion_with_a_broken_logit_leaves_the_others_as_they_are(tmp_path, capfd):
    """The two completions of one problem of two overflow in their prompt, at a token that nothing else holds: they are
    counted and left out of rewards and loss, and the step is taken with the others. `evaluate` counts them, too.
    """
    (tmp_path / "rows.jsonl").write_text(lines([ROWS[0], {"question": "What is @?", "answer": "1"}]))
    small.bf16(tmp_path / "model", shards=1)
    token = load_policy(tmp_path / "model", lora=LoraConfig(0)).tokenizer.encode("@")[0]

    def overflow_at_the_token(tensors) -> None:
        """Column 5 of the residual stream is 0 for every other token."""
        embedding = tensors["model.embed_tokens.weight"]
        embedding[:, 5], embedding[token] = 0, 0
        embedding[token, 5] = 1
        tensors["model.layers.0.self_attn.q_proj.weight"][:, 5] = 3e38
        for layer in range(2):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"model.layers.{layer}.{name}.weight"][5] = 0

    small.change_tensors(tmp_path / "model", overflow_at_the_token)
    (tmp_path / "mine.py").write_text(
        "def reward(prompts, completions, **_):\n"
        "    return [5.0 if '@' in p else float(i % 2) for i, p in enumerate(prompts)]\n"
    )
    flags = ["--reward-funcs", f"{tmp_path / 'mine.py'}:reward", "--reward-workers", "0", "--num-iterations", "2"]
    assert train.main(training(tmp_path, *flags)) == 0  # finished after two updates of one rollout
    (step,) = read_metrics(tmp_path / "run")
    assert step["completions/failed"] == 2 and step["skipped"] == 0 and step["grad_norm"] > 0
    assert step["reward"] == 0.5
    assert "2 completions whose largest logit was not finite were left out" in (tmp_path / "run/report.md").read_text()
    assert evaluate([*evaluation(tmp_path), "--dtype", "float32"]) == 0
    printed = capfd.readouterr().out
    assert "2 problems, 1 completion of each" in printed
    assert "1 completions whose largest logit was not finite count as wrong" in printed


def test_a_reward_that_cannot_be_used(tmp_path, capfd):
    """A run and a dry run refuse it before any weights are loaded; nothing is written."""
    place, _ = tmp_path, small.unloadable(tmp_path / "model")
    (place / "rows.jsonl").write_text(lines(ROWS))
    (place / "mine.py").write_text("def reward(completions):\n    return [1.0] * len(completions)\n")
    name = f"{place / 'mine.py'}:reward"
    flags = ["--reward-funcs", name, "--reward-timeout", "0.5", "--reward-workers", "1"]
    for more in [], ["--dry-run"]:
        said = error_of(train.main, training(place, *flags, *more), place, capfd)
        why = "it must take every column, the last as **columns"
        assert_says(said, f"reward '{name}' raised TypeError(…) in …mine.py, line 1: {why}")
    assert not (place / "run").exists()


def test_a_dry_run_tries_the_rewards_on_every_dataset(tmp_path, capfd):
    """Also where the model directory has no tokenizer yet, to make prompts by."""
    model = small.bf16(tmp_path / "model", 1)
    for file in small.TOKENIZER:
        (model / file).unlink()
    (tmp_path / "rows.jsonl").write_text(lines(ROWS))
    (tmp_path / "more.jsonl").write_text(lines([{"question": "What is @?", "answer": "1"}]))
    (tmp_path / "mine.py").write_text(
        "def reward(prompts, completions, **_):\n    return [1 / ('@' not in p) for p in prompts]\n"
    )
    sets = ["--dataset", str(tmp_path / "rows.jsonl"), str(tmp_path / "more.jsonl")]
    flags = training(tmp_path, *sets, "--reward-funcs", f"{tmp_path / 'mine.py'}:reward", "--dry-run")
    said = error_of(train.main, flags, tmp_path, capfd)
    assert_says(said, "reward '…mine.py:reward' raised ZeroDivisionError('division by zero') in …mine.py, line 2")
