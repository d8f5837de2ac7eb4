"""Compiles a decode chunk whose layers are divided over two H200s on a machine without one.
`test_tensor_parallel.py` runs it.

Prints, as JSON, the collectives of the loop body and of the rest of the program, with the shapes of their results, and
the number of our kernels in the loop body.
"""

import collections
import dataclasses
import json
import re

import decode_for_h200

from qerl_jax.rollout import decode
from qerl_jax.types import Sampling

DEVICES = 2
COLLECTIVE = re.compile(
    r" = (\(.*?\)|\S+) ((?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-[a-z]+)(?:-start)?)\("
)


def main() -> None:
    model = dataclasses.replace(decode_for_h200.MODEL, num_kv_heads=DEVICES, tensor_parallel=DEVICES)
    states = decode_for_h200.abstract_chunk(model=model)
    program = decode_for_h200.compiled(
        decode.decode_chunk, states, Sampling(256).distribution, 16, False, count=DEVICES
    )
    body = re.search(r"body=%([\w.]+)", program).group(1)
    inside = re.search(rf"\n%{re.escape(body)} .*?\n}}", program, re.DOTALL).group(0)
    found = {"inside": collections.defaultdict(list), "outside": collections.defaultdict(list)}
    for where, text in (("inside", inside), ("outside", program.replace(inside, ""))):
        for shape, name in COLLECTIVE.findall(text):
            found[where][name].append(shape)
    print(json.dumps(found | {"kernels": inside.count('custom_call_target="mosaic_gpu')}))


if __name__ == "__main__":
    decode_for_h200.use_compilers()
    main()
