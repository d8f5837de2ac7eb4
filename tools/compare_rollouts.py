"""Rollouts by vLLM and ours in one call on one GPU, so that neither another GPU nor another day is between them.

    python tools/compare_rollouts.py 7B --formats nvfp4 bf16 --batch 8 32 128 --in-process --native-sampler --out DIR

vLLM's engines, one a format, start at the same time and are held when compiled (`bench_vllm.py --hold`); then each is
timed alone, and after they have ended ours (`bench_rollout.py`, NVFP4). DIR gets vllm.json, rollout.json and a log of
each. Their weights and caches must fit the GPU together: 7B at batch 128 takes 13 and 22 GB, 32B some 40 and 80 GB.

vLLM is that of `--vllm-python`, an interpreter in whose environment this project is installed, too (or its folders are
on PYTHONPATH); `--vllm-path` puts a folder of packages before all others.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from record import ROOT, add_commit

TOOLS = Path(__file__).resolve().parent
LONGEST_START_S = 900.0


class Program:
    """A tool that runs in a process of its own; what it says goes to a log."""

    def __init__(self, name: str, command: list[str], out: Path, environment: dict[str, str]) -> None:
        self.name, self.log = name, out / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
                start_new_session=True,
            )

    def said(self) -> list[str]:
        """Lines of the log so far."""
        return self.log.read_text(errors="replace").splitlines()

    def wait_until_ready(self, seconds: float) -> None:
        """Returns when the program is held. Raises SystemExit with the end of its log if it ends before, or is late."""
        end = time.monotonic() + seconds
        while "READY" not in self.said():
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit("\n".join([f"{self.name} is not ready:", *self.said()[-20:]]))
            time.sleep(0.2)

    def finish(self) -> None:
        """Lets the program go on, waits for its end, and prints its last lines. Raises SystemExit if it failed."""
        self.process.communicate("\n")
        print("\n".join(self.said()[-4:]), flush=True)
        if self.process.returncode:
            raise SystemExit("\n".join([f"{self.name} failed:", *self.said()[-20:]]))

    def stop(self) -> None:
        """Ends the program if it has not ended, with the processes that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdin.close()


def environment(first: Path | None) -> dict[str, str]:
    """This process's, with `first` and the project's folders on PYTHONPATH."""
    folders = [first, ROOT, ROOT / "kernels", TOOLS, os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size")
    parser.add_argument("--formats", nargs="+", choices=("nvfp4", "bf16"), default=["nvfp4", "bf16"], help="vLLM's")
    parser.add_argument("--batch", nargs="+", default=["8", "32", "128"])
    parser.add_argument("--new-tokens", default="256")
    parser.add_argument("--repeats", default="3")
    parser.add_argument("--in-process", action="store_true", help="as in bench_vllm.py")
    parser.add_argument("--native-sampler", action="store_true", help="as in bench_vllm.py")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--vllm-path", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    add_commit(parser)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    both = [args.size, "--batch", *args.batch, "--new-tokens", args.new_tokens, "--repeats", args.repeats]
    both += ["--out", str(args.out), *(["--commit", args.commit] if args.commit else [])]
    how = [
        "--hold",
        *(flag for flag in ("--in-process", "--native-sampler") if getattr(args, flag[2:].replace("-", "_"))),
    ]
    vllm = [args.vllm_python, str(TOOLS / "bench_vllm.py"), *both, *how]
    engines = []
    try:
        for name in args.formats:
            command = [*vllm, "--format", name]
            engines.append(Program(f"vllm-{args.size}-{name}", command, args.out, environment(args.vllm_path)))
        end = time.monotonic() + LONGEST_START_S
        for engine in engines:
            engine.wait_until_ready(end - time.monotonic())
        for engine in engines:
            engine.finish()
    finally:
        for engine in engines:
            engine.stop()
    rival = ["--rival", str(args.out / "vllm.json")]
    ours = [sys.executable, str(TOOLS / "bench_rollout.py"), *both, *rival]
    Program(f"ours-{args.size}", ours, args.out, environment(None)).finish()


if __name__ == "__main__":
    main()
