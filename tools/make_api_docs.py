"""Write `docs/api.md`, a reference by task, from the docstrings of the exports, config fields and rewards, and the
tables of `docs/migration.md`.

python tools/make_api_docs.py            # writes both
python tools/make_api_docs.py --check    # exit code 1 if one is not what this would write
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import json
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import qerl_jax
from qerl_jax.config import Config
from qerl_jax.config.foreign import FOREIGN
from qerl_jax.data.presets import PRESETS
from qerl_jax.io import assets
from qerl_jax.rewards.functions import BUILT_IN
from qerl_jax.train import train

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "api.md"
MIGRATION = ROOT / "docs" / "migration.md"
WIDTH = 118
SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:")
MORE = {"train": train}  # as `qerl_jax.train.train`: the name in `qerl_jax` is the module's

# What each task takes: its functions in the order of use, then the types that they pass on. Every export has one place.
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Load": (
        "A Hugging Face directory becomes a `Policy`: one frozen copy of the weights and the small trained trees.",
        ("load_policy", "import_adapter", "Policy", "ModelConfig", "LoraConfig", "Lora"),
    ),
    "Data": (
        "Problems from a dataset or file, their prompts as tokens, and rewards on the texts of completions.",
        ("load_dataset", "encode_problems", "to_prompts", "completion_texts", "load_reward", "score", "Problem"),
    ),
    "Sample": (
        "`generate` runs the rollout engine. Keys are functions of seed, step and purpose.",
        (
            *("generate", "stream", "Prompts", "Sampling", "Engine", "Rollout", "FinishReason"),
            *("Progress", "keys"),
        ),
    ),
    "Noise": ("Adaptive Quantization Noise on layer norms of the policy that samples, or on its adapters.", ("aqn",)),
    "Update": (
        "Rewards become advantages, a rollout with advantages becomes a `Batch`, and `grpo_step` updates the adapters.",
        (
            *(
                "group_advantages",
                "make_batch",
                "init_state",
                "current_policy",
                "learning_rate",
                "grpo_step",
                "TokenLoss",
                "built_in_loss",
            ),
            *("Batch", "TrainState", "Config"),
        ),
    ),
    "Evaluation": (
        "Accuracy on a dataset; log-probabilities, logits and hidden states of given tokens.",
        ("evaluate", "token_logprobs", "policy_logits", "hidden_states"),
    ),
    "Train": ("The command line's run, with functions of your own.", ("train", "Checkpointer")),
    "Quantize": (
        "A checkpoint in NVFP4, MXFP4 or NF4, or in NVFP4 with scales chosen on texts.",
        ("quantize_checkpoint", "calibrate_checkpoint"),
    ),
    "Export": ("A PEFT adapter that transformers, peft and vLLM load.", ("export_adapter",)),
}
COMMAND_LINE = [
    "`python -m qerl_jax.train [--config NAME_OR_FILE] [--FIELD VALUE ...]` takes the fields of `Config` below as",
    "flags, with `-` or `_`, and as keys of a YAML file. A list takes several values.",
    "",
]
# Headings of the config's fields, each by its first field.
FIELD_GROUPS = {
    "model": "Model",
    "dataset": "Data",
    "output_dir": "Run directory",
    "max_steps": "Optimization",
    "lora_rank": "Adapters",
    "loss_type": "Loss and rewards",
    "max_completion_length": "Sampling",
    "sigma_start": "Adaptive Quantization Noise",
    "tokens_per_micro_batch": "Memory",
    "eval_dataset": "Evaluation",
}


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


def class_section(name: str, kind: type, level: int = 3) -> list[str]:
    """Heading, fields, docstring, public methods."""
    node = definition(kind)
    fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign | ast.Assign)]
    lines = [f"{'#' * level} `{name}`", ""]
    if fields and kind is not Config:
        lines += ["```python", *fields, "```", ""]
    lines += [*markdown(inspect.cleandoc(ast.get_docstring(node) or "")), ""]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            summary = (ast.get_docstring(item) or "").split("\n\n")[0].replace("\n", " ")
            is_property = any(ast.unparse(d) == "property" for d in item.decorator_list)
            call = item.name if is_property else f"{item.name}({', '.join(a.arg for a in item.args.args[1:])})"
            lines += wrapped(f"- `.{call}`: {re.sub(' +', ' ', summary)}")
    return [*lines, ""]


def config_section() -> list[str]:
    """Every field of `Config` under its heading: name, default, description."""
    lines = ["## Train from the command line", "", *COMMAND_LINE]
    for field, following in itertools.pairwise(definition(Config).body):
        if not isinstance(field, ast.AnnAssign):
            continue
        if group := FIELD_GROUPS.get(field.target.id):
            lines += ["", f"### {group}", ""]
        description = re.sub(r"\s+", " ", following.value.value)
        lines += wrapped(f"- `{field.target.id}` = `{ast.unparse(field.value)}`: {description}")
    return [*lines, ""]


def wrapped(text: str) -> list[str]:
    """A list item on lines of the page's width."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def link(name: str, thing: Any) -> str:
    """A link to the section of an export."""
    anchor = f"qerl_jax{name}" if isinstance(thing, types.ModuleType) else name.lower()
    return f"[`{name}`](#{anchor})"


def export_section(name: str, thing: Any) -> list[str]:
    """A function, a class, or a module with its public functions and classes."""
    if not isinstance(thing, types.ModuleType):
        return class_section(name, thing) if isinstance(thing, type) else function_section(name, thing)
    lines = [f"### `qerl_jax.{name}`", "", *markdown(inspect.cleandoc(thing.__doc__)), ""]
    for key, member in vars(thing).items():
        is_local = getattr(member, "__module__", None) == thing.__name__ and not key.startswith("_")
        if is_local and (inspect.isfunction(member) or isinstance(member, type)):
            section = class_section if isinstance(member, type) else function_section
            lines += section(f"{name}.{key}", member, 4)
    return lines


def exports() -> dict[str, Any]:
    """Everything with a place on the page; ValueError where an export has none, or more than one."""
    found = {name: getattr(qerl_jax, name) for name in qerl_jax.__all__} | MORE
    placed = [name for _, names in TASKS.values() for name in names]
    if sorted(placed) != sorted(found):
        wrong = sorted(set(placed) ^ set(found)) or sorted(name for name in set(placed) if placed.count(name) > 1)
        raise ValueError(f"TASKS and the exports of qerl_jax differ in {wrong}")
    return found


def render() -> str:
    """The whole page."""
    found = exports()
    lines = [
        "# Reference",
        "",
        "The exports of `qerl_jax` by task. [guide.md](guide.md) shows them in use, [terms.md](terms.md) explains axes",
        "and words. `tools/make_api_docs.py` makes this page from the docstrings.",
        "",
        "- [Train from the command line](#train-from-the-command-line): the fields of `Config`",
    ]
    for task, (_, names) in TASKS.items():
        lines += wrapped(f"- [{task}](#{task.lower()}): {', '.join(link(name, found[name]) for name in names)}")
    lines += ["- [Rewards](#rewards), [datasets and recipes](#datasets-and-recipes)", ""]
    for task, (introduction, names) in TASKS.items():
        lines += [f"## {task}", "", introduction, ""]
        for name in names:
            lines += export_section(name, found[name])
    lines += config_section()
    lines += ["## Rewards", "", "Names for `reward_funcs`.", ""]
    for name, reward in BUILT_IN.items():
        lines += [f"### `{name}`", "", *markdown(inspect.cleandoc(reward.__doc__)), ""]
    lines += ["## Datasets and recipes", ""]
    lines += [f"- `{name}`: `{preset.hub_id}`, rewards {dict(preset.rewards)}" for name, preset in PRESETS.items()]
    lines += ["", *wrapped(f"`--config` takes {', '.join(f'`{recipe}`' for recipe in assets.recipes())}."), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines))


def migration() -> str:
    """`docs/migration.md` with its tables made anew."""
    text = MIGRATION.read_text()
    for name, table in {"names": names_table, "missing": missing_list, "defaults": defaults_table}.items():
        begin = re.search(rf"<!-- {name}:.*?-->\n", text).end()
        text = text[:begin] + "\n".join(table()) + "\n" + text[text.index("<!-- end -->", begin) :]
    return text


def names_table() -> list[str]:
    """Names of other programs that a field here has the meaning of."""
    rows = ["| name | of | here | |", "|---|---|---|---|"]
    for name, entry in FOREIGN.items():
        if entry.fields:
            fields = ", ".join(f"`{field}`" for field in entry.fields)
            rows.append(f"| `{name}` | {entry.origin} | {fields} | {entry.note} |")
    return rows


def missing_list() -> list[str]:
    """Names that nothing here has the meaning of, by reason."""
    reasons: dict[str, list[str]] = {}
    for name, entry in FOREIGN.items():
        if not entry.fields:
            reasons.setdefault(entry.note, []).append(f"`{name}`")
    return [line for reason, names in reasons.items() for line in wrapped(f"- {', '.join(names)}: {reason}.")]


def defaults_table() -> list[str]:
    """Fields of the same name whose default differs from TRL's."""
    recorded = json.loads((ROOT / "tests" / "golden" / "trl_fields.json").read_text())
    theirs, rows = recorded["inherited"] | recorded["fields"], ["| field | TRL | here |", "|---|---|---|"]
    for field in dataclasses.fields(Config):
        if field.name in theirs and theirs[field.name] != repr(field.default):
            rows.append(f"| `{field.name}` | {theirs[field.name]} | {field.default!r} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    if not parser.parse_args().check:
        OUTPUT.parent.mkdir(exist_ok=True)
        OUTPUT.write_text(render())
        MIGRATION.write_text(migration())
        return 0
    for page, text in ((OUTPUT, render()), (MIGRATION, migration())):
        if not page.exists() or page.read_text() != text:
            print(f"{page} is out of date: run python tools/make_api_docs.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
