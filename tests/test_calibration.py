"""`quantize --calibration`: the folded model is the same function, the checkpoint is one of the usual layout, and its
report agrees with the models that were written.
"""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
import small
import torch
from flax import nnx
from helpers import fp32_policy, logits_of
from oracles import torch_qwen2

from qerl_jax import quantize
from qerl_jax.data.arithmetic import arithmetic_problem
from qerl_jax.data.files import DataError
from qerl_jax.data.texts import load_texts
from qerl_jax.io import assets, names
from qerl_jax.io.folding import READS, FoldedTensors, LayerScales, exact
from qerl_jax.io.hf_config import model_config
from qerl_jax.io.quantize import quantize_checkpoint
from qerl_jax.io.safetensors import DTYPES, open_checkpoint, save
from qerl_jax.io.tokenizer import load_tokenizer
from qerl_jax.models.awq import queries_columns, values_rows
from qerl_jax.models.config import LAYER_NORMS
from qerl_jax.run import layer_streams
from qerl_jax.run.calibrate import calibrate_checkpoint

TEXTS, LENGTH = 96, 160
TOGETHER = 25  # texts of a batch


def write_texts(path, split: str, count: int):
    """Solved word problems as conversations."""
    rows = []
    for index in range(count):
        problem = arithmetic_problem(split, 0, index)
        steps = "\n".join(map(str, problem.steps))
        reply = f"<think>{steps}</think><answer>{problem.answer}</answer>"
        turns = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": reply}]
        rows.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(rows))
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bundled policy calibrated by the command, and rounded to nearest; the texts, and what was printed."""
    place = tmp_path_factory.mktemp("calibrated")
    texts = write_texts(place / "texts.jsonl", "train", 200)
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))
        flags = [
            "--calibration",
            str(texts),
            "--calibration-sequences",
            str(TEXTS),
            "--calibration-tokens",
            str(LENGTH),
        ]
        assert quantize.main(["tiny", str(place / "calibrated"), *flags]) == 0
    quantize_checkpoint(assets.model_path("tiny"), place / "rounded")
    return place, "\n".join(printed)


def kl_of(place, texts) -> dict[str, np.ndarray]:
    """KL(unquantized ‖ quantized) summed over each text, by torch from logits of the loaded policies in batches."""
    policies = {name: fp32_policy(place / name, rank=0) for name in ("rounded", "calibrated")}
    policies["exact"] = fp32_policy(assets.model_path("tiny"), rank=0)
    lengths = np.array([len(text) for text in texts])
    tokens = np.zeros((-(-len(texts) // TOGETHER) * TOGETHER, lengths.max()), np.int32)
    for row, text in zip(tokens, texts, strict=False):
        row[: len(text)] = text
    found: dict[str, list[float]] = {"rounded": [], "calibrated": []}
    for first in range(0, len(texts), TOGETHER):
        rows, ends = tokens[first : first + TOGETHER], lengths[first : first + TOGETHER]
        mask = np.arange(tokens.shape[1]) < np.pad(ends, (0, TOGETHER - len(ends)), constant_values=1)[:, None]
        logits = {name: np.array(logits_of(policy, rows, mask)) for name, policy in policies.items()}
        for i, end in enumerate(ends):
            logp = {name: torch.tensor(of[i, : end - 1]).double().log_softmax(-1) for name, of in logits.items()}
            for name, sums in found.items():
                kl = torch.nn.functional.kl_div(logp[name], logp["exact"], reduction="sum", log_target=True)
                sums.append(kl.item())
    return {name: np.array(sums) for name, sums in found.items()}


def test_the_report_agrees_with_the_models_that_were_written(written):
    place, printed = written
    report = json.loads((place / "calibrated" / "calibration.json").read_text())
    tokenizer = load_tokenizer(assets.model_path("tiny"), 512)
    texts = load_texts(place / "texts.jsonl", tokenizer, TEXTS, LENGTH)
    heldout = sorted(texts[3::4], key=len)
    assert (report["texts"], report["sequences"]) == ("texts.jsonl", TEXTS - len(heldout))
    assert report["tokens"] == sum(map(len, texts)) - sum(map(len, heldout))
    assert report["heldout_tokens"] == [len(text) - 1 for text in heldout]
    expected = kl_of(place, heldout)
    for kind, sums in expected.items():
        np.testing.assert_allclose(report["kl"][kind], sums, rtol=2e-3, atol=1e-5)
        mean = sums.sum() / sum(report["heldout_tokens"])
        assert report["mean_kl"][kind] == pytest.approx(mean, rel=1e-3)
        assert f"{report['mean_kl'][kind]:.3g}" in printed
    gain = 1 - expected["calibrated"].sum() / expected["rounded"].sum()
    assert report["kl_reduction"]["value"] == pytest.approx(gain, abs=2e-3)
    assert report["kl_reduction"]["low"] < gain < report["kl_reduction"]["high"]


def test_the_first_layers_errors_are_those_of_the_models_that_were_written(written):
    """Outputs from the residual streams of the loaded policies, which share the embedding; weights from the files."""
    place, _ = written
    report = json.loads((place / "calibrated" / "calibration.json").read_text())
    tokenizer = load_tokenizer(assets.model_path("tiny"), 512)
    heldout = load_texts(place / "texts.jsonl", tokenizer, TEXTS, LENGTH)[3::4]

    @jax.jit
    def residuals(policy, tokens, mask):
        merged = nnx.merge(policy.graphdef, policy.frozen, policy.norms, policy.lora)
        return merged.residuals(tokens, mask)[:2]

    def streams(name, text):
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(text)] = text
        found = residuals(policies[name], tokens, np.arange(LENGTH)[None] < len(text))
        return [np.asarray(x, np.float64)[:, : len(text)] for x in found]

    policies = {name: fp32_policy(place / name, rank=0) for name in ("rounded", "calibrated")}
    policies["exact"] = fp32_policy(assets.model_path("tiny"), rank=0)
    for kind in ("rounded", "calibrated"):
        sums = np.zeros(2)
        for text in heldout[:6]:
            (before, after), (_, found) = streams("exact", text), streams(kind, text)
            sums += ((found - after) ** 2).sum(), ((after - before) ** 2).sum()
        error = np.sqrt(sums[0] / sums[1])
        assert report["layers"][0]["outputs"][kind] == pytest.approx(error, rel=0.1)  # 6 of 24 texts
    errors = [layer["outputs"]["calibrated"] / layer["outputs"]["rounded"] for layer in report["layers"]]
    assert max(errors) < 0.9


def test_calibration_beats_round_to_nearest_on_unseen_text(written):
    """On texts of the held-out split, of which calibration has seen nothing: at least a fifth of the KL is gone."""
    place, _ = written
    texts = write_texts(place / "unseen.jsonl", "heldout", 150)
    ids = load_texts(texts, load_tokenizer(assets.model_path("tiny"), 512), 150, 512)
    found = kl_of(place, ids)
    assert found["calibrated"].sum() < 0.8 * found["rounded"].sum()


def test_the_layout_is_that_of_round_to_nearest(written):
    """Names, dtypes, shapes and config; q, k, v and gate, up share a global scale; other files are copied."""
    place, _ = written
    ours, plain = (open_checkpoint(place / name) for name in ("calibrated", "rounded"))
    assert {name: ours.spec(name) for name in ours} == {name: plain.spec(name) for name in plain}
    configs = [json.loads((place / name / "config.json").read_text()) for name in ("calibrated", "rounded")]
    assert configs[0] == configs[1]
    for layer in range(4):
        for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            values = {float(ours[f"{names.projection(layer, part)}.weight_global_scale"][0]) for part in group}
            assert len(values) == 1
    assert not np.array_equal(ours[names.layer_norm(0, LAYER_NORMS[0])], plain[names.layer_norm(0, LAYER_NORMS[0])])
    files = {path.name for path in (place / "rounded").iterdir()}
    assert {path.name for path in (place / "calibrated").iterdir()} == files | {"calibration.json"}


def random_scales(model, seed: int, v_biases, norms) -> list[LayerScales]:
    """Scales of any size that can be folded: query heads share o's, and the stored vectors are divided exactly."""
    rng, shapes = np.random.default_rng(seed), model.projection_shapes()
    found = []
    for layer in range(model.num_layers):
        scales = {fused: rng.lognormal(size=shapes[part][1]).astype(np.float32) for part, fused in READS.items()}
        rows = rng.lognormal(size=shapes["v_proj"][0]).astype(np.float32)
        scales["o_proj"] = queries_columns(exact(v_biases[layer], rows) if v_biases else rows, model)
        for norm, fused in zip(LAYER_NORMS, ("qkv_proj", "gate_up_proj"), strict=True):
            scales[fused] = exact(norms[layer][norm], scales[fused])
        found.append(LayerScales(**scales))
    return found


SHAPES = {"qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", {"head_dim": 12}), "llama": ("Llama", {})}


@pytest.mark.parametrize(("kind", "shape"), SHAPES.values(), ids=SHAPES)
def test_a_folded_model_is_the_same_function(tmp_path, kind, shape):
    """Scales from 1/20 to 20, norms and biases stored in bf16: the logits move by fp32 rounding alone."""
    source, moved = tmp_path / "source", tmp_path / "moved"
    torch_qwen2.make(source, seed=7, kind=kind, scale=0.2, **shape)
    stored = {
        name: np.array(array).astype(DTYPES["BF16"]) if array.ndim == 1 else np.array(array)
        for name, array in open_checkpoint(source).items()
    }
    save(source / "model.safetensors", stored)
    model = model_config(source)
    layers = range(model.num_layers)
    norms = [{norm: stored[names.layer_norm(layer, norm)] for norm in LAYER_NORMS} for layer in layers]
    biases = [stored[f"{names.projection(layer, 'v_proj')}.bias"] for layer in layers] if model.qkv_bias else []
    folded = FoldedTensors(open_checkpoint(source), model, random_scales(model, 0, biases, norms))
    shutil.copytree(source, moved)
    save(moved / "model.safetensors", folded)
    for name, array in open_checkpoint(moved).items():
        is_moved = "_proj.weight" in name or "v_proj" in name or "layernorm" in name
        assert np.array_equal(array, stored[name]) != is_moved, name
    tokens = np.random.default_rng(0).integers(0, 64, (2, 40))
    expected, found = (np.asarray(logits_of(fp32_policy(path), tokens)) for path in (source, moved))
    np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max(), rtol=0)


def test_exact_scales_by_hand():
    """bf16 holds 1.0078125 and 1.015625, nothing between: 1.3 / 1.29 = 1.00775 becomes the first."""
    vector = np.array([1.3, 0.0, 2.0**-120, 1.0], np.float32).astype(DTYPES["BF16"])
    found = exact(vector, np.array([1.29, 3.0, 2.0**30, 0.5], np.float32))
    assert found[0] == np.float32(1.296875) / np.float32(1.0078125)  # bf16(1.3) = 1.296875
    assert found[1] == 3 and found[2] == 1 and found[3] == 0.5  # 2^-150 is no number: that one stays


def test_query_heads_share_scales(written):
    """values_rows takes them back; two query heads of each key/value head."""
    model = model_config(assets.model_path("tiny"))
    rows = np.arange(1, 65, dtype=np.float32)
    columns = queries_columns(rows, model)
    assert columns.reshape(2, 2, 32)[1, 0].tolist() == columns.reshape(2, 2, 32)[1, 1].tolist() == list(range(33, 65))
    np.testing.assert_array_equal(values_rows(columns, model), rows)


def test_recorded_inputs_are_those_of_transformers(tmp_path):
    """By hooks on the projections; right padding changes nothing."""
    model = torch_qwen2.make(tmp_path, seed=8, kind="Qwen2", scale=0.2)
    texts = [np.random.default_rng(i).integers(0, 64, n).astype(np.int32) for i, n in enumerate((9, 20, 5))]
    seen: dict[str, list[np.ndarray]] = {}
    layer = model.model.layers[0]
    hooks = {"qkv_proj": layer.self_attn.q_proj, "o_proj": layer.self_attn.o_proj, "gate_up_proj": layer.mlp.up_proj}
    for fused, module in {**hooks, "down_proj": layer.mlp.down_proj}.items():
        keep = lambda _, inputs, fused=fused: seen.setdefault(fused, []).append(inputs[0][0].double().numpy())  # noqa: E731
        module.register_forward_pre_hook(keep)
    with torch.no_grad():
        for text in sorted(texts, key=len):
            model(input_ids=torch.tensor(text[None].astype(np.int64)))
    tensors, config = open_checkpoint(tmp_path), model_config(tmp_path)
    streams = layer_streams.LayerStreams(tensors, config, texts, texts[:1], ("rounded",))
    found = streams.pass_exact(streams.read_layer(tensors, 0))
    assert streams.tokens == 34
    for fused, values in seen.items():
        expected = np.concatenate(values)
        np.testing.assert_allclose(found[fused].samples, expected, atol=2e-5)  # fewer than 512 tokens: all of them
        np.testing.assert_allclose(found[fused].mean_squares, (expected**2).mean(0), rtol=1e-4, atol=1e-7)


def test_progress_counts_layers_then_tensors(tmp_path):
    """The two bars of the command; the second rises to the number of the checkpoint's tensors."""
    source, told = small.bf16(tmp_path / "source", shards=1), []
    texts = write_texts(tmp_path / "texts.jsonl", "train", 4)
    calibrate_checkpoint(source, tmp_path / "out", texts, 4, 8, progress=lambda *step: told.append(step))
    count = len(open_checkpoint(source))
    assert told[:2] == [("calibrate", 1, 2), ("calibrate", 2, 2)]
    done = [each for _, each, _ in told[2:]]
    assert {(stage, total) for stage, _, total in told[2:]} == {("quantize", count)}
    assert done == sorted(done) and (done[0], done[-1]) == (0, count) and len(set(done)) > count / 2


ROWS = {
    "text": ({"text": "Two and two."}, "Two and two."),
    "prompt": ({"prompt": "Two and "}, "Two and "),
    "completion": ({"prompt": "Two and ", "completion": "two."}, "Two and two."),
    "messages": (
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]},
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n",
    ),
    "conversations in two columns": (
        {"prompt": [{"role": "system", "content": "S"}], "completion": [{"role": "assistant", "content": "A"}]},
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n",
    ),
}


@pytest.mark.parametrize(("row", "text"), ROWS.values(), ids=ROWS)
def test_rows_of_calibration_texts(tmp_path, row, text):
    tokenizer = load_tokenizer(assets.model_path("tiny"), 512)
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in (row, {"text": ""}, row, row)))
    expected = tokenizer(text)["input_ids"]
    found = load_texts(path, tokenizer, 2, 6)  # the empty one is passed over, the last not reached
    assert [ids.tolist() for ids in found] == [expected[:6]] * 2


BAD_ROWS = {
    "no column": ({"question": "x"}, "line 1.*question.*'text', 'messages' or 'prompt'"),
    "a number": ({"text": 3}, "neither text nor a list"),
    "a completion alone": ({"completion": "x"}, "expected 'text'"),
    "text and list": ({"prompt": "x", "completion": []}, "neither text nor a list"),
    "a role": ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
    "no content": ({"messages": [{"role": "user"}]}, "no content as text"),
}


@pytest.mark.parametrize(("row", "said"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_are_named(tmp_path, row, said):
    (tmp_path / "texts.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=said):
        load_texts(tmp_path / "texts.jsonl", load_tokenizer(assets.model_path("tiny"), 512), 4, 8)


def test_refusals_of_the_command(stories_dir, tmp_path, capsys):
    """One line, and nothing is written."""
    few = write_texts(tmp_path / "few.jsonl", "train", 3)
    bare = tmp_path / "bare"
    shutil.copytree(assets.model_path("tiny"), bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    before = sorted(path.name for path in tmp_path.iterdir())
    for model, flags, said in (
        ("tiny", ["--calibration-tokens", "8"], "--calibration-tokens 8 goes with --calibration, which is not given"),
        ("tiny", ["--calibration-sequences", "8"], "--calibration-sequences 8 goes with --calibration"),
        ("tiny", ["--calibration", str(few)], "few.jsonl holds 3 texts of two tokens or more, calibration needs 4"),
        ("tiny", ["--calibration", str(few), "--calibration-sequences", "2"], "got 2 of 256"),
        ("tiny", ["--calibration", str(tmp_path / "none.jsonl")], "none.jsonl is no file"),
        (str(bare), ["--calibration", str(few)], "has no tokenizer"),
        (str(stories_dir), ["--calibration", str(few)], "divisible by 16, got a weight of 64 x 172"),
    ):
        assert quantize.main([model, str(tmp_path / "out"), *flags]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
