"""Compiles decode chunks of one layer with two numbers of slots for an H200. `test_decode_compile.py` runs it.

    python sums_for_h200.py {nvfp4,bf16} {whole,truncated}

Prints, as JSON, the distinct reductions of each chunk: fused computations with a reduction or a dot, and library calls,
without names and with the number of slots replaced, in the mode and, for the whole distribution, without it. Mosaic's
kernels are left out.
"""

import dataclasses
import json
import re
import sys

import decode_for_h200

from qerl_jax.rollout import decode
from qerl_jax.types import Sampling

SLOTS = (3, 88)
MODEL = dataclasses.replace(decode_for_h200.MODEL, num_layers=1)
SAMPLING = {"whole": Sampling(256), "truncated": Sampling(256, temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)}


def plain(text: str) -> str:
    """A computation or operation without names and metadata."""
    text = re.sub(r", (metadata|backend_config)=\{.*", "", text)
    names: dict[str, str] = {}
    text = re.sub(r"%[\w.\-]+", lambda name: names.setdefault(name[0], f"%{len(names)}"), text)
    return re.sub(rf"\b({'|'.join(map(str, SLOTS))})(?=[],])", "S", text)


def sums(slots: int, batch_invariant: bool) -> list[str]:
    """Reductions of one chunk."""
    sampling = SAMPLING[sys.argv[2]]
    states = decode_for_h200.abstract_chunk(slots, sys.argv[1], MODEL)
    program = decode_for_h200.compiled(decode.decode_chunk, states, sampling.distribution, 4, batch_invariant)
    found = set()
    for name, body in re.findall(r"\n%?([\w.\-]+) \([^\n]*\{\n(.*?)\n\}", program, re.DOTALL):
        if "fused" in name and re.search(r" (reduce|reduce-window|dot)\(", body):
            found.add(plain(body))
    calls = re.findall(r"^.* custom-call\(.*", program, re.MULTILINE)
    return sorted(found | {plain(call) for call in calls if "mosaic_gpu" not in call})


def main() -> None:
    found = {"batch_invariant": [sums(slots, True) for slots in SLOTS]}
    if sys.argv[2] == "whole":
        found["not"] = [sums(slots, False) for slots in SLOTS]
    print(json.dumps(found))


if __name__ == "__main__":
    decode_for_h200.use_compilers()
    main()
