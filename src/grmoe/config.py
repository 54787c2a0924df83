"""Configuration: nested dataclasses, filled from YAML and dotted overrides. An unknown key is an error that names it.

    config = load(TrainConfig, "run.yaml", ["optim.lr=3e-4", "model.preset=small"])

Values have the types that the dataclass declares. An integer is accepted for a float; nothing else is converted
silently. Overrides are read as YAML: `null`, `true`, `[1, 2]` and `1e-3` have their usual meaning.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union

C = TypeVar("C")


class ConfigError(ValueError):
    """A mistake in a configuration. The message has the dotted name of the key."""


def load(kind: type[C], path: str | Path | None = None, overrides: Iterable[str] = ()) -> C:
    """The defaults of `kind`, replaced by the values of the file, replaced by the overrides."""
    return from_dict(kind, read_tree(path, overrides))


def read_tree(path: str | Path | None = None, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """What a file and overrides give, as nested dictionaries. Values are not checked yet."""
    tree: dict[str, Any] = {}
    if path is not None:
        loaded = _read_yaml(Path(path))
        if not isinstance(loaded, Mapping):
            raise ConfigError(f"{path} must hold a mapping of names to values, got {type(loaded).__name__}")
        tree = dict(loaded)
    for text in overrides:
        _override(tree, text)
    return tree


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `changes`. Groups are merged key by key."""
    merged = dict(base)
    for name, value in changes.items():
        old = merged.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def from_dict(kind: type[C], tree: Mapping[str, Any], where: str = "") -> C:
    """A dataclass from nested mappings."""
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind) if f.init}  # type: ignore[arg-type]
    values = {}
    for name, value in tree.items():
        place = f"{where}.{name}" if where else str(name)
        if name not in known:
            in_groups = [f"{group}.{name}" for group, field in known.items() if name in _keys_of(field)]
            raise ConfigError(unknown(place, str(name), list(known), in_groups))
        values[name] = convert(hints[name], value, place)
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}: {error}" if where else str(error)) from error


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dictionaries of plain values, for YAML and JSON."""
    return {name: _plain(value) for name, value in dataclasses.asdict(config).items()}


def to_yaml(config: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
    return text


def differences(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> list[str]:
    """The keys with different values, as `dotted.name: old → new`."""
    found = []
    for name in dict.fromkeys([*old, *new]):
        place = f"{where}.{name}" if where else name
        a, b = old.get(name), new.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, place)
        elif a != b:
            found.append(f"{place}: {a!r} → {b!r}")
    return found


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of a dataclass's own fields, for `convert`. Those of its bases are left out."""
    names = vars(sys.modules[kind.__module__])
    own = {name: eval(text, dict(names)) for name, text in vars(kind)["__annotations__"].items()}
    return {name: hint for name, hint in own.items() if typing.get_origin(hint) is not ClassVar}


class FieldDescription(NamedTuple):
    """One key of a configuration, for its reference page."""

    type: str
    default: Any
    """`dataclasses.MISSING` if the key is required."""
    doc: str
    """The string literal under the field; empty if there is none."""


def describe_fields(kind: type, where: str = "") -> dict[str, FieldDescription]:
    """Every key of a tree of dataclasses by its dotted name, in the order of the source.

    Types and docstrings are read from the source, because Python keeps no docstrings of fields. A group of keys (a
    field with a dataclass as its default) is described by its own keys.
    """
    source = _field_source(kind)
    found: dict[str, FieldDescription] = {}
    for field in dataclasses.fields(kind):
        name = f"{where}.{field.name}" if where else field.name
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if dataclasses.is_dataclass(default):
            found |= describe_fields(type(default), name)
        else:
            found[name] = FieldDescription(source[field.name][0], default, source[field.name][1])
    return found


def _field_source(kind: type) -> dict[str, tuple[str, str]]:
    """(annotation, docstring) of each annotated field of a class and its bases."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for statement, following in zip(tree.body, [*tree.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            doc = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                doc = inspect.cleandoc(str(following.value.value))
            found[statement.target.id] = ast.unparse(statement.annotation), doc
    return found


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file in UTF-8") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    """A message of YAML without its picture of the place. It is over several lines."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split()) or type(error).__name__
    return problem if mark is None else f"{problem} (line {mark.line + 1}, column {mark.column + 1})"


def _override(tree: dict[str, Any], text: str) -> None:
    import yaml

    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise ConfigError(f"an override must look like name.of.key=value, got {_shown(text)}")
    *parents, last = name.strip().split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{name} must name a key of a group, but {parent} is a value")
        node = child
    try:
        found = yaml.safe_load(value) if value else ""
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"the value of {name} is not valid YAML: {_one_line(error)}") from None
    # To YAML the rest of "exp #3" is a comment. In an override it is part of the name of a folder.
    is_plain = isinstance(found, str) and not value.lstrip().startswith(("'", '"', "!", "&", "|", ">"))
    node[last] = value.strip() if is_plain else found


def _keys_of(field: dataclasses.Field[Any]) -> Collection[str]:
    """The keys of a group: a dataclass, or a mapping whose field names them in its metadata."""
    group = field.default_factory
    if isinstance(group, type) and dataclasses.is_dataclass(group):
        return [f.name for f in dataclasses.fields(group)]
    keys: Collection[str] = field.metadata.get("keys", ())
    return keys


def unknown(place: str, name: str, known: list[str], in_groups: Sequence[str] = ()) -> str:
    """The message about a key that does not exist. in_groups: keys of that name in the groups below.

    It names a key as it is to be written, with its group.
    """
    near = in_groups or difflib.get_close_matches(name, known, n=1)
    listed = f"; known here: {', '.join(known)}" if len(known) <= 20 else ""
    hint = (
        f"; did you mean {' or '.join(repr(place.removesuffix(name) + n) for n in near)}?" if near else listed
    )
    return f"unknown key {place!r}{hint}"


def convert(kind: Any, value: Any, place: str) -> Any:
    """`value` as `kind`. Raises a ConfigError that says what was expected."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _first_that_fits(args, value, place)
    if origin is Literal:
        if value is False and "off" in args:  # YAML reads the plain word `off` as false
            value = "off"
        if value not in args:
            raise ConfigError(f"{place} must be one of {', '.join(map(repr, args))}, got {_shown(value)}")
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{place} is a group of keys, got {_shown(value)}")
        return from_dict(kind, value, place)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{place} must be a list, got {_shown(value)}")
        each = [convert(args[0], v, f"{place}[{i}]") for i, v in enumerate(value)]
        return each if origin is list else tuple(each)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{place} must be a mapping, got {_shown(value)}")
        return {str(k): convert(args[1], v, f"{place}.{k}") for k, v in value.items()}
    if kind is Any:
        return value
    return _scalar(kind, value, place)


def _shown(value: Any) -> str:
    """A value for a message. A long one is cut."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _first_that_fits(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    errors = []
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return convert(kind, value, place)
        except ConfigError as error:
            errors.append(str(error))
    raise ConfigError(errors[0] if len(errors) == 1 else f"{place}: {' / '.join(errors)}")


def _scalar(kind: Any, value: Any, place: str) -> Any:
    if kind is float and isinstance(value, str):
        # YAML 1.1 reads 1e-3 as text, and only 1.0e-3 as a number.
        try:
            return float(value)
        except ValueError:
            pass
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{place} is too large: {_shown(value)}") from None
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(kind, type):
        raise ConfigError(f"{place} cannot be set in a configuration, got {_shown(value)}")
    # A bool is an int in Python, but not in a configuration.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name = {"int": "an integer", "float": "a number", "str": "text", "bool": "true or false"}
        raise ConfigError(f"{place} must be {name.get(kind.__name__, kind.__name__)}, got {_shown(value)}")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value
