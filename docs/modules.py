"""Writes the list of modules in docs/architecture.md: one line each, the first sentence of the module's docstring.

Run `make docs`. A test compares the list with the source tree.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- modules: made by docs/modules.py -->"
END = "<!-- end of modules -->"
LAYERS = (
    "cli",
    "recipes",
    "runtime",
    "sim",
    "optrace",
    "control",
    "ports.py",
    "observe",
    "config",
    "learn",
    "sched",
    "perf",
    "core",
)
"""From the top down, as in the page's diagram."""
SENTENCE = re.compile(r"^(.*?)\.(?:\s|$)", re.DOTALL)


def first_sentence(module: Path) -> str:
    """The first sentence of a module's docstring on one line; raises ValueError when it has none."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{module}: no docstring; say what the module owns")
    paragraph = " ".join(text.split("\n\n")[0].split())
    found = SENTENCE.match(paragraph)
    return (found.group(1) if found else paragraph).rstrip(":")


def listing(src: Path) -> str:
    """The list in Markdown, layer by layer; raises ValueError for a layer that is not in LAYERS."""
    present = {path.name for path in src.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    unknown = present - set(LAYERS) - {"__init__.py"}
    if unknown:
        raise ValueError(f"{sorted(unknown)}: not in docs/modules.py LAYERS; add it at its place")
    blocks = []
    for layer in LAYERS:
        top = src / layer
        if not top.exists():
            continue
        files = [top] if top.is_file() else sorted(path for path in top.rglob("*.py") if path.name != "__init__.py")
        lines = [f"* `{path.relative_to(src)}`: {first_sentence(path)}" for path in files]
        blocks.append("\n".join([f"**{layer.removesuffix('.py')}**", "", *lines]))
    return "\n\n".join(blocks)


def update(page: str) -> str:
    """The page with its list made anew."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{listing(ROOT / 'src' / 'rollart')}\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
