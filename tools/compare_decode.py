"""Where decode and trainer part ways, layer by layer, on random weights of a published shape (sigma = 0).

    python tools/compare_decode.py 7B [--weights nvfp4 dequantized bf16] [--executor fused plain] [--kernel mosaic_gpu]

The trainer's layer runs over whole sequences of `--prompt-len` + `--tokens` tokens. Decode then runs over the last
`--tokens` of them, one by one, from the trainer's keys and values of the prompt. Printed for each layer:

- `local`: relative difference ‖decode − trainer‖ / ‖trainer‖ of one decode step whose input and cache are the
  trainer's: of q, k and v; of the attended values; of gate and up; of what attention and MLP add to the residual stream
- `stream`: the relative difference of the residual stream when decode runs on its own outputs

and, over all decoded tokens, the mean |Δ logprob| over the vocabulary and KL(decode ‖ trainer).

`--weights dequantized` are the NVFP4 weights as bf16 matrices: the distribution of `nvfp4`, and XLA's GEMMs. `bf16` are
the normal weights of the benchmarks. `--token-mean` also prints the share of the stream that all tokens have in common.
Run it with `XLA_FLAGS=--xla_allow_excess_precision=false` to make XLA round every GEMM output that the model rounds.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
from jax import Array
from make_checkpoint import SIZES
from qerl_kernels.nvfp4_matmul import reference as fp4
from random_policy import random_policy

from qerl_jax import LoraConfig, Policy
from qerl_jax.models.attention import cached_attention, causal_attention, rotary_angles, split_and_rotate
from qerl_jax.models.config import ModelConfig
from qerl_jax.models.executor import PLAIN_EXECUTOR, Executor
from qerl_jax.models.formats import Dense, Nvfp4
from qerl_jax.models.fused_decode import FusedDecodeExecutor, can_fuse_decode
from qerl_jax.models.qwen2 import DecoderLayer, Qwen2
from qerl_jax.rollout.decode import cast_lora

LOCAL = ("qkv", "attended", "gate_up", "attention", "mlp")  # the last two: what they add to the residual stream


class Recorder:
    """An executor that also keeps the outputs of its operations, by the names of `LOCAL`."""

    def __init__(self, inner: Executor):
        self.inner, self.outputs = inner, {}

    def start(self, x: Array):
        return self.inner.start(x)

    def norm_project(self, norm, projection, residual):
        residual, y = self.inner.norm_project(norm, projection, residual)
        self.outputs["gate_up" if "qkv" in self.outputs else "qkv"] = y
        return residual, y

    def project(self, projection, x):
        self.outputs |= {"attended": x, "attention": self.inner.project(projection, x)}
        return self.outputs["attention"]

    def swiglu_project(self, projection, gate_up):
        self.outputs["mlp"] = self.inner.swiglu_project(projection, gate_up)
        return self.outputs["mlp"]

    def add(self, residual, delta):
        return self.inner.add(residual, delta)

    def normalize(self, norm, x):
        return self.inner.normalize(norm, x)

    def finish(self, norm, residual):
        return self.inner.finish(norm, residual)


def stream(residual) -> Array:
    """The residual stream as one array, of either executor."""
    if not isinstance(residual, tuple):
        return residual
    x, delta = residual
    return x if delta is None else x + delta


@functools.partial(jax.jit, static_argnames="config")
def trainer_layer(layer: DecoderLayer, x: Array, config: ModelConfig):
    """One layer over whole sequences [B, T, D] -> (stream, (k, v), outputs)."""
    order = jnp.arange(x.shape[1])
    positions = jnp.broadcast_to(order, x.shape[:2])

    def attention(qkv, angles, cache):
        q, k, v = split_and_rotate(config, qkv, angles)
        return causal_attention(q, k, v), (k, v)

    recorder = Recorder(PLAIN_EXECUTOR)
    angles = rotary_angles(positions, config)
    x, cache = layer(x, angles, attention, None, recorder)
    return x, cache, recorder.outputs


@functools.partial(jax.jit, static_argnames=("config", "executor"))
def decode_layer(layer: DecoderLayer, residual, keys: Array, values: Array, position: Array, config, executor):
    """One layer on one token a sequence -> (residual, (keys, values), outputs); `position`: of the token."""
    batch, kv_heads, _, head_dim = keys.shape
    none, prompt = jnp.zeros(batch, jnp.int32), jnp.zeros((1, kv_heads, 8, head_dim), keys.dtype)
    places = jnp.full(batch, position, jnp.int32)
    attention = cached_attention(none, none, places + 1, places, False)
    recorder = Recorder(executor)
    angles = rotary_angles(places, config)
    residual, cache = layer(residual, angles, attention, (prompt, prompt, keys, values), recorder)
    return residual, cache, recorder.outputs


@jax.jit
def relative(ours: Array, expected: Array) -> Array:
    """‖ours − expected‖ / ‖expected‖."""
    ours, expected = (x.astype(jnp.float32).reshape(-1) for x in (ours, expected))
    return jnp.linalg.norm(ours - expected) / jnp.linalg.norm(expected)


@jax.jit
def token_mean(x: Array) -> Array:
    """Share of the stream [B, T, D] that all tokens have in common: ‖mean over tokens‖ / rms norm of a token."""
    x = x.reshape(-1, x.shape[-1])
    return jnp.linalg.norm(x.mean(0)) / jnp.sqrt((x * x).sum(-1).mean())


@jax.jit
def divergence(model: Qwen2, ours: Array, expected: Array) -> tuple[Array, Array]:
    """Mean |Δ logprob| over the vocabulary and KL of two final hidden states [B, D]."""
    p, q = (jax.nn.log_softmax(model.logits(hidden)) for hidden in (ours, expected))
    return jnp.abs(p - q).mean(), (jnp.exp(p) * (p - q)).sum(-1).mean()


def compare(model: Qwen2, tokens: Array, decoded: int, executor: Executor, show_token_mean: bool = False) -> None:
    """Print the differences; the last `decoded` of the tokens [B, T] are decoded. T is a multiple of 8."""
    config, length = model.config, tokens.shape[1]
    x = model.embed_tokens.get_value()[tokens].astype(jnp.float32)
    streams, caches, outputs = [x], [], []
    for layer in model.layers:
        x, cache, made = trainer_layer(layer, x, config)
        streams.append(x[:, -decoded:])
        caches.append(tuple(jnp.swapaxes(kv, 1, 2) for kv in cache))
        outputs.append({name: made[name][:, -1].reshape(len(tokens), -1) for name in LOCAL})
        if show_token_mean:
            outputs[-1]["token_mean"] = token_mean(x)
    streams[0] = streams[0][:, -decoded:]

    local = []
    for i, (layer, (keys, values)) in enumerate(zip(model.layers, caches, strict=True)):
        residual = executor.start(streams[i][:, -1])
        *_, made = decode_layer(layer, residual, keys, values, jnp.int32(length - 1), config, executor)
        local.append([relative(made[name].reshape(len(tokens), -1), outputs[i][name]) for name in LOCAL])

    apart, mean, kl = [[] for _ in model.layers], [], []
    for t in range(decoded):
        residual = executor.start(streams[0][:, t])
        for i, layer in enumerate(model.layers):
            position = jnp.int32(length - decoded + t)
            residual, caches[i], _ = decode_layer(layer, residual, *caches[i], position, config, executor)
            apart[i].append(relative(stream(residual), streams[i + 1][:, t]))
        ours, expected = model.norm(stream(residual)), model.norm(streams[-1][:, t])
        for total, value in zip((mean, kl), divergence(model, ours, expected), strict=True):
            total.append(value)

    header = " ".join(f"{name:>9}" for name in (*LOCAL, "stream"))
    print(f"layer  {header}" + ("  token mean" if show_token_mean else ""))
    for i, row in enumerate(local):
        figures = [*row, jnp.stack(apart[i]).mean()]
        shared = f"  {float(outputs[i]['token_mean']):10.3f}" if show_token_mean else ""
        print(f"{i + 1:5d}  " + " ".join(f"{float(value):9.2e}" for value in figures) + shared)
    columns = zip(*local, strict=True)
    print(" mean  " + " ".join(f"{float(jnp.stack(column).mean()):9.2e}" for column in columns))
    print(f"mean |Δ logprob| {float(jnp.stack(mean).mean()):.2e}, KL {float(jnp.stack(kl).mean()):.2e}", flush=True)


def policy_of(size: str, weights: str, kernel: str) -> Policy:
    """Random weights: `nvfp4`, the same `dequantized` to bf16, or `bf16` of their own."""
    lora = LoraConfig(rank=32)
    if weights != "dequantized":
        return random_policy(size, weights, lora, kernel)
    policy = random_policy(size, "nvfp4", lora, "xla")
    dense = jax.jit(lambda weight: Dense(fp4.dequantize(weight).astype(jnp.bfloat16)))
    is_weight = lambda node: isinstance(node, Nvfp4)  # noqa: E731
    frozen = jax.tree.map(lambda node: dense(node) if is_weight(node) else node, policy.frozen, is_leaf=is_weight)
    return policy.replace(frozen=frozen)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--weights", nargs="+", choices=("nvfp4", "dequantized", "bf16"), default=["nvfp4", "bf16"])
    parser.add_argument("--executor", nargs="+", choices=("fused", "plain"), default=["fused", "plain"])
    parser.add_argument("--kernel", choices=("xla", "mosaic_gpu"), default="mosaic_gpu", help="of NVFP4 weights")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=248)
    parser.add_argument("--tokens", type=int, default=8, help="decoded tokens of each sequence")
    parser.add_argument("--token-mean", action="store_true")
    args = parser.parse_args()
    if (args.prompt_len + args.tokens) % 8:
        parser.error(f"--prompt-len {args.prompt_len} and --tokens {args.tokens} do not add up to a multiple of 8")
    for weights in args.weights:
        policy = policy_of(args.size, weights, args.kernel)
        policy = policy.replace(lora=cast_lora(policy))
        model = policy.model()
        shape = args.batch, args.prompt_len + args.tokens
        tokens = jax.random.randint(jax.random.key(1), shape, 0, model.config.vocab_size)
        for name in args.executor:
            if name == "fused" and not can_fuse_decode(model.projections(), args.batch):
                continue
            print(f"{args.size} {weights}, {name} executor, {args.batch} sequences")
            executor = FusedDecodeExecutor() if name == "fused" else PLAIN_EXECUTOR
            compare(model, tokens, args.tokens, executor, args.token_mean)


if __name__ == "__main__":
    main()
