"""The import of transformers."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
from qerl_jax.io import assets, tokenizer
tokenizer.leave_out_torch()
ids = tokenizer.load_tokenizer(assets.model_path("tiny"))("What is 17 times 23?")["input_ids"]
assert ids and "torch" not in sys.modules
import torch  # others still find it
"""


def test_pytorch_is_not_imported_where_nothing_can_use_it():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr


THREADS = """
from concurrent.futures import ThreadPoolExecutor
from qerl_jax.io.assets import model_path
from qerl_jax.io.tokenizer import leave_out_torch, load_tokenizer
leave_out_torch()
with ThreadPoolExecutor(4) as pool:
    found = list(pool.map(lambda _: load_tokenizer(model_path("tiny")), range(4)))
assert [len(tokenizer) for tokenizer in found] == [len(found[0])] * 4
"""


def test_threads_may_load_tokenizers_at_once():
    """The first import of transformers, in a fresh process: a second thread used to find a half of it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
