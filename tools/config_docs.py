"""Write `docs/config.md`, the table of the config's fields, and TRL's other defaults in `docs/migration.md`.

python tools/config_docs.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import textwrap
from pathlib import Path

from qerl_jax.config import Config

ROOT = Path(__file__).resolve().parent.parent
CONFIG, MIGRATION = ROOT / "docs" / "config.md", ROOT / "docs" / "migration.md"
INTRODUCTION = """# Every setting

`python -m qerl_jax.train [--config NAME_OR_FILE] [--FIELD VALUE ...]` takes these fields as flags, with `-` or `_`, as
keys of a YAML file, and as arguments of `qerl_jax.Config`. A list takes several values.
`python tools/config_docs.py` makes this page from the docstrings.
"""
GROUPS = {
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
"""Headings, each by the first field below it."""


def config_page() -> str:
    """`docs/config.md`: name, default and description of every field."""
    lines = [INTRODUCTION]
    body = ast.parse(textwrap.dedent(inspect.getsource(Config))).body[0].body
    for field, description in itertools.pairwise(body):
        if not isinstance(field, ast.AnnAssign):
            continue
        if group := GROUPS.get(field.target.id):
            lines.append(f"\n## {group}\n")
        text = re.sub(r"\s+", " ", description.value.value)
        lines.append(item(f"- `{field.target.id}` = `{ast.unparse(field.value)}`: {text}"))
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def item(text: str) -> str:
    """A list item on lines of the page's width."""
    return textwrap.fill(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def migration_page() -> str:
    """`docs/migration.md` with its table of defaults made anew."""
    text = MIGRATION.read_text()
    begin = re.search(r"<!-- defaults:.*?-->\n", text).end()
    return text[:begin] + "\n".join(defaults_table()) + "\n" + text[text.index("<!-- end -->", begin) :]


def defaults_table() -> list[str]:
    """Fields of the same name whose default differs from TRL's."""
    recorded = json.loads((ROOT / "tests" / "golden" / "trl_fields.json").read_text())
    theirs, rows = recorded["inherited"] | recorded["fields"], ["| field | TRL | here |", "|---|---|---|"]
    for field in dataclasses.fields(Config):
        if field.name in theirs and theirs[field.name] != repr(field.default):
            rows.append(f"| `{field.name}` | {theirs[field.name]} | {field.default!r} |")
    return rows


def pages() -> dict[Path, str]:
    """The text of both pages."""
    return {CONFIG: config_page(), MIGRATION: migration_page()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
