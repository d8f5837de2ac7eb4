"""The whole program: signals and bad batches lose nothing; what a dry run shows, what a run reads and refuses."""

import dataclasses
import io
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest
import runs
import small
from command_lines import replaced
from rich.console import Console

from qerl_jax import train
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.safetensors import open_checkpoint
from qerl_jax.checkpoint.tokenizer import load_tokenizer
from qerl_jax.command import STOPPED
from qerl_jax.config import Config, ConfigError, dump, load
from qerl_jax.data.files import DataError
from qerl_jax.reporting.metrics import read_metrics
from qerl_jax.reporting.phases import Phases
from qerl_jax.rewards.load import Rewards
from qerl_jax.rl.state import init_state
from qerl_jax.run import prepare
from qerl_jax.run.choose_rewards import with_rewards
from qerl_jax.run.dry_run import show_dry_run
from qerl_jax.types import TrainState


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict[str, object]:
    return runs.on_small(tmp_path_factory.mktemp("small"))


STOPPING = """
import os, signal
sent = []
def reward(completions, **_):
    if not sent and os.path.exists({metrics!r}) and os.path.getsize({metrics!r}):  # in the second step
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
    return [float(len(set(text))) for text in completions]
"""


def test_sigterm_finishes_the_step_saves_and_says_how_to_go_on(settings, tmp_path, capfd):
    directory = tmp_path / "stopped"
    (tmp_path / "own.py").write_text(STOPPING.format(metrics=str(directory / "metrics.jsonl")))
    own = {"reward_funcs": (f"{tmp_path / 'own.py'}:reward",), "num_iterations": 1, "dynamic_sampling": False}
    own |= {"max_prompt_length": None, "max_steps": 500, "save_steps": 400, "beta": 0.0}
    config = runs.config(directory, **settings | own)
    (tmp_path / "config.yaml").write_text(dump(config))
    assert train.main(["--config", str(tmp_path / "config.yaml")]) == STOPPED
    output = capfd.readouterr().out
    assert "stopped by SIGTERM" in output and f"--config {directory}/config.yaml --resume auto" in output
    assert read_metrics(directory)[-1]["step"] == 2
    assert [p.name for p in (directory / "checkpoints").iterdir() if p.name.isdigit()] == ["2"]
    assert "stopped by SIGTERM after step 2 of 500" in (directory / "report.md").read_text()
    output = " ".join(output.split())
    chosen = "max_prompt_length 232: what max_completion_length 24 leaves of the model's 256 positions"
    assert output.count(chosen) == 1 and load(directory / "config.yaml").max_prompt_length == 232
    for silence in (
        f"loading {config.model} …",
        f"reading and tokenizing {runs.PROBLEMS} …",
        "step 1 waits until its programs are",
    ):
        assert silence in output


def test_a_dry_run_shows_the_plan_and_leaves_nothing(tmp_path, capsys):
    """Config, table and estimate on the terminal; no weights read, no directory made; bad input as in a run."""
    model = small.unloadable(tmp_path / "model", max_position_embeddings=200)
    before = sorted(tmp_path.rglob("*"))
    flags = ["--model", str(model), "--dry-run", "--seed", "5", "--output-dir", str(tmp_path / "[red]out")]
    flags += ["--max-prompt-length", "None"]
    assert train.main(["--config", "tiny", *flags]) == 0
    text = capsys.readouterr().out
    assert "max_prompt_length 148: what max_completion_length 52 leaves of" in text and "_prompt_length: 148" in text
    assert "seed: 5" in text and "[red]out" in text and "adapters, rank 16" in text and "peak, about" in text
    # The prompt as the template renders it, and the rewards' own values: 2 × answer + 0.2 × soft_format.
    assert "<|im_start|>system\n<think>steps</think><answer>number</answer><|im_end|>\n<|im_start|>user\n" in text
    assert "The reward is 2 × answer, 0.2 × soft_format." in text
    assert "  2.2 for a right answer" in text and "  0.2 for a wrong answer" in text
    assert "  0 for an unreadable answer, 'I do not know.' (answer 0, soft_format 0)" in text
    count = sum(tensor.size for tensor in open_checkpoint(model.with_name("model-bf16")).values()) / 1e6
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9
    files = f"weight files of {size:.3f} GB. Dry run: no weights were loaded, nothing was written."
    assert text.endswith(f"\n{model}: {count:.1f} M parameters, projections in nvfp4, {files}\n")
    assert sorted(tmp_path.rglob("*")) == before
    used = tmp_path / "used"
    used.mkdir()
    (used / "metrics.jsonl").touch()
    assert train.main(["--config", "tiny", "--dry-run", "--output-dir", str(used)]) == 0
    said = f"\nA run would be refused: output_dir {used} holds metrics.jsonl of a run already: "
    assert said in capsys.readouterr().out


def test_a_run_may_fill_all_positions_of_the_model(tmp_path, capsys):
    config = Config("tiny", dataset="arithmetic", output_dir=str(tmp_path / "run"), max_prompt_length=200)
    prepare.check(with_rewards(dataclasses.replace(config, max_completion_length=312)))  # 512
    with pytest.raises(ConfigError, match=r"200 \+ max_completion_length 313 exceed max_position_embeddings 512"):
        prepare.check(with_rewards(dataclasses.replace(config, max_completion_length=313)))
    prepare.check(with_rewards(dataclasses.replace(config, max_prompt_length=None, max_completion_length=511)))
    roomy = Config(str(Path(__file__).parent / "data/qwen2.5_configs/Qwen2.5-7B"))
    assert prepare.with_prompt_length(roomy, Console()).max_prompt_length == 512
    assert capsys.readouterr().out == ""  # the default, of which nothing need be said
    refused = (200, 313, "give a max_prompt_length of at most 199"), (None, 512, "nothing of .*: 256 leaves them 256")
    for prompt, completion, words in refused:
        changed = dataclasses.replace(config, max_prompt_length=prompt, max_completion_length=completion)
        with pytest.raises(ConfigError, match=f"{words}$"):
            prepare.check(with_rewards(changed))


NVFP4 = str(Path(__file__).parent / "data/nvfp4/fixture-compressed-tensors-tiny-qwen2")


@pytest.fixture(scope="module")
def unloadable(tmp_path_factory) -> Path:
    return small.unloadable(tmp_path_factory.mktemp("unloadable") / "model", max_position_embeddings=512)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", ""], "model is empty: name a Hugging Face directory"),
        (["--config", "gsm8k-7b-nvfp4"], "4096 leaves prompts nothing of max_position_embeddings 512 of"),
        (["--model", NVFP4, "--weight-format", "nf4"], "weights (compressed-tensors); weight_format 'nf4' would need"),
        (["--reward-funcs", "nosuch"], "reward 'nosuch' is neither"),
        (["--resume", "/nonexist"], "resume '/nonexist' is not one of ['never', 'auto']"),
        (["--dataset", "math500"], "'math500' has no split 'train' on the hub, only ['test']"),
        (["--dataset", "empty"], "has no file of the split 'train'"),
        (["--eval-dataset", "bigmath"], "'bigmath' has no split 'test' on the hub, only ['train']"),
    ],
)
def test_a_run_and_a_dry_run_refuse_before_they_load_anything(flags, words, tmp_path, unloadable, capsys):
    """Neither weights nor rewards, which would be refused as well."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "rewards.py").write_text("raise AssertionError('it was loaded')")
    given = ["--model", str(unloadable), "--output-dir", str(tmp_path / "run")]
    given += ["--reward-funcs", f"{tmp_path / 'rewards.py'}:reward"]
    given += [] if "--config" in flags else ["--max-prompt-length", "80", "--max-completion-length", "16"]
    given = replaced(given, *(str(tmp_path / flag) if flag == "empty" else flag for flag in flags))
    for dry in ([], ["--dry-run"]):
        assert train.main([*given, *dry]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_non_finite_update_is_skipped_dumped_and_counted(settings, tmp_path):
    """A loss that is not a number poisons the gradient. A run that only skips is an error."""
    states: list[TrainState] = []

    def poisoned(logp, old_logp, behaviour_logp, reference_logp, advantages, mask):
        return logp * jnp.nan, {}

    directory = tmp_path / "poisoned"
    config = runs.config(directory, max_steps=1, dynamic_sampling=False, beta=0.0, **settings)
    with pytest.raises(ValueError, match="none of 1 steps trained anything: loss, gradient or new parameters"):
        train.train(config, token_loss=poisoned, on_step=lambda _, state: states.append(state))
    policy = prepare.load(config)
    for old, new in zip(jax.tree.leaves(policy.lora), jax.tree.leaves(states[0].lora), strict=True):
        np.testing.assert_array_equal(old, new)
    assert read_metrics(directory)[0]["skipped"] == config.num_iterations
    assert not (directory / "adapter").exists() and (directory / "plots" / "reward.png").exists()
    assert "stopped by an error after step 1 of 1.\n" in (report := (directory / "report.md").read_text())
    assert "- none of 1 steps trained anything: loss, gradient or new parameters" in report
    with np.load(directory / "nonfinite" / "step_000001.npz") as file:  # closed: else whichever test runs then is told
        advantages = file["advantages"]
    recorded = pyarrow.parquet.read_table(directory / "completions" / "step_000001.parquet").to_pydict()
    assert advantages.shape == (8,) and advantages.tolist() == recorded["advantage"]


def test_a_mixture_of_datasets_reaches_the_rewards_with_its_columns(settings, tmp_path):
    """Each prompt with its own answer and column; ids unique over the sets; what the cursor says, and nothing else."""
    sets = [tmp_path / "letters.jsonl", tmp_path / "numbers.jsonl"]
    for path in sets:
        rows = [{"question": f"{path.stem} {i}?", "answer": str(i), "hint": f"{path.stem}-{i}"} for i in range(5)]
        path.write_text("\n".join(json.dumps(row) for row in [{"question": "", "answer": "0", "hint": "x"}, *rows]))
    own = {"dataset": tuple(map(str, sets)), "dataset_weights": (1, 3), "batch_size": 32, "max_completion_length": 4}
    own |= {"reward_columns": ("hint",), "dynamic_sampling": False, "reward_funcs": "spy"}
    config = runs.config(tmp_path / "run", **settings | own)
    config = with_rewards(config)
    console = Console(record=True)
    policy = prepare.load(config)
    stream, evaluation = prepare.load_problems(config, policy.tokenizer, console)
    assert len(stream) == 10 and evaluation == []
    assert console.export_text().count("left out 1 of 6 records: 1 × empty 'question'") == 2
    assert [item.problem.id for items in stream.sets for item in items] == [*range(1, 6), *range(7, 12)]

    seen = []

    def reward(*, prompts, answer, hint, **_):
        seen.append((prompts, answer, hint))
        return [float(i) for i in range(len(prompts))]

    state = init_state(policy, config)
    run = prepare.Run(config, tmp_path, console, policy, Rewards(spy=reward), stream, [])
    experience = train.collect_experience(run, Phases(), state, 0.0)
    ((prompts, answers, hints),) = seen
    assert [item.problem.prompt for item in experience.problems] == prompts[:: config.num_generations]
    assert experience.problems == stream.at(0, config.num_prompts)
    assert {prompt.split()[0] for prompt in prompts} == {"letters", "numbers"}
    for prompt, answer, hint in zip(prompts, answers, hints, strict=True):
        stem, number = prompt.rstrip("?").split()
        assert (answer, hint) == (number, f"{stem}-{number}")


def test_a_curriculum_by_a_column(tmp_path):
    """Over all datasets together; values without an order, and records without one, are told."""
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, levels in zip(files, ([3, 1.5, None], [2, 1]), strict=True):
        rows = [{"question": f"{path.stem}{level}", "answer": "1", "level": level} for level in levels]
        path.write_text("\n".join(map(json.dumps, rows)))
    tokenizer, console = load_tokenizer(model_path("tiny")), Console(record=True)
    config = Config("tiny", max_prompt_length=256, dataset=tuple(map(str, files)), data_order="level")
    stream, _ = prepare.load_problems(config, tokenizer, console)
    assert [item.problem.prompt for item in stream.at(0, 4)] == ["b1", "a1.5", "b2", "a3"]
    few = dataclasses.replace(config, batch_size=24, num_iterations=2).with_max_steps(len(stream))
    prepare.say_left_out(few, len(stream), console)
    assert "data_order level: 1 rollouts of 3 leave out the last 1 of 4 problems" in console.export_text(clear=False)
    prepare.say_left_out(dataclasses.replace(few, max_steps=4), len(stream), console)
    assert console.export_text(clear=False).count("leave out") == 1
    assert "data_order level: the 4 problems begin anew in step 2\n" in console.export_text(clear=False)
    prepare.say_left_out(dataclasses.replace(few, batch_size=16, max_steps=6), len(stream), console)
    assert "data_order level: the 4 problems begin anew in step 3\n" in console.export_text(clear=False)
    prepare.say_left_out(dataclasses.replace(few, batch_size=32), len(stream), console)
    assert "more than once" not in console.export_text(clear=False)
    prepare.say_left_out(dataclasses.replace(few, batch_size=40), len(stream), console)
    assert "a rollout of 5 prompts has some of the 4 problems more than once" in console.export_text(clear=False)
    assert "texts" not in console.export_text(clear=False)
    assert "left out 1 of 3 records: 1 × no 'level'" in console.export_text()
    stream, _ = prepare.load_problems(dataclasses.replace(config, data_order="sequential"), tokenizer, console)
    assert [item.problem.prompt for item in stream.at(0, 5)] == ["a3", "a1.5", "aNone", "b2", "b1"]
    files[1].write_text('{"question": "q", "answer": "1", "level": "hard"}')
    with pytest.raises(DataError, match="data_order 'level': the column holds number and text, which cannot be sorted"):
        prepare.load_problems(config, tokenizer, console)
    for values, words in (
        ((True, 2), "bool and number"),
        ((math.nan, 2), "NaN and number"),
        ((2**63, 2), "int of more than 64 bits and number"),
        ((-(2**63) - 1, 2), "int of more than 64 bits and number"),
    ):
        with pytest.raises(DataError, match=f"the column holds {words}, which cannot be sorted"):
            prepare.check_sortable("level", values)
    prepare.check_sortable("level", [True, False])
    prepare.check_sortable("level", [-(2**63), 2**63 - 1])
    files[0].write_text("\n".join(json.dumps({"question": "q", "answer": "1", "level": x}) for x in ("medium", "easy")))
    prepare.load_problems(config, tokenizer, console)
    order = "data_order level: its values are texts, in the order 'easy', 'hard', 'medium'; numbers (1, 2) go by size"
    assert order in " ".join(console.export_text().split())
    with pytest.raises(DataError, match="has no column 'difficulty'; its columns are"):
        prepare.load_problems(dataclasses.replace(config, data_order="difficulty"), tokenizer, console)


def test_a_dry_run_in_python_shows_what_train_was_given(tmp_path):
    """Records and a reward of a script, whose first prompt is that of a run; nothing is written, no state returned."""
    records = [{"prompt": [{"role": "user", "content": f"{i} + 1?"}], "level": i} for i in (8, 7)]
    config = Config(
        "tiny", output_dir=str(tmp_path / "run"), prompt_column="prompt", answer_column="", reward_columns=("level",),
        system_prompt="", batch_size=4, num_generations=2, max_completion_length=16, data_order="level",
    )  # fmt: skip

    def mine(prompts, completions, level, **_):
        assert prompts == [[{"role": "user", "content": f"{number} + 1?"}] for number in level]
        return [float(number + len(message["content"])) for [message], number in zip(completions, level, strict=True)]

    console = Console(record=True, file=io.StringIO(), width=140)
    assert train.train(config, console, reward_funcs=mine, train_dataset=records, dry_run=True) is None
    text = console.export_text()
    assert "<|im_start|>user\n7 + 1?<|im_end|>\n" in text and "8 + 1?" not in text and "nothing was written" in text
    assert "  21 for an unreadable answer, 'I do not know.' (mine 21)\n" in text  # 7 + 14 characters
    assert "num_train_epochs 1 of 2 problems: max_steps 1\n" in text and not (tmp_path / "run").exists()


def test_a_dry_run_says_how_many_updates_its_epochs_make(tmp_path):
    options = {"max_steps": -1, "batch_size": 20, "dynamic_sampling": False, "data_order": "sequential"}
    console = Console(record=True, file=io.StringIO(), width=140)
    show_dry_run(runs.config(tmp_path / "run", **options), console)
    prepare.say_left_out(runs.config(tmp_path / "run", **options | {"max_steps": 1}), 4, console)
    text = console.export_text()
    assert text.count("a rollout of 5 prompts has some of the 4 problems more than once\n") == 1
    assert "num_train_epochs 1 of 96 problems: max_steps 38\n" in text  # 2 updates for each 5
    assert "data_order sequential: 19 rollouts of 5 leave out the last 1 of 96 problems\n" in text


def test_kernels_that_cannot_run_are_refused(tmp_path, capsys, nothing_compiled_ahead):
    short = ["--max-prompt-length", "80", "--max-completion-length", "16"]
    tiny = ["--model", "tiny", "--dataset", str(runs.PROBLEMS), *short]
    fp32 = [*tiny, "--dtype", "float32"]  # what no kernel takes, not even on a Hopper GPU
    for flags, words in [
        ([*tiny, "--weight-format", "nf4", "--matmul-kernel", "mosaic_gpu"], "needs weights of NVFP4 or MXFP4"),
        ([*fp32, "--weight-format", "nvfp4", "--matmul-kernel", "mosaic_gpu"], "implementation 'mosaic_gpu' needs"),
    ]:
        assert train.main([*flags, "--output-dir", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and words in error, error
    assert not (tmp_path / "out").exists()
