"""`docs/api.md` from the docstrings of everything `qerl_jax` exports, of the config's fields and of the rewards.

python tools/make_api_docs.py            # writes docs/api.md
python tools/make_api_docs.py --check    # exit code 1 if docs/api.md is not what this would write
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import qerl_jax
from qerl_jax.config import Config
from qerl_jax.data.presets import PRESETS
from qerl_jax.data.problems import load_dataset
from qerl_jax.data.prompts import completion_texts
from qerl_jax.io import assets
from qerl_jax.rewards.functions import BUILT_IN

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "api.md"
SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:")
MORE = {"data.problems.load_dataset": load_dataset, "data.prompts.completion_texts": completion_texts}


def markdown(docstring: str) -> list[str]:
    """A docstring as Markdown: its sections as lists, `name: what` a line each."""
    lines, inside = [], False
    for line in docstring.splitlines():
        if line in SECTIONS:
            inside = True
            lines += ["", f"**{line[:-1]}**", ""]
        elif inside and (entry := re.match(r"  (\S[^:]*): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif inside and line.startswith("  "):
            lines.append(f"  {line.strip()}")
        else:
            inside = inside and not line.strip()
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip().splitlines()


def definition(thing: Any) -> ast.FunctionDef | ast.ClassDef:
    """The syntax tree of a function or class, whatever wraps it."""
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))).body[0]


def signature(node: ast.FunctionDef, name: str) -> list[str]:
    """A code block with a function's arguments, one a line where they are many."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = f"{name}({ast.unparse(node.args)}){returns}"
    if len(text) > 100:
        rows = ",\n    ".join(arguments(node.args))
        text = f"{name}(\n    {rows},\n){returns}"
    return ["```python", text, "```", ""]


def arguments(args: ast.arguments) -> list[str]:
    """Each argument with annotation and default."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    found = [_argument(a, d) for a, d in zip(plain, defaults, strict=True)]
    if args.posonlyargs:
        found.insert(len(args.posonlyargs), "/")
    if args.vararg or args.kwonlyargs:
        found.append(f"*{ast.unparse(args.vararg)}" if args.vararg else "*")
    found += [_argument(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return found + ([f"**{ast.unparse(args.kwarg)}"] if args.kwarg else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")


def function_section(name: str, function: Any, level: int = 3) -> list[str]:
    """Heading, signature, docstring."""
    node = definition(function)
    text = markdown(inspect.cleandoc(ast.get_docstring(node) or ""))
    return [f"{'#' * level} `{name}`", "", *signature(node, node.name), *text, ""]


def class_section(name: str, kind: type) -> list[str]:
    """Heading, fields, docstring, public methods."""
    node = definition(kind)
    fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign | ast.Assign)]
    lines = [f"### `{name}`", ""]
    if fields and kind is not Config:
        lines += ["```python", *fields, "```", ""]
    lines += [*markdown(inspect.cleandoc(ast.get_docstring(node) or "")), ""]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            summary = (ast.get_docstring(item) or "").split("\n\n")[0].replace("\n", " ")
            is_property = any(ast.unparse(d) == "property" for d in item.decorator_list)
            call = item.name if is_property else f"{item.name}({', '.join(a.arg for a in item.args.args[1:])})"
            lines.append(f"- `.{call}`: {re.sub(' +', ' ', summary)}")
    return [*lines, ""]


def config_section() -> list[str]:
    """Every field of `Config`: its default and what it says of itself."""
    body = definition(Config).body
    lines = ["## Fields of a config", "", "| field | default | what |", "|---|---|---|"]
    for field, following in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign):
            what = re.sub(r"\s+", " ", following.value.value).replace("|", "\\|")
            default = ast.unparse(field.value).replace("|", "\\|")
            lines.append(f"| `{field.target.id}` | `{default}` | {what} |")
    return [*lines, ""]


def render() -> str:
    """The whole page."""
    lines = [
        "# Reference",
        "",
        "Made from the docstrings by `tools/make_api_docs.py`; change those, not this page. The guide is `guide.md`.",
        "",
        "## What `qerl_jax` exports",
        "",
    ]
    for name in qerl_jax.__all__:
        thing = getattr(qerl_jax, name)
        if isinstance(thing, types.ModuleType):
            continue
        lines += class_section(name, thing) if isinstance(thing, type) else function_section(name, thing)
    for name in (name for name in qerl_jax.__all__ if isinstance(getattr(qerl_jax, name), types.ModuleType)):
        module = getattr(qerl_jax, name)
        lines += [f"## `qerl_jax.{name}`", "", *markdown(inspect.cleandoc(module.__doc__)), ""]
        for key, member in vars(module).items():
            local = getattr(member, "__module__", None) == module.__name__ and not key.startswith("_")
            if local and (inspect.isfunction(member) or isinstance(member, type)):
                section = class_section if isinstance(member, type) else function_section
                lines += section(f"{name}.{key}", member)
    lines += ["## Problems and texts", ""]
    for name, function in MORE.items():
        lines += function_section(f"qerl_jax.{name}", function)
    lines += config_section()
    lines += ["## Rewards by name", ""]
    for name, reward in BUILT_IN.items():
        lines += [f"### `{name}`", "", *markdown(inspect.cleandoc(reward.__doc__)), ""]
    lines += ["## Datasets and recipes by name", ""]
    lines += [f"- `{name}`: `{preset.hub_id}`, rewards {dict(preset.rewards)}" for name, preset in PRESETS.items()]
    lines += ["", f"`--config` knows {', '.join(f'`{recipe}`' for recipe in assets.recipes())}.", ""]
    return "\n".join(line.rstrip() for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    if not parser.parse_args().check:
        OUTPUT.parent.mkdir(exist_ok=True)
        OUTPUT.write_text(render())
        return 0
    if OUTPUT.exists() and OUTPUT.read_text() == render():
        return 0
    print(f"{OUTPUT} is out of date: run python tools/make_api_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
