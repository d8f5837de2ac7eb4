"""Compiles a decode chunk whose layers are divided over two H200s on a machine without one.
`test_tensor_parallel.py` runs it.

    python divided_for_h200.py peer_sum|no room|psum

Prints, as JSON, the collectives of the loop body and of the rest of the program, with the shapes of their results, the
number of our kernels in the loop body, what copies an array of words, and how many kernels were compiled by themselves.
"""

import collections
import dataclasses
import json
import re
import sys

import decode_for_h200
import h200
from qerl_kernels.kernel_programs import kernel_programs
from qerl_kernels.peer_sum import api as peers

from qerl_jax.rollout import decode
from qerl_jax.types import Sampling

DEVICES = 2
COLLECTIVE = re.compile(
    r" = (\(.*?\)|\S+) ((?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-[a-z]+)(?:-start)?)\("
)


def main() -> None:
    if sys.argv[1] == "psum":
        peers.missing = lambda *sums: "nothing"
    elif sys.argv[1] == "no room":  # for all rows of the chunk
        peers.most_rows = lambda *sums: decode_for_h200.ROWS // 2
    model = dataclasses.replace(decode_for_h200.MODEL, num_kv_heads=DEVICES, tensor_parallel=DEVICES)
    states = decode_for_h200.abstract_chunk(model=model)
    lowered = h200.lower(decode.decode_chunk, states, Sampling(256).distribution, 16, False, count=DEVICES)
    separate = kernel_programs(lowered)
    for kernel in separate.values():
        h200.lower(kernel, ()).compile()
    program = lowered.compile().as_text()
    body = re.search(r"body=%([\w.]+)", program).group(1)
    inside = re.search(rf"\n%{re.escape(body)} .*?\n}}", program, re.DOTALL).group(0)
    found = {"inside": collections.defaultdict(list), "outside": collections.defaultdict(list)}
    for where, text in (("inside", inside), ("outside", program.replace(inside, ""))):
        for shape, name in COLLECTIVE.findall(text):
            found[where][name].append(shape)
    kernels, copies = inside.count('custom_call_target="mosaic_gpu'), re.findall(r" = (u32\[.*?\]\S*) copy\(", program)
    print(json.dumps(found | {"kernels": kernels, "copies": copies, "separate": len(separate)}))


if __name__ == "__main__":
    decode_for_h200.use_compilers()
    main()
