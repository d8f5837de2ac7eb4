"""Compiles a layer of a packed prefill for an H200 on a machine without a GPU. `test_decode_compile.py` runs it.

Prints, as JSON, the copies of the compiled program, the number of donated arrays updated in place, the number of GEMMs
with packed weights, and the compile time in seconds. Attention is the plain form: cuDNN plans its own on the GPU.
"""

from __future__ import annotations

import json
import re
import time

import decode_for_h200

from qerl_jax.rollout.prefill import prefill_layer, prefill_programs
from qerl_jax.rollout.prefill_packing import PrefillShape

SHAPE = PrefillShape(512, 8, 128)


def main() -> None:
    policy, prompt_cache, _ = decode_for_h200.abstract_chunk()
    [layer] = [p for p in prefill_programs(policy, prompt_cache, SHAPE, False) if p.function is prefill_layer]
    arrays, static = layer.arguments[:6], layer.arguments[6:]
    started = time.perf_counter()
    program = decode_for_h200.compiled(prefill_layer, arrays, *static)
    seconds = time.perf_counter() - started
    found = {
        "copied": re.findall(r" = (\S+) copy\(", program),
        "gemms": len(re.findall(r" custom-call\(.*mosaic_gpu", program)),
        "reused": len(re.findall(r"may-alias|must-alias", program.split("\n", 1)[0])),
        "kept": len(arrays[1:4]),
        "seconds": seconds,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    decode_for_h200.use_compilers()
    main()
