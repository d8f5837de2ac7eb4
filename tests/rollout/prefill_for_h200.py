"""Compiles a packed prefill for an H200 on a machine without a GPU. `test_decode_compile.py` runs it.

Prints, as JSON, the copies of the compiled program, the number of donated arrays updated in place, the number of GEMMs
with packed weights, and the compile time in seconds. Attention is the plain form: cuDNN plans its own on the GPU.
"""

from __future__ import annotations

import json
import re
import time

import decode_for_h200
import jax
import jax.numpy as jnp

from qerl_jax.rollout import decode

TOKENS, ROWS, WIDTH = 512, 8, 128


def main() -> None:
    policy, prompt_cache, _ = decode_for_h200.abstract_chunk()
    numbers = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (TOKENS, ROWS, ROWS)]
    started = time.perf_counter()
    program = decode_for_h200.compiled(decode.prefill, (policy, prompt_cache, *numbers), WIDTH, False)
    seconds = time.perf_counter() - started
    found = {
        "copied": re.findall(r" = (\S+) copy\(", program),
        "gemms": len(re.findall(r" custom-call\(.*mosaic_gpu", program)),
        "reused": len(re.findall(r"may-alias|must-alias", program.split("\n", 1)[0])),
        "kept": len(jax.tree.leaves(prompt_cache)),
        "seconds": seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    decode_for_h200.use_compilers()
    main()
