"""Prose of the repository: docstrings, comments and Markdown keep to a few mechanical rules.

`python tests/test_prose.py [PATH ...]` lists what the rules find; without paths, in the whole repository.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120
EARLY = 92  # columns that a line may leave unused only at the end of a sentence
PATTERNS = (
    "*.md",
    "configs/*.yaml",
    "docs/*.md",
    "kernels/**/*.md",
    "kernels/**/*.py",
    "qerl_jax/**/*.py",
    "tests/**/*.py",
    "tools/**/*.md",
    "tools/**/*.py",
)

# A word of this project's own, and the field's word for it.
PRIVATE_WORDS = {
    r"octets?": "n8 tile",
    r"multiprocessors?": "SM",
    r"(?<!a )few[ _]tokens": "skinny GEMM, M <= 32",
    r"what precedes": "prologue, or the noun itself",
    r"what comes out": "output, or the noun itself",
    r"what is drawn": "sample, or the noun itself",
    r"that there are not": "missing, absent",
}
KERNEL_WORDS = {
    r"(matrix|NVFP4|4-bit|decode|few-token) products?": "GEMM",
    r"products? (for|of) few( tokens)?|products? that follows?|products? with(out)? adapters": "GEMM",
}
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")

FRAGMENT = re.compile(r"(of|whether there) ", re.IGNORECASE)
CODE = re.compile(r"\S  +\S| = |^ *python ")
ENTRY = re.compile(r"\s*(?:[-*] |\d+\. |[\w`*, .\[\]]+: )")


def texts(path: Path) -> Iterator[tuple[str, int, list[str]]]:
    """(kind, line number, lines) of every docstring, comment block and trailing comment, or of a whole page."""
    source = path.read_text()
    if path.suffix != ".py":
        yield "page", 1, source.splitlines()
        return
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield "docstring", statement.lineno, value.value.splitlines()
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#").strip()
        if token.line[: token.start[1]].strip():
            yield "comment", token.start[0], [text]
        elif block and token.start[0] == start + len(block):
            block.append(text)
        else:
            if block:
                yield "comment", start, block
            block, start = [text], token.start[0]
    if block:
        yield "comment", start, block


def too_long(path: Path) -> Iterator[tuple[int, str]]:
    """Lines over the limit, but for one that no space can break. (Ruff holds Python to the same limit.)"""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if len(line) > LIMIT and len(line.split()) > 2:
            yield number, f"{len(line)} characters, limit {LIMIT}"


def broken_paragraphs(kind: str, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Re-wrapped text: a line that ends early in mid-sentence, or a summary that spills one word into a second line."""
    for index, (line, following) in enumerate(itertools.pairwise(lines)):
        words = following.split()
        if not line.strip() or not words or any(map(CODE.search, (line, following))):
            continue
        has_room = len(line) + 1 + len(words[0]) <= EARLY
        continues = (
            re.match(r"[a-z(`]", words[0]) and not ENTRY.match(following) and not re.search(r"\W$", line.rstrip())
        )
        if has_room and continues and index:
            yield index, "broken by re-wrapping: the line ends early"
    if kind == "docstring" and len(lines) > 1 and len(lines[1].split()) == 1 and not "".join(lines[2:3]).strip():
        yield 1, "broken by re-wrapping: one word of the summary spills over"


def fragments(kind: str, lines: list[str]) -> Iterator[tuple[int, str]]:
    """A docstring, comment or attribute description that begins with "of" and so names no noun."""
    if kind != "page" and lines and FRAGMENT.match(lines[0].strip()):
        yield 0, "genitive fragment: begin with the noun"
    if kind == "docstring":
        for index, line in enumerate(lines):
            entry = re.match(r"\s+\*{0,2}\w+(?:, \*{0,2}\w+)*: (.*)", line)
            if entry and FRAGMENT.match(entry[1]):
                yield index, "genitive fragment: begin with the noun"


def private_words(path: Path, lines: list[str]) -> Iterator[tuple[int, str]]:
    in_kernels = "kernels" in path.relative_to(ROOT).parts
    for index, line in enumerate(lines):
        text = QUOTED.sub("", line)
        for word, better in (PRIVATE_WORDS | (KERNEL_WORDS if in_kernels else {})).items():
            if found := re.search(rf"\b{word}\b", text, re.IGNORECASE):
                yield index, f"{found[0]!r}: {better}"


def problems(path: Path) -> list[str]:
    """`path:line: problem` for everything that the rules find in a file."""
    found = list(too_long(path)) if path.suffix != ".py" else []
    for kind, start, lines in texts(path):
        checks = [fragments(kind, lines), private_words(path, lines)]
        if kind != "page":
            checks.append(broken_paragraphs(kind, lines))
        found += [(start + index, problem) for check in checks for index, problem in check]
    return [f"{path.relative_to(ROOT)}:{number}: {problem}" for number, problem in sorted(set(found))]


def pages() -> list[Path]:
    found = {path for pattern in PATTERNS for path in ROOT.glob(pattern)}
    return sorted(path for path in found if path != Path(__file__).resolve())


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_prose(path):
    assert not problems(path), "\n".join(problems(path))


if __name__ == "__main__":
    chosen = [Path(argument).resolve() for argument in sys.argv[1:]]
    everything = [line for path in pages() if not chosen or path in chosen for line in problems(path)]
    print("\n".join(everything))
    sys.exit(bool(everything))
