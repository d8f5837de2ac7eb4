"""Compiles a decode chunk for an H200, or for another GPU, on a machine without one. `test_decode_compile.py` runs it.

    python decode_for_h200.py DUMP [ARCH SMS SLOTS]

Prints, as JSON, the operations of the loop body in the compiled program, the thunks that launch it, and the number of
our kernels in the whole program. DUMP is a directory for XLA's dump, from which the thunks are read.
"""

import collections
import json
import re
import sys
from pathlib import Path
from typing import Any

import h200
import jax
import jax.numpy as jnp
from qerl_kernels.gpu import Gpu, gpu_of

from qerl_jax.config import Config
from qerl_jax.models.config import ModelConfig
from qerl_jax.rollout import decode
from qerl_jax.rollout.shapes import RolloutShapes
from qerl_jax.run.abstract import abstract_trees
from qerl_jax.types import Policy, Sampling

LAYERS, ROWS = 2, 8
MODEL = ModelConfig(4096, 1024, 2048, LAYERS, 8, 1, 128, 1e6, 1e-6, False, 4096, (0,), 0)


def abstract_chunk(
    slots: int = ROWS, weight_format: str = "nvfp4", model: ModelConfig = MODEL
) -> tuple[Policy, decode.PromptCache, decode.Slots]:
    """Arguments of `decode_chunk` as shapes; NVFP4 weights are packed for the kernels."""
    kernel = "mosaic_gpu" if weight_format == "nvfp4" else "xla"
    config = Config(model="x", weight_format=weight_format, lora_rank=32, matmul_kernel=kernel)
    policy, _ = abstract_trees(model, weight_format, config)
    shapes = RolloutShapes(slots, ROWS, 256, 256, ROWS, 1, 0)
    prompt_cache, slots = jax.eval_shape(
        lambda: decode.allocate(jax.random.key(0), policy.config, jnp.dtype("bfloat16"), shapes)
    )
    return policy.replace(lora=jax.eval_shape(decode.cast_lora, policy)), prompt_cache, slots


def operations(program: str) -> dict[str, list[str]]:
    """Name of each operation in the loop body -> shapes of its results."""
    body = re.search(r"body=%([\w.]+)", program).group(1)
    text = re.search(rf"\n%{re.escape(body)} .*?\n}}", program, re.DOTALL).group(0)
    found = collections.defaultdict(list)
    # From the line's start: a kernel's bytes, which are in a line too, may look like an operation.
    for shape, name in re.findall(r"^ +(?:ROOT )?%[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", text, re.MULTILINE):
        if name not in ("parameter", "get-tuple-element", "tuple", "bitcast", "constant"):
            found[name].append(shape)
    return found


def compiled(function: Any, states: Any, *static: Any, gpu: Gpu | None = None, count: int = 1) -> str:
    """The program of a jitted function for `count` GPUs, None: H200s; `states`: its arguments as shapes."""
    return h200.lower(function, states, *static, gpu=gpu, count=count).compile().as_text()


def main(gpu: Gpu | None, slots: int) -> None:
    states = abstract_chunk(slots)
    program = compiled(decode.decode_chunk, states, Sampling(256).distribution, 16, False, gpu=gpu)
    (launches,) = Path(sys.argv[1]).glob("*decode_chunk*thunk_sequence_after_thunk_passes.txt")
    body = launches.read_text().split("  body:\n")[1].splitlines()
    inside = [line for line in body if line.startswith("    ")]  # thunks of the body; nested ones are indented further
    print(
        json.dumps(
            {
                "operations": operations(program),
                "kernels": program.count('custom_call_target="mosaic_gpu'),
                "thunks": [line.split()[1] for line in inside if re.match(r"    \d", line)],
                "captured": sum(bool(re.match(r"        \d", line)) for line in inside),
            }
        )
    )


def use_compilers(*flags: str, gpu: Gpu | None = None) -> None:
    h200.use_compilers_to_ptx(*flags)
    h200.assume(gpu)


if __name__ == "__main__":
    arch, sms, slots = map(int, sys.argv[2:] or (90, 132, ROWS))
    other = gpu_of("GPU A", arch, sms) if sys.argv[2:] else None
    use_compilers(f"--xla_dump_to={sys.argv[1]}", gpu=other)
    main(other, slots)
