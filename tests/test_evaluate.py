"""The command line of the evaluation: datasets by name and path, what it tells, bad input."""

import dataclasses
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from command_lines import replaced
from helpers import randomized
from replicas import on_replicas

import qerl_jax
from qerl_jax import keys
from qerl_jax.checkpoint.adapter import export_adapter
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.load import load_policy
from qerl_jax.config import Config
from qerl_jax.data.presets import PROMPT_FORMATS
from qerl_jax.evaluate import main, parse, problems_at_once, run
from qerl_jax.evaluation import Evaluation
from qerl_jax.lowered import as_in_sources
from qerl_jax.models.lora import LoraConfig
from qerl_jax.rollout.decode import cast_lora
from qerl_jax.types import Sampling

pytestmark = pytest.mark.usefixtures("kept_programs_forgotten")

SHORT = ["--max-prompt-length", "120", "--max-completion-length", "4", "--batch-size", "4", "--dtype", "float32"]
TOO_LONG = ["--dataset", "arithmetic", "--samples", "3", "--max-prompt-length", "4"]


def test_a_local_copy_of_a_preset(data, tmp_path, capsys):
    """Five records, one without a number for an answer, and four tokens, in which no answer can be given. An earlier
    result is replaced.
    """
    output = tmp_path / "result.json"
    output.write_text(json.dumps(dataclasses.asdict(Evaluation(0.5, 0.4, 0.6, 0.9, 1, 0, 12.5, 200, 1))))
    flags = ["--dataset", f"gsm8k:{data / 'presets' / 'gsm8k'}", "--split", "train", "--system-prompt", ""]
    assert main(["tiny", *flags, *SHORT, "--temperature", "0", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("left out 1 of 5 records: 1 × no single number after '####' in 'answer'") == 1
    assert "4 problems" in printed
    result = runs.read_json(output)
    assert (result["problems"], result["truncated"], result["accuracy"]) == (4, 1.0, 0.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dataset", "gsm9k"], "did you mean 'gsm8k'?"),
        (["--dataset", "codeforces"], "'codeforces' has no split 'test' on the hub, only ['train']"),
        (TOO_LONG, "max_prompt_length 4; the shortest has"),
        ([*TOO_LONG, "--overlong-prompts", "error"], "the prompt of problem 0 has"),
        (["--reward-workers", "-1"], "reward_workers must be at least 0, got -1"),
        (["--reward-timeout", "0"], "reward_timeout must be above 0, got 0.0"),
        (["--max-completion-length", "0"], "max_completion_length must be at least 1, got 0"),
        (
            ["--dataset", "arithmetic", "--samples", "3", "--max-completion-length", "510"],
            "and 510 new ones exceed the model's max_position_embeddings 512",
        ),
        (["--output", "."], "output . is a directory: name a file"),
        (["--records", "."], "records . is a directory: name a file"),
        (["--dataset", "arithmetic", "--records", "/dev/null"], "records /dev/null is a device or a pipe"),
        (["--output", "a.jsonl", "--records", "tests/../a.jsonl"], "output and records are the same file, a.jsonl"),
        (["--problems-at-once", "0"], "problems_at_once must be at least 1, got 0"),
        (
            ["--backend", "vllm", "--dtype", "bfloat16", "--matmul-kernel", "xla"],
            "matmul_kernel 'xla' contradicts backend 'vllm'",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, words, capsys):
    """Before a model is loaded."""
    assert main(["tiny", *replaced(SHORT, *flags)]) == 2
    printed, error = capsys.readouterr()
    assert error.startswith("error: ") and words in error and error.count("\n") == 1 and "loading" not in printed


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("--backend vllm", {"rollout_backend": "vllm", "matmul_kernel": "auto"}),
        ("--matmul-kernel xla", {"rollout_backend": "jax", "matmul_kernel": "xla"}),
        ("--output a.json --records b.jsonl --problems-at-once 1", {"rollout_backend": "jax"}),
    ],
)
def test_each_half_of_a_contradiction_is_taken(words, fields):
    _, config = parse(["tiny", *words.split()])
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize("text", ['{"question": "1 + 1?", "answer": "2"}\n', '{"before": {}}', "[]", "a: b"])
def test_output_replaces_nothing_but_a_result(tmp_path, capsys, text):
    """Not the dataset, not a run's evaluation.json, not a config."""
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    assert main(["tiny", "--dataset", str(file), *SHORT, "--output", str(file)]) == 2
    said = f"error: output {file} is no result of an evaluation, so it is not replaced: name another\n"
    assert (capsys.readouterr().err, file.read_text()) == (said, text)


def test_a_result_that_cannot_be_written_is_printed_all_the_same(tmp_path, capsys):
    """A disk that is full at the end."""
    flags = ["--dataset", "arithmetic", "--samples", "4", *SHORT, "--output", str(tmp_path / "result.json")]
    with runs.full_disk(10):
        assert main(["tiny", *flags, "--temperature", "0"]) == 2  # with the programs of the first test
    printed = capsys.readouterr()
    assert "4 problems" in printed.out and "format" in printed.out
    assert printed.err.startswith("error: ") and "result.json cannot be written: " in printed.err


def test_an_adapter_and_the_model_that_peft_merges_it_into_answer_alike(tmp_path):
    """Greedy in fp32, by the records: the same completions and verdicts."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    policy = load_policy(model_path("tiny"), lora=LoraConfig(2), dtype=jnp.float32)
    export_adapter(randomized(policy, 0, 0.15), tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype="float32")
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(model_path("tiny") / name, tmp_path / "merged")
    found = []
    for number, model in enumerate((["tiny", "--adapter", tmp_path / "adapter"], [tmp_path / "merged"])):
        file = tmp_path / f"{number}.jsonl"
        flags = ["--dataset", "arithmetic", "--samples", "8", "--temperature", "0", "--records", str(file)]
        assert main([*map(str, model), *flags, *replaced(SHORT, "--max-completion-length", "60")]) == 0
        found.append([json.loads(line) for line in file.read_text().splitlines()[1:]])
    adapted, whole = found
    assert adapted == whole and {verdict for item in whole for verdict in item["verdicts"]} & {"correct", "wrong"}


@pytest.mark.parametrize(
    ("trained", "flags", "format", "line"),
    [
        ("nvfp4", [], "Nvfp4", ""),
        ("nf4", ["--weight-format", "bf16"], "Dense", "was trained on weights in NF4, its base has them in BF16 here"),
        (None, [], "Dense", ""),
        ("unsaid", [], "Dense", "on weights of which format it was trained, its base has them in BF16 here"),
    ],
)
def test_an_adapter_is_evaluated_on_weights_as_it_was_trained_on(tmp_path, capsys, trained, flags, format, line):
    """On a base that was quantized while loading; said where formats differ. The last adapter is as peft writes it."""
    kind = None if trained == "unsaid" else trained
    policy = load_policy(model_path("tiny"), kind, LoraConfig(2), jnp.float32)
    export_adapter(policy, tmp_path / "adapter", norms=False)
    if trained == "unsaid":
        (tmp_path / "adapter/README.md").write_text("---\nlibrary_name: peft\n---\nweight_format: nf4\n")

    def generate(policy, *_):
        raise ValueError(type(policy.frozen["layers"][0]["self_attn"]["o_proj"]["weight"]).__name__)

    words = ["tiny", "--adapter", str(tmp_path / "adapter"), "--dataset", "arithmetic", "--samples", "2", *SHORT]
    assert main([*words, *flags], generate) == 2
    printed = capsys.readouterr()
    assert printed.err == f"error: {format}\n" and line in printed.out
    assert f"weights in {'NVFP4' if format == 'Nvfp4' else 'BF16'}, computed in float32\n" in printed.out
    assert bool(line) == ("the adapter" in printed.out)


def test_what_is_left_out_is_told_before_anything_is_sampled(data, capsys):
    """The first part has the problems of 8 batches of 4 completions, rounded up, and its programs are those of all
    parts. Seed, sampling and form of the answer are those of the flags.
    """

    def generate(policy, prompts, sampling, key, engine):
        asked = PROMPT_FORMATS["boxed"]  # of think and answer blocks the template asks itself
        text = policy.tokenizer.decode(np.asarray(prompts.tokens[0]).tolist())
        assert text.startswith(f"<|im_start|>system\n{asked}<")
        wanted = keys.for_step(5, keys.Purpose.EVALUATE, 0)
        assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(wanted))
        assert sampling == Sampling(4, temperature=0.5, top_p=0.9, num_generations=12)
        raise ValueError(f"{len(prompts.ids)} prompts in programs for {engine.prompts}, {engine.slots} at a time")

    flags = ["--dataset", f"gsm8k:{data / 'presets' / 'gsm8k'}", "--split", "train", *SHORT]
    flags += ["--seed", "5", "--num-generations", "12", "--temperature", "0.5", "--top-p", "0.9"]
    flags += ["--prompt-format", "boxed"]
    for more, at_once in (([], 3), (["--problems-at-once", "9"], 4)):  # there are four
        assert main(["tiny", *flags, *more], generate) == 2
        printed = capsys.readouterr()
        assert "left out 1 of 5 records" in printed.out
        assert printed.err == f"error: {at_once} prompts in programs for {at_once}, 4 at a time\n"


def test_a_process_has_programs_for_its_share():
    """Of three problems two, also where it has one."""
    arguments, config = parse(["tiny", "--dataset", "arithmetic", "--samples", "3", "--reward-workers", "0", *SHORT])

    def generate(policy, prompts, sampling, key, engine):
        raise ValueError(f"{len(prompts.ids)} in programs for {engine.prompts}")

    found = on_replicas(2, lambda replicas: run(arguments, config, generate, replicas))
    assert list(map(str, found)) == ["2 in programs for 2", "1 in programs for 2"]


def test_each_process_has_eight_batches_unless_told():
    config = Config(eval_batch_size=64, eval_num_generations=3)  # 170.7 problems
    assert problems_at_once(None, None, config, 1) == 171 and problems_at_once(None, None, config, 8) == 8 * 171
    assert problems_at_once(None, 50, config, 2) == 50 and problems_at_once(9, 50, config, 2) == 9
    assert problems_at_once(None, "50", config, 2) == problems_at_once(None, 0, config, 2) == 342


def test_programs_are_kept_lowered(tmp_path, capsys):
    """By the command, beside the compiled ones. (`jax.clear_caches`: another test may have traced the program.)"""

    def generate(policy, *_):
        jax.clear_caches()
        cast_lora(policy)
        raise ValueError(*(path.name.split("-")[0] for path in (tmp_path / "lowered").iterdir()))

    was = jax.config.jax_compilation_cache_dir
    try:
        words = ["tiny", "--dataset", "arithmetic", "--samples", "2", "--compilation-cache-dir", str(tmp_path), *SHORT]
        with as_in_sources():
            assert main(words, generate) == 2
    finally:
        jax.config.update("jax_compilation_cache_dir", was)
    assert capsys.readouterr().err == "error: cast_lora\n"


def test_the_command_does_not_shadow_the_function():
    assert sys.modules["qerl_jax.evaluate"].main is main
    assert qerl_jax.evaluate is qerl_jax.evaluation.evaluate


def test_a_flag_for_every_shared_field_of_the_config(capsys):
    """Flags keep their own names, in the help and in errors; types, defaults and descriptions are those of Config."""
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    own = ["dataset", "split", "samples", "output", "max-prompt-length", "records", "problems-at-once"]
    for flag in [*own, "adapter", "system-prompt", "top-p", "batch-size", "batch-invariant", "seed"]:
        assert f"--{flag}" in text
    assert "--eval" not in text and "(default: 0.6)" in text and "truncate_left" in text
    assert main(["tiny", "--num-generations", "0"]) == 2
    assert capsys.readouterr().err == "error: num_generations must be at least 1, got 0\n"
