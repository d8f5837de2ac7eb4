"""Compiles a layer of a packed prefill for an H200 on a machine without a GPU. `test_decode_compile.py` runs it.

Prints, as JSON, the copies of the compiled program, the number of donated arrays updated in place, the number of GEMMs
with packed weights, and the compile time in seconds. Attention is the plain form: cuDNN plans its own on the GPU.
"""

from __future__ import annotations

import json
import re
import time

import decode_for_h200
import jax
import numpy as np

from qerl_jax.programs import record
from qerl_jax.rollout.prefill import prefill, prefill_layer

TOKENS, PROMPTS, WIDTH = 512, 8, 128


def main() -> None:
    policy, prompt_cache, _ = decode_for_h200.abstract_chunk()
    numbers = np.zeros(TOKENS, np.int32), *2 * (np.zeros(PROMPTS, np.int32),)
    programs = record(prefill, policy, prompt_cache, *numbers, WIDTH, False)
    [layer] = [each for each in programs if each.function.__name__ == "prefill_layer"]
    arrays, static = layer.args[:5], layer.args[5:]
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
    print(json.dumps(found))


if __name__ == "__main__":
    decode_for_h200.use_compilers()
    main()
