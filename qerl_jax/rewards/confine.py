"""The first program inside the sandbox: sets limits, then runs the program that is not trusted. `sandbox.run` starts
this file as a script; standard library only.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
from typing import Any


def confine(user: int | None, limits: dict[str, int]) -> None:
    """Become a user without rights, where this is root, and set hard limits by resource name ("AS", …)."""
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def run_program(text: str, call: dict[str, Any] | None) -> None:
    """Run the text as a program, without the `__future__` of this file. With `call`, call the named function (of the
    module, or a method of `Solution`) and write its result as JSON to standard output; the program's own output is then
    discarded.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    answers = sys.stdout
    if call is not None:
        sys.stdout = io.StringIO()
    exec(compile(text, "program.py", "exec", dont_inherit=True), namespace)
    if call is not None:
        name = call["name"]
        function = namespace[name] if name in namespace else getattr(namespace["Solution"](), name)
        json.dump(function(*call["arguments"]), answers)
    answers.flush()


def main() -> None:
    """`confine.py JOB`: file descriptor of the job as JSON. Says "ok" on standard error once all limits are set, which
    is then closed.
    """
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        job = json.load(file)
    confine(job["user"], job["limits"])
    os.write(2, b"ok")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    run_program(job["program"], job["call"])


if __name__ == "__main__":
    main()
