"""`tools/bench_vllm.py` and the checks of `tools/bench_rollout.py`, without a GPU and without vLLM."""

import argparse
import json
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from qerl_kernels.nvfp4_matmul.reference import dequantize

from qerl_jax.models.formats import Nvfp4

torch = pytest.importorskip("torch")


@pytest.fixture
def bench(tool):
    return tool("bench_vllm")


def test_random_weights_have_the_published_scale(bench):
    """Filled as a checkpoint's parameters, they decode to standard deviation 0.02 and mean 0."""
    torch.manual_seed(0)
    codes, scales = torch.zeros(256, 128, dtype=torch.uint8), torch.zeros(256, 16, dtype=torch.float8_e4m3fn)
    divisor, bias, norm = torch.zeros(3), torch.zeros(4096, dtype=torch.bfloat16), torch.zeros(8)
    layer = "model.layers.0.self_attn.qkv_proj."
    for name, values in (
        (layer + "weight_packed", codes),
        (layer + "weight_scale", scales),
        (layer + "weight_global_scale", divisor),
        (layer + "bias", bias),
        ("model.norm.weight", norm),
    ):
        assert bench.fill(name, values)
    assert scales.float().min() == 32 and scales.float().max() == 60
    e4m3 = scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    weight = Nvfp4(codes.numpy(), e4m3, np.full(256, divisor[0].item(), np.float32), True)
    decoded = np.asarray(dequantize(weight), np.float32)
    assert abs(decoded.std() / 0.02 - 1) < 0.03 and abs(decoded.mean()) < 3e-4
    assert abs(bias.float().std() / 0.02 - 1) < 0.05 and (norm == 1).all()


def test_the_cache_holds_the_largest_batch(bench, tmp_path):
    """A token of 7B takes 28 layers · 2 · 4 heads · 128 · 2 bytes = 57,344 bytes; 300 + 100 tokens are 25 blocks."""
    args = argparse.Namespace(size="7B", batch=[8, 32], prompt_len=300, new_tokens=93, lora_rank=0)
    options = bench.engine_options(args, tmp_path)
    assert options["kv_cache_memory_bytes"] == (32 * 400 + 256) * 57344
    assert options["max_model_len"] == 393 and options["max_num_seqs"] == 32 and "enable_lora" not in options
    assert bench.engine_options(argparse.Namespace(**{**vars(args), "lora_rank": 16}), tmp_path)["max_lora_rank"] == 16


class Completions:
    """Stands for vLLM: a rollout takes 0.5 s and 3 ms a token; `spoil` changes what comes back."""

    def __init__(self, clock, spoil=None):
        self.clock, self.spoil, self.prompts = clock, spoil, set()

    def generate(self, prompts, sampling, use_tqdm, lora_request):
        assert sampling["ignore_eos"] and sampling["temperature"] == 1 and lora_request == "adapter"
        self.prompts |= {tuple(prompt["prompt_token_ids"]) for prompt in prompts}
        self.clock.now += 0.5 + 3e-3 * sampling["max_tokens"]
        tokens = list(range(sampling["max_tokens"]))
        logprobs = [{token: types.SimpleNamespace(logprob=-11.9)} for token in tokens]
        if self.spoil == "short":
            tokens, logprobs = tokens[1:], logprobs[1:]
        if self.spoil == "nan":
            logprobs[-1][tokens[-1]].logprob = float("nan")
        completion = types.SimpleNamespace(token_ids=tokens, logprobs=logprobs)
        return [types.SimpleNamespace(outputs=[completion]) for _ in prompts]


@pytest.fixture
def engine(bench, monkeypatch):
    """Makes an `Engine` around `Completions`."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(bench, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    kind = bench.Engine

    def made(args, folder=None, spoil=None):
        found = object.__new__(kind)
        found.args, found.lora, found.sampling, found.random = args, "adapter", dict, bench.random.Random(0)
        found.llm = Completions(clock, spoil)
        return found

    return made


def test_rows_by_hand(bench, engine, monkeypatch, tmp_path, capsys):
    """132 tokens take 0.896 s, 32 tokens 0.596: 3 ms a step."""
    monkeypatch.setattr(bench, "Engine", engine)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.22.1"))
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        monkeypatch.setenv(name, "1")  # restored afterwards
    command = "bench_vllm.py 7B --batch 2 4 --prompt-len 5 --new-tokens 132 --in-process --native-sampler"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--out", str(tmp_path)])
    bench.main()
    assert "batch    4" in capsys.readouterr().out
    stored = json.loads((tmp_path / "vllm.json").read_text())
    assert stored["meta"]["vllm"] == "0.22.1" and stored["meta"]["command"].startswith("python bench_vllm.py 7B")
    assert [row["batch"] for row in stored["rows"]] == [2, 4]
    row = stored["rows"][1]
    assert row["decode_ms_per_step"] == pytest.approx(3.0) and row["tokens_per_s"] == pytest.approx(4 * 132 / 0.896)
    assert (row["engine"], row["sampler"], row["projections"]) == (
        "calling process",
        "native",
        "CompressedTensorsW4A16Fp4",
    )


GEMM, PROLOGUE = "nvfp4_skinny_m8_lora_x", "decode_prologue_norm_lora"
OTHERS = ["decode_attention_h128", "rope_and_cache", "nvjet_tst_64x8", "loop_add_fusion"]


@pytest.mark.parametrize(
    ("how", "names"),
    [
        (("mosaic_gpu", 8, False), [GEMM, PROLOGUE, *OTHERS]),
        (("mosaic_gpu", 8, True), [GEMM, *OTHERS]),
        (("mosaic_gpu", 256, False), [GEMM, *OTHERS]),
        (("xla", 8, False), OTHERS),
    ],
)
def test_a_row_needs_the_kernels_of_its_implementation(tool, how, names):
    rollouts = tool("bench_rollout")
    expected = rollouts.expected_kernels(*how)
    assert rollouts.refuse_other_kernels(names, expected) == sorted(expected)
    for left_out in [name for name in names if name not in OTHERS[2:]]:
        with pytest.raises(SystemExit, match="no row is written"):
            rollouts.refuse_other_kernels([name for name in names if name != left_out], expected)
    for added in {GEMM, PROLOGUE} - set(names):
        with pytest.raises(SystemExit, match="no row is written"):
            rollouts.refuse_other_kernels([*names, added], expected)
