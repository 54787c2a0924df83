"""Configurations: types, overrides, mistakes named where they are."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grmoe.config import ConfigError, describe_fields, differences, from_dict, load, to_dict, to_yaml


@dataclass
class Inner:
    rate: float = 0.1
    steps: int = 10
    name: str | None = None
    kind: Literal["cosine", "constant"] = "cosine"
    alpha: float | list[float] = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be positive, got {self.steps}")


@dataclass
class Outer:
    seed: int = 0
    fast: bool = False
    inner: Inner = field(default_factory=Inner)
    options: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (1, 2)


def test_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 3\ninner:\n  rate: 2\n  steps: 5\n")
    config = load(Outer, file, ["inner.steps=7", "inner.name=x", "sizes=[4, 5, 6]", "options.a.b=1"])
    assert config == Outer(3, False, Inner(2.0, 7, "x"), {"a": {"b": 1}}, (4, 5, 6))
    assert isinstance(config.inner.rate, float)


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", ".001"])
def test_every_way_to_write_a_number(text: str) -> None:
    assert load(Outer, None, [f"inner.rate={text}"]).inner.rate == 0.001


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.stpes=3", "unknown key 'inner.stpes'; did you mean 'inner.steps'?"),
        ("rate=3", "unknown key 'rate'; did you mean 'inner.rate'?"),
        ("xyz=3", "unknown key 'xyz'; known here: seed, fast, inner, options, sizes"),
        ("seed=1.5", "seed must be an integer, got 1.5"),
        ("seed=true", "seed must be an integer, got True"),
        ("fast=1", "fast must be true or false, got 1"),
        ("inner.rate=fast", "inner.rate must be a number, got 'fast'"),
        ("inner.kind=linear", "inner.kind must be one of 'cosine', 'constant', got 'linear'"),
        ("inner=3", "inner is a group of keys, got 3"),
        ("inner.steps=0", "inner: steps must be positive, got 0"),
        ("sizes=3", "sizes must be a list, got 3"),
        ("sizes=[1, a]", r"sizes\[1\] must be an integer, got 'a'"),
        ("seed", "an override must look like name.of.key=value, got 'seed'"),
        ("seed=[1", "the value of seed is not valid YAML"),
        ("inner.alpha=x", "inner.alpha must be a number, got 'x' / inner.alpha must be a list, got 'x'"),
    ],
)
def test_mistakes_say_where_and_what(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(Outer, None, [override])


@pytest.mark.parametrize(
    ("text", "name"),
    [("runs/exp #3", "runs/exp #3"), (" a  b ", "a  b"), ("'x' # y", "x"), ("''", ""), ("ä/ö #", "ä/ö #")],
)
def test_text_is_taken_as_it_is_written(text: str, name: str) -> None:
    """`out='runs/exp #3'` once trained in runs/exp: to YAML the rest is a comment."""
    assert load(Outer, None, [f"inner.name={text}"]).inner.name == name


def test_mistakes_in_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load(Outer, tmp_path / "missing.yaml")
    for text, message in [("- 1", "must hold a mapping"), ("a: [", "is not valid YAML")]:
        file = tmp_path / "bad.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load(Outer, file)
    with pytest.raises(ConfigError, match="must name a key of a group, but seed is a value"):
        load(Outer, None, ["seed=1", "seed.x=2"])


@given(
    st.builds(
        Outer,
        seed=st.integers(-(2**40), 2**40),
        fast=st.booleans(),
        inner=st.builds(
            Inner,
            rate=st.floats(allow_nan=False, allow_infinity=False),
            steps=st.integers(1, 10**9),
            name=st.none() | st.text("abc ä:#'\"{}[]!%&*0123", max_size=8),
            kind=st.sampled_from(["cosine", "constant"]),
            alpha=st.lists(st.floats(-1e3, 1e3), max_size=3),
        ),
        sizes=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    )
)
def test_a_saved_configuration_loads_as_itself(config: Outer) -> None:
    import yaml

    assert from_dict(Outer, yaml.safe_load(to_yaml(config))) == config


def test_differences_name_the_keys() -> None:
    old, new = to_dict(Outer()), to_dict(Outer(inner=Inner(rate=0.2), sizes=(3,)))
    assert differences(old, new) == ["inner.rate: 0.1 → 0.2", "sizes: [1, 2] → [3]"]
    assert differences(old, old) == []


# -- descriptions ----------------------------------------------------------------------------------------------


@dataclass
class Described:
    """A group."""

    needed: int
    """Has no default."""
    rate: float | None = 0.5
    """First line.
    Second line."""
    silent: tuple[int, ...] = field(default_factory=tuple)


@dataclass
class DescribedTree(Described):
    inner: Inner = field(default_factory=Inner)
    name: Literal["a", "b"] = "a"
    """A name."""


def test_descriptions_of_fields() -> None:
    found = describe_fields(DescribedTree)
    assert list(found) == [
        "needed", "rate", "silent",
        "inner.rate", "inner.steps", "inner.name", "inner.kind", "inner.alpha", "name",
    ]  # fmt: skip
    assert found["needed"] == ("int", MISSING, "Has no default.")
    assert found["rate"] == ("float | None", 0.5, "First line.\nSecond line.")
    assert found["silent"] == ("tuple[int, ...]", (), "")
    assert found["inner.kind"] == ("Literal['cosine', 'constant']", "cosine", "")
    assert found["name"].doc == "A name."


def test_descriptions_of_the_models_fields() -> None:
    """Hugging Face's base class has annotations that cannot be evaluated at run time."""
    GrmoeConfig = pytest.importorskip("grmoe.model").GrmoeConfig
    found = describe_fields(GrmoeConfig)
    assert found["num_experts"] == ("int", 8, "N, experts per MoE layer.")
    assert all(found[name].doc for name in GrmoeConfig.__annotations__ if name in found)
