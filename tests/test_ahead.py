"""`tools/ahead.py`: executables are loaded by processes that may have imported no kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parent.parent / "tools"


def test_the_importer_finds_the_kernels_runtime():
    """Without the path that jax's `mosaic.gpu` sets, a loaded executable does not find the host functions it calls."""
    script = "import sys, ahead; sys.exit('jax.experimental.mosaic.gpu' not in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TOOLS), *sys.path])}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
