"""Where text comes from: files, Hugging Face datasets, and the source code of Python's standard library.

A source is a string. It resolves to *units* in a fixed order. A unit is one file, or one dataset of the hub. Names are
relative to the source, so that a corpus may move without becoming another corpus.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from grmoe.checks import require
from grmoe.extras import install_line

STDLIB = "python-stdlib"
_HUB = "hf:"
Kind = Literal["text", "jsonl", "parquet", "arrow"]
KINDS: dict[str, Kind] = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
_COMPRESSIONS = (".gz", ".xz", ".zst")
_READABLE = f"{', '.join(KINDS)} (the first two also with {', '.join(_COMPRESSIONS)})"

# The standard library has about thirty packages, and most are too small to measure a loss on. So they are grouped into
# a few domains. Modules of a single file form the domain "modules".
_STDLIB_GROUPS = {
    "concurrency": ("asyncio", "concurrent", "multiprocessing"),
    "encodings": ("encodings",),
    "interface": ("curses", "idlelib", "tkinter", "turtledemo"),
    "markup": ("html", "json", "tomllib", "xml"),
    "network": ("email", "http", "urllib", "wsgiref", "xmlrpc"),
    "tooling": ("distutils", "ensurepip", "importlib", "lib2to3", "pydoc_data", "unittest", "venv"),
}
_STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Unit:
    """One file, or one dataset of the hub."""

    name: str
    """Relative to the source."""
    location: str
    """A path, or NAME[:CONFIG] on the hub."""
    kind: Kind | Literal["hub"]
    domain: str
    """Domain of the rows that name none: the folder, or the file where a source is a single one."""
    held_out: bool
    """Everything in it is for validation."""
    size: int
    """Bytes; 0 for a dataset of the hub, because its size is unknown."""


def optional(module: str) -> ModuleType:
    """Import an optional dependency. If it is missing, the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"this needs {error.name}; install with: {install_line(['data'])}", name=error.name
        ) from error


def find_units(sources: Sequence[str | Path], held_out: bool = False) -> list[Unit]:
    """The units of `sources`, source by source, in the order of their names. A file that is named twice counts once."""
    found: dict[str, Unit] = {}
    for source in sources:
        for unit in _find(str(source), held_out):
            found.setdefault(unit.location if unit.kind == "hub" else os.path.realpath(unit.location), unit)
    units = list(found.values())
    # Raise now if a package is missing, and not when the first file that needs it is read.
    if any(unit.location.lower().endswith(".zst") for unit in units):
        optional("zstandard")
    if any(unit.kind in ("parquet", "arrow") for unit in units):
        optional("pyarrow")
    if any(unit.kind == "hub" for unit in units):
        optional("datasets")
    return units


def _find(source: str, held_out: bool) -> list[Unit]:
    if source == STDLIB:
        return _standard_library(held_out)
    if source.startswith(_HUB):
        name = source.removeprefix(_HUB)
        require(bool(name), f"source {source!r} names no dataset; example: hf:Skylion007/openwebtext")
        require(not Path(name).exists(), f"source {source} is on this machine; give it without {_HUB}")
        return [Unit(source, name, "hub", name.split(":")[0].split("/")[-1], held_out, 0)]
    path = Path(source)
    if path.is_dir():
        files = (p for p in path.rglob("*") if p.is_file() and kind_of(p) and not p.match("cache-*.arrow"))
        found = [p for p in files if not _hidden(p.relative_to(path)) and not _is_log(p)]
        require(bool(found), f"source {source} holds no file that can be read: {_READABLE}")
        return _files(path, found, held_out)
    if path.is_file():
        require(kind_of(path) is not None, f"source {source} must end in {_READABLE}")
        return _files(path.parent, [path], held_out, domain=_stem(path))
    found = [Path(p) for p in glob.glob(source, recursive=True) if Path(p).is_file()]
    require(bool(found), f"source {source} is neither a file, nor a folder, nor a pattern that matches one")
    for p in found:
        require(kind_of(p) is not None, f"source {source} matches {p}, which does not end in {_READABLE}")
    return _files(Path(os.path.commonpath([p.parent for p in found])), found, held_out)


def kind_of(path: Path) -> Kind | None:
    """The format of a file, by its name; None if it is not supported."""
    suffix = path.suffix.lower()
    if suffix not in _COMPRESSIONS:
        return KINDS.get(suffix)
    inner = KINDS.get(Path(path.stem).suffix.lower())
    return inner if inner in ("text", "jsonl") else None  # the others compress their own columns


def is_compressed(unit: Unit) -> bool:
    return unit.kind == "parquet" or unit.location.lower().endswith(_COMPRESSIONS)


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _is_log(path: Path) -> bool:
    """The log of a run is no text. People who prepare the current folder also train in it."""
    names = ("config.yaml", "environment.json")
    return path.name == "log.jsonl" and all(path.with_name(name).is_file() for name in names)


def _files(root: Path, paths: list[Path], held_out: bool, domain: str | None = None) -> list[Unit]:
    """Files of a folder are one domain. Each folder in it is a domain of its own."""
    named = sorted((p.relative_to(root).as_posix(), p) for p in paths)
    units = []
    for name, path in named:
        kind = kind_of(path)
        assert kind is not None
        folder, _, rest = name.partition("/")
        own = folder if rest else domain or folder_domain(root)
        units.append(Unit(name, str(path), kind, own, held_out, path.stat().st_size))
    return units


def folder_domain(folder: Path) -> str:
    """The domain of the files that lie directly in a folder."""
    return folder.resolve().name or "text"


def _stem(path: Path) -> str:
    """The name of a file without its endings."""
    stem = path.name
    while Path(stem).suffix.lower() in (*_COMPRESSIONS, *KINDS):
        stem = Path(stem).stem
    return stem


def _standard_library(held_out: bool) -> list[Unit]:
    root = Path(sysconfig.get_path("stdlib"))
    group_of = {package: group for group, packages in _STDLIB_GROUPS.items() for package in packages}
    units = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        # Files that describe this build of Python differ between machines.
        of_this_build = relative.parts[0].startswith(("config-", "_sysconfigdata"))
        if of_this_build or _STDLIB_LEFT_OUT.intersection(relative.parts):
            continue
        group = group_of.get(relative.parts[0], "modules")
        size = path.stat().st_size
        if size:
            units.append(Unit(relative.as_posix(), str(path), "text", group, held_out, size))
    require(bool(units), f"this Python comes without the source of its standard library ({STDLIB})")
    return sorted(units, key=lambda unit: unit.name)


def fingerprint(unit: Unit) -> dict[str, Any]:
    """The content of a unit as a checksum. Hashing a file takes a hundredth of the time of tokenising it."""
    record: dict[str, Any] = {"name": unit.name, "held_out": unit.held_out}
    if unit.kind == "hub":
        return record | {"revision": _hub_revision(unit.location)}
    with open(unit.location, "rb") as file:
        return record | {"bytes": unit.size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def fingerprints(units: Sequence[Unit], report: Callable[[int], None]) -> list[dict[str, Any]]:
    """`fingerprint` of each unit. `report` is called with the number of bytes read so far."""
    records, read = [], 0
    for unit in units:
        records.append(fingerprint(unit))
        read += unit.size
        report(read)
    return records


def _hub_revision(location: str) -> str:
    """The current commit of a hub dataset. Later reads use it, even if the dataset changes."""
    hub = optional("huggingface_hub")
    name = location.split(":")[0]
    try:
        return str(hub.HfApi().dataset_info(name).sha)
    except Exception as error:  # from the hub, the network or a proxy
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"dataset {name!r} could not be found on the hub: {reason[0]}") from error
