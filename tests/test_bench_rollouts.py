"""`tools/bench_vllm.py` and the checks of `tools/bench_rollout.py`, without a GPU and without vLLM."""

import argparse
import io
import json
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from qerl_kernels.nvfp4_matmul.reference import dequantize
from safetensors.numpy import load_file

from qerl_jax.io.peft_config import adapter_config
from qerl_jax.models.formats import Nvfp4
from qerl_jax.models.lora import LoraConfig

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


@pytest.mark.parametrize(
    "name, dtype", [("model.layers.0.self_attn.attn.k_scale", torch.float32), ("x.weight", torch.int32)]
)
def test_parameters_of_no_checkpoint_are_left_alone(bench, name, dtype):
    values = torch.full((1,), -1, dtype=dtype)[0]
    assert not bench.fill(name, values) and values == -1


def test_the_adapter_is_one_that_peft_loads(bench, tmp_path):
    directory = bench.adapter_directory("0.5B", 8, tmp_path)
    tensors, wanted = load_file(directory / "adapter_model.safetensors"), LoraConfig(rank=8)
    assert adapter_config(directory) == LoraConfig(rank=8, alpha=wanted.effective_alpha)
    assert len(tensors) == 24 * 7 * 2
    down = "base_model.model.model.layers.23.mlp.down_proj"
    assert tensors[f"{down}.lora_A.weight"].shape == (8, 4864) and tensors[f"{down}.lora_B.weight"].shape == (896, 8)
    assert abs(np.std(tensors[f"{down}.lora_A.weight"].astype(np.float32)) / 0.02 - 1) < 0.05


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
    """132 tokens take 0.896 s, 32 tokens 0.596: 3 ms a step; nothing is timed before the line of input."""
    monkeypatch.setattr(bench, "Engine", engine)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.22.1"))
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        monkeypatch.setenv(name, "1")  # restored afterwards
    said_before = []

    class Input(io.StringIO):
        def readline(self, *args):
            said_before.append(capsys.readouterr().out)
            return "\n"

    monkeypatch.setattr(sys, "stdin", Input())
    command = "bench_vllm.py 7B --batch 2 4 --prompt-len 5 --new-tokens 132 --in-process --native-sampler --hold"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--out", str(tmp_path)])
    bench.main()
    assert said_before == ["READY\n"] and "batch    4" in capsys.readouterr().out
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


def test_prompts_are_distinct(engine):
    one = engine(argparse.Namespace(prompt_len=6))
    for _ in range(3):
        one.seconds(4, 2)
    assert len(one.llm.prompts) == 12 and all(len(prompt) == 6 for prompt in one.llm.prompts)


@pytest.mark.parametrize(("spoil", "said"), [("short", "do not all have 4 tokens"), ("nan", "is not finite")])
def test_a_spoilt_rollout_is_refused(engine, spoil, said):
    with pytest.raises(SystemExit, match=said):
        engine(argparse.Namespace(prompt_len=6), spoil=spoil).seconds(2, 4)


def test_the_layers_that_compute_projections_are_named(bench):
    """The base layer of an adapter's wrapper, of the first layer only."""

    class Scheme:
        pass

    class Method:
        pass

    class Layer(torch.nn.Module):
        def __init__(self, scheme=None):
            super().__init__()
            self.quant_method = Method()
            if scheme:
                self.scheme = scheme

    wrapper = torch.nn.Module()
    wrapper.base_layer = Layer(Scheme())
    layers = [torch.nn.ModuleDict({"qkv_proj": wrapper, "down_proj": Layer(), "norm": torch.nn.Module()})]
    layers.append(torch.nn.ModuleDict({"o_proj": Layer()}))
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})})
    assert bench.layers_of(model) == ["Scheme", "Method"]


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
