"""`tools/pretrain.py`: the corpus, the training model against ours and transformers', and a short training."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from qerl_jax import LoraConfig, load_policy, policy_logits
from qerl_jax.data.word_problems import word_problem
from qerl_jax.io.assets import model_path

OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


@pytest.fixture(scope="module")
def tools():
    """The modules of `tools/pretraining`, and the program."""
    folder = str(model_path("tiny").parent.parent.parent / "tools")
    sys.path.insert(0, folder)
    import pretrain
    from pretraining import corpus, measure, model, solutions, tokenizer

    yield {m.__name__.rpartition(".")[2]: m for m in (pretrain, corpus, measure, model, solutions, tokenizer)}
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def run(tools, tmp_path_factory):
    """A short training with a checkpoint half-way: its directory and printed text."""
    out = tmp_path_factory.mktemp("pretrain") / "policy"
    flags = (
        "--size smoke --steps 24 --warmup 4 --rows 2 --learning-rate 5e-3 --problems 9 --generations 2 --processes 0"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain.py", "--out", str(out), *flags.split(), "--keep", "0.5", "--commit", ""])
        patch.setattr(tools["measure"], "COMPLETION_LENGTH", 24)
        tools["pretrain"].main()
    return out


def test_careful_authors_are_right_and_careless_ones_err(tools):
    """Every equation of a careful solution holds, and its last value is the answer."""
    careless = []
    for index in range(300):
        problem = word_problem("train", 0, index)
        text = tools["solutions"].write_solution(problem, random.Random(index), care=1.0)
        thoughts, answer = text.removeprefix("<think>").split("</think>")
        assert answer in (problem.answer, f"<answer>{problem.answer}</answer>")
        for word in thoughts.replace(",", " ").split():
            sides = word.rstrip(".").split("=")
            values = {value_of(side) for side in sides} if len(sides) > 1 else {0}
            assert len(values) == 1, text
        wrong = tools["solutions"].write_solution(problem, random.Random(index), care=0.0)
        careless.append(problem.answer in wrong.split("</think>")[1])
    assert np.mean(careless) < 0.25  # some mistakes do no harm


def value_of(side: str) -> int:
    """`a`, `a op b` or a sum."""
    for op, apply in OPERATORS.items():
        if op in side:
            numbers = [int(number) for number in side.split(op)]
            return sum(numbers) if op == "+" else apply(*numbers)
    return int(side)


@pytest.mark.parametrize(("left", "right", "parts"), [(345, 6, [1800, 240, 30]), (12, 37, [370, 74]), (20, 7, [140])])
def test_partial_products_by_hand(tools, left, right, parts):
    assert tools["solutions"].partial_products(left, right) == parts and sum(parts) == left * right


def test_recipe_sets_care_and_length(tools):
    """Means over documents against the recipe's probabilities; 400 draws, 5 standard errors."""
    corpus = tools["corpus"]
    for decay, expected in ((0.5, 1.99), (1.0, 5.5)):  # mean of n with weights decay^n, n = 1 to 10
        drawn = [corpus.document(corpus.Recipe(3, 1.0, decay), i)[0].operations for i in range(400)]
        assert abs(np.mean(drawn) - expected) < 5 * np.std(drawn) / 20
    right = [
        f"<answer>{p.answer}<" in text for p, text in (corpus.document(corpus.Recipe(3, 1.0), i) for i in range(400))
    ]
    assert abs(np.mean(right) - 0.97) < 5 * math.sqrt(0.97 * 0.03 / 400)
    assert (
        corpus.document(corpus.Recipe(1), 5)
        == corpus.document(corpus.Recipe(1), 5)
        != corpus.document(corpus.Recipe(2), 5)
    )


def test_packing_keeps_every_document(tools):
    rng = random.Random(0)
    documents = [
        ([rng.randrange(5, 90)] * rng.randint(40, 200), [i % 90 + 5] * rng.randint(10, 250)) for i in range(60)
    ]
    rows = tools["corpus"].pack(documents, padding=0)
    found = []
    for tokens, segments, targets in zip(*rows, strict=True):
        for number in range(1, segments.max() + 1):
            inside = segments == number
            assert np.ptp(np.flatnonzero(inside)) == inside.sum() - 1
            found.append((tokens[inside & ~targets].tolist(), tokens[inside & targets].tolist()))
    assert sorted(found) == sorted(documents)
    assert (rows.tokens[rows.segments == 0] == 0).all() and not rows.targets[rows.segments == 0].any()
    assert len(rows.tokens) <= 1.1 * math.ceil(sum(len(p) + len(s) for p, s in documents) / 512) + 1
    with pytest.raises(ValueError, match="513 tokens, a row 512"):
        tools["corpus"].pack([([1] * 500, [1] * 13)], 0)


def test_processes_do_not_change_the_corpus(tools, run):
    corpus = tools["corpus"]
    one, two = (
        list(itertools.islice(corpus.batches(str(run / "tokenizer.json"), corpus.Recipe(), 300, count), 4))
        for count in (0, 1)
    )
    for a, b in zip(one, two, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
    assert not np.array_equal(one[0].tokens, one[2].tokens)


def test_prompts_of_the_corpus_are_those_of_the_chat_template(tools, run):
    tokenizer = transformers.AutoTokenizer.from_pretrained(run)
    question = word_problem("test", 0, 3).question
    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert tokenizer(tools["tokenizer"].prompt_text(question))["input_ids"] == list(ids)
    assert len(tokenizer) == tools["model"].Size(64, 64, 1, 1, 1).vocabulary


@pytest.mark.parametrize("size", ["30M", "100M"])
def test_sizes_count_without_the_embedding(tools, size):
    about = tools["model"].SIZES[size]
    shapes = jax.eval_shape(lambda: tools["model"].init_params(about, jax.random.key(0)))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    embedding = about.vocabulary * about.hidden
    assert about.parameters() == count and about.parameters(embedding=False) == count - embedding
    assert count - embedding >= int(size.removesuffix("M")) * 1e6
    assert all(n % 64 == 0 for n in (about.hidden, about.ffn, about.head_dim))


def test_forward_is_that_of_the_policy_and_of_transformers(tools, tmp_path):
    """fp32 logits of random weights, biases and norms; packed documents are computed as if alone."""
    model = tools["model"]
    size = dataclasses.replace(model.SIZES["smoke"], vocabulary=96)
    params = jax.tree.map(
        lambda leaf: (leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)).astype(jnp.bfloat16),
        model.init_params(size, jax.random.key(0)),
    )
    assert (
        model.save(params, size, tmp_path) == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    )
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    tokens = np.random.default_rng(0).integers(7, 96, (2, 21))
    segments = np.ones((2, 21), np.int32)
    segments[1, 8:] = 2
    with jax.default_matmul_precision("highest"):
        found = np.asarray(model.forward(params, jnp.asarray(tokens), jnp.asarray(segments), size, jnp.float32))
    policy = load_policy(tmp_path, "bf16", LoraConfig(rank=0), jnp.float32)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for row, part in ((0, slice(0, 21)), (1, slice(0, 8)), (1, slice(8, 21))):
        alone = tokens[row : row + 1, part]
        with torch.no_grad():
            expected = reference(torch.from_numpy(alone)).logits[0].numpy()
        np.testing.assert_allclose(found[row, part], expected, atol=2e-4, rtol=1e-4)
        np.testing.assert_allclose(policy_logits(policy, jnp.asarray(alone))[0], expected, atol=2e-4, rtol=1e-4)


def test_a_batch_is_learned(tools):
    """Loss at the start is that of guessing; the same batch again and again is learned by heart."""
    pretrain, model = tools["pretrain"], tools["model"]
    size = dataclasses.replace(model.SIZES["smoke"], vocabulary=96)
    tokens = np.random.default_rng(0).integers(7, 96, (2, 64)).astype(np.int16)
    rows = tools["corpus"].Rows(tokens, np.ones((2, 64), np.uint8), np.ones((2, 64), bool))
    state, losses = pretrain.start(size, 0), []
    for _ in range(60):
        state, loss = pretrain.train_step(state, rows, jnp.float32(1e-2), size, jnp.float32)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(math.log(96) + 0.5, abs=0.3)  # logits of unit variance cost half a nat more
    assert losses[-1] < 0.2 * losses[0]


def test_matrices_decay_and_norms_do_not(tools):
    model = tools["model"]
    params = model.init_params(model.SIZES["smoke"], jax.random.key(0))
    decays = tools["pretrain"].is_matrix(params)
    assert decays["embed"] and not decays["norm"]
    assert {name for name, value in decays["layers"].items() if value} == set(model.SIZES["smoke"].projections())


def test_the_run_leaves_policies_and_a_record(run):
    record = json.loads((run / "pretraining.json").read_text())
    last, half = record["rows"]
    assert (last["share"], half["share"]) == (1.0, 0.5) and last["steps"] == 24
    for row, directory in ((last, run), (half, run.with_name("policy-50"))):
        assert row["sha256"] == hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
        assert load_policy(directory, None, LoraConfig(rank=0), jnp.float32).tokenizer is not None
    assert last["sha256"] != half["sha256"]
    assert last["loss"] < 6.0 < math.log(640)  # falls from that of guessing
    assert 0 < last["heldout"]["entropy"] < math.log(640) and last["heldout"]["problems"] == 9
    assert 0.08 < last["weights"]["nvfp4_error"] < 0.11 and last["weights"]["block_amax"] == pytest.approx(
        2.07, abs=0.1
    )


def test_learning_rate_by_hand(tools):
    args = type("Arguments", (), {"learning_rate": 2.0, "warmup": 10})
    rates = [tools["pretrain"].rate_at(step, 110, args) for step in (0, 4, 9, 10, 60, 109)]
    assert rates == pytest.approx([0.2, 1.0, 2.0, 2.0, 1.0, 1 + math.cos(math.pi * 0.99)])
    assert tools["pretrain"].rate_at(20, None, args) == 2.0


@pytest.mark.parametrize(
    "flags", [["--steps", "9", "--warmup", "9"], ["--keep", "1"], ["--steps", "9", "--seconds", "3"]]
)
def test_contradictory_flags(tools, flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--out", "x", *flags])
    with pytest.raises(SystemExit):
        tools["pretrain"].arguments()
    assert flags[0] in capsys.readouterr().err


def test_seconds_settle_the_number_of_steps(tools, monkeypatch):
    """A clock that shows one second more at each look: 20 steps in one second, so that 6 seconds are 120 steps."""
    pretrain, ticks = tools["pretrain"], itertools.count()
    monkeypatch.setattr(pretrain.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(pretrain, "train_step", lambda state, *_: (state, jnp.float32(1)))
    args = type(
        "Arguments", (), dict(steps=None, seconds=6.0, warmup=10, learning_rate=1.0, seed=0, keep=[0.25], rows=1)
    )
    kept = []
    found = pretrain.pretrain(
        args, tools["model"].SIZES["smoke"], itertools.repeat(None), lambda share, _: kept.append(share)
    )
    assert found["steps"] == 120 and kept == [0.25, 1.0]
    args.keep = [0.1]
    with pytest.raises(SystemExit, match=r"--keep \[0.1\]: 120 steps are settled after 21"):
        pretrain.pretrain(args, tools["model"].SIZES["smoke"], itertools.repeat(None), lambda share, _: None)
