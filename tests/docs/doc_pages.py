"""The pages of the documentation, as the tests read them: Markdown, prose, code blocks, anchors."""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [page.relative_to(ROOT).as_posix() for page in WRITTEN]
NOTHING = object()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@cache
def hook() -> ModuleType:
    """docs/hooks/reference.py, which generates the reference."""
    spec = importlib.util.spec_from_file_location("reference_hook", DOCS / "hooks/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def generated() -> dict[str, str]:
    """{path below the root: Markdown} of the generated pages."""
    return {f"docs/{path}": text for path, text in hook().pages().items()}


@cache
def all_pages() -> dict[str, str]:
    """{path below the root: Markdown} of every page, written or generated."""
    return {name: page.read_text() for name, page in zip(NAMES, WRITTEN, strict=True)} | generated()


def code_blocks(text: str) -> list[str]:
    """Fenced and indented blocks."""
    indented = re.findall(r"(?:^(?: {4}.*)?\n)+", FENCE.sub("", text), re.MULTILINE)
    blocks = [block for _, block in FENCE.findall(text)]
    return blocks + [re.sub(r"^ {4}", "", block, flags=re.MULTILINE) for block in indented if block.strip()]


def without_code(text: str) -> str:
    """The page without code blocks, comments and HTML."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    lines, inside, before = [], False, ""
    for line in text.splitlines():
        # An indented block follows an empty line; inside a list the indentation continues an entry.
        inside = line.startswith("    ") and (
            inside or (not before.strip() and not line.lstrip().startswith("- "))
        )
        lines.append("" if inside else line)
        before = line
    return "\n".join(lines)


def sentences(text: str) -> list[str]:
    """Sentences of paragraphs and lists; tables and headings are none. Inline code counts as one word."""
    text = re.sub(r"`[^`\n]+`", "CODE", without_code(text))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks: list[str] = [""]
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith(("#", "|", "!")):
            blocks.append("")
            continue
        if re.match(r"(- |\d+\. )", stripped):
            blocks.append("")
            stripped = re.sub(r"^(- |\d+\. )", "", stripped)
        blocks[-1] += " " + stripped
    return [
        s.strip() for block in blocks for s in re.split(r"(?<=[.!?:;])(?:\*\*|\))?\s+", block) if s.strip()
    ]


def anchors(text: str) -> set[str]:
    """What `#…` can point at: headings, as both GitHub and mkdocs name them, and explicit `{#…}`."""
    found = set()
    for title in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE):
        explicit = re.search(r"\{#([\w-]+)\}", title)
        plain = re.sub(r"\{#.*\}", "", title).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\s-]", "", plain.encode("ascii", "ignore").decode())  # mkdocs drops other letters
        found.add(explicit[1] if explicit else re.sub(r"[\s-]+", "-", slug).strip("-"))
    return found


def find_object(dotted: str) -> Any:
    """The module, class, function or field of a dotted name; `NOTHING` if there is none."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            # A field of a dataclass without a default is in its annotations alone.
            annotated = getattr(found, "__annotations__", {})
            found = getattr(found, part, annotated.get(part, NOTHING))
        return found
    return NOTHING
