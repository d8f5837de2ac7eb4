"""`tools/attack.py`: that all its cases can be built. Running them takes six minutes and is done by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent / "tools" / "attack.py"


def test_every_case_is_built():
    """The cases reuse tables of the tests, which change; two of one name would be an error."""
    done = subprocess.run([sys.executable, TOOL, "--list"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 2000
