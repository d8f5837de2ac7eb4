"""The command lines' import of transformers."""

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
