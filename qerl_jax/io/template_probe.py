"""Renders a chat template once in a process of its own, which can be killed whatever the template does.

In this process a time limit ends loops, but not one call into a library: `{{ 9 ** (9 ** 9) }}` computes for minutes
without letting another thread run. `refuse_endless` starts this file as a program with little more than Jinja in it.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

MEMORY_BYTES = 10**9
_OUT_OF_MEMORY = 3  # exit code


def refuse_endless(
    template: str, conversations: Sequence[Sequence[Mapping[str, str]]], variables: Mapping[str, Any], seconds: float
) -> None:
    """Raise TimeoutError for a template that takes longer than so many seconds on the conversations, MemoryError for
    one that takes more than `MEMORY_BYTES`, RuntimeError for one that crashes its process. Errors that a template
    raises are left to whoever renders it next.

    Args:
      template: Jinja source.
      conversations: messages with role and content.
      variables: names of the template beside `messages`, JSON values.
      seconds: time limit, without the start of the process (about 0.15 s).
    """
    order = {
        "path": sys.path,
        "template": template,
        "conversations": conversations,
        "variables": variables,
        "seconds": seconds,
    }
    ended = subprocess.run(
        [sys.executable, "-I", __file__],
        input=json.dumps(order, default=str).encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if ended.returncode == -signal.SIGALRM:
        raise TimeoutError(f"no end after {seconds:g} s")
    if ended.returncode == _OUT_OF_MEMORY:
        raise MemoryError(f"it takes more than {MEMORY_BYTES / 1e9:g} GB")
    if ended.returncode < 0:
        raise RuntimeError(f"the process that renders it is killed by signal {-ended.returncode}")


def _environment() -> Any:
    """A sandbox with the names that transformers gives to chat templates."""
    from jinja2 import TemplateError, ext, nodes, parser, sandbox

    class Generation(ext.Extension):
        """`{% generation %}` … `{% endgeneration %}` mark the assistant's text."""

        tags = frozenset({"generation"})

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False} | options)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _main() -> int:
    """The program: reads its order from standard input."""
    order = json.load(sys.stdin)
    sys.path[:] = order["path"]
    environment = _environment()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, whatever the interpreter is doing
    signal.setitimer(signal.ITIMER_REAL, order["seconds"])
    try:
        template = environment.from_string(order["template"])
    except MemoryError:
        return _OUT_OF_MEMORY
    for messages in order["conversations"]:
        try:
            template.render(messages=messages, add_generation_prompt=True, **order["variables"])
        except MemoryError:
            return _OUT_OF_MEMORY
        except Exception:  # such as a refusal of the system's role
            continue
    return 0


if __name__ == "__main__":
    sys.exit(_main())
