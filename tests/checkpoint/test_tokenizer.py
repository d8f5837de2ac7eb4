"""The import of transformers."""

from __future__ import annotations

import os
import subprocess
import sys

THREADS = """
from concurrent.futures import ThreadPoolExecutor
from qerl_jax.checkpoint.assets import model_path
from qerl_jax.checkpoint.tokenizer import load_tokenizer
with ThreadPoolExecutor(4) as pool:
    found = list(pool.map(lambda _: load_tokenizer(model_path("tiny")), range(4)))
assert [len(tokenizer) for tokenizer in found] == [len(found[0])] * 4
"""


def test_threads_may_load_tokenizers_at_once():
    """The first import of transformers, in a fresh process: a second thread used to find a half of it."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
