"""Compiles a layer of a packed prefill for an H200 on a machine without a GPU, and one of 7B for an RTX 4090.
`test_decode_compile.py` runs it.

Prints, as JSON, the copies of the compiled program, the number of donated arrays updated in place, the number of GEMMs
with packed weights, and the compile time in seconds; the bytes that the other one needs besides weights and caches, and
their estimate. Attention is the plain form: cuDNN plans its own on the GPU.
"""

import json
import re
import time

import decode_for_h200
import h200
import jax
import numpy as np
from qerl_kernels.gpu import gpu_of

from qerl_jax.models.config import ModelConfig
from qerl_jax.programs import record
from qerl_jax.rollout.prefill import prefill, prefill_layer
from qerl_jax.rollout.shapes import prefill_bytes
from qerl_jax.types import Policy

ADA = gpu_of("NVIDIA GeForce RTX 4090", 89, 128)
LAYER_7B = ModelConfig(152064, 3584, 18944, 1, 28, 4, 128, 1e6, 1e-6, False, 32768, (0,), 0)


def layer_of(prompts: int, width: int, model: ModelConfig = decode_for_h200.MODEL) -> tuple[Policy, tuple, tuple]:
    """Policy, arrays and static arguments of a layer of a prefill of prompts of `width` tokens."""
    policy, prompt_cache, _ = decode_for_h200.abstract_chunk(model=model)
    tokens = prompts * width
    numbers = np.zeros(tokens, np.int32), *2 * (np.zeros(prompts, np.int32),)
    programs = record(prefill, policy, prompt_cache, *numbers, width, False)
    [layer] = [each for each in programs if each.function.__name__ == "prefill_layer"]
    return policy, layer.args[:4], layer.args[4:]


def main() -> None:
    _, arrays, static = layer_of(4, 128)
    started = time.perf_counter()
    program = decode_for_h200.compiled(prefill_layer, arrays, *static)
    seconds = time.perf_counter() - started
    found = {
        "copied": re.findall(r" = (\S+) copy\(", program),
        "gemms": len(re.findall(r" custom-call\(.*mosaic_gpu", program)),
        "reused": len(re.findall(r"may-alias|must-alias", program.split("\n", 1)[0])),
        "kept": len(jax.tree.leaves(arrays[1:3])),
        "seconds": seconds,
    }
    h200.assume(ADA)
    policy, arrays, static = layer_of(32, 256, LAYER_7B)
    memory = h200.lower(prefill_layer, arrays, *static, gpu=ADA).compile().memory_analysis()
    found["bytes"] = memory.temp_size_in_bytes + arrays[1].size * 4
    found["estimate"] = prefill_bytes(policy, 32, 256, False)
    print(json.dumps(found))


if __name__ == "__main__":
    decode_for_h200.use_compilers()
    main()
