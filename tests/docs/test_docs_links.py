"""Every link of README and the pages leads somewhere, and every page can be reached."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from doc_pages import DOCS, NAMES, ROOT, all_pages, anchors, generated, without_code


def links(name: str) -> list[tuple[str, str]]:
    """(target, anchor) of every internal link, the target as a path below the root."""
    found = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", without_code(all_pages()[name])):
        if not re.match(r"[a-z]+:", target):
            folder = Path(name).parent.as_posix()
            path = os.path.normpath(os.path.join(folder, target)) if target else name
            found.append((Path(path).as_posix(), anchor))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_internal_link_and_anchor_resolves(name: str) -> None:
    for target, anchor in links(name):
        if target in all_pages():
            assert not anchor or anchor in anchors(all_pages()[target]), f"{name} links to {target}#{anchor}"
        else:
            assert (ROOT / target).exists(), f"{name} links to {target}"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_the_repository_links_to_no_generated_page(name: str) -> None:
    assert not {target for target, _ in links(name)} & set(generated())


def test_the_site_links_only_to_its_own_pages() -> None:
    for name in NAMES:
        if name.startswith("docs/"):
            outside = [target for target, _ in links(name) if not target.startswith("docs/")]
            assert not outside, f"{name} links to {outside}, which is not part of the site"


def test_generated_pages_link_to_pages_that_exist() -> None:
    for name in generated():
        for target, anchor in links(name):
            assert target in all_pages(), f"{name} links to {target}"
            assert not anchor or anchor in anchors(all_pages()[target]), f"{name} links to {target}#{anchor}"


def test_the_navigation_lists_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = list(_leaves(nav))
    pages = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}
    pages |= {"reference/cli.md", "reference/configuration.md"}  # the hook adds the Python API
    assert sorted(listed) == sorted(pages)


def _leaves(node: object) -> list[str]:
    if isinstance(node, str):
        return [node]
    children = node.values() if isinstance(node, dict) else node
    return [leaf for child in children for leaf in _leaves(child)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_tests_and_benchmarks_that_a_page_names_exist(name: str) -> None:
    for path in re.findall(r"(?:pytest|python) ((?:tests|benchmarks)[\w/.]*)", all_pages()[name]):
        assert (ROOT / path).exists(), f"{name} names {path}"
    for path in re.findall(
        r"`(?:tests/)?((?:\w+/)?test_\w+\.py)`", all_pages()[name]
    ):  # the mathematics: below tests/
        assert (ROOT / "tests" / path).is_file(), f"{name} names tests/{path}"


def test_the_source_names_pages_that_exist() -> None:
    for folder in ("src", "tests", "benchmarks", "configs"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in {".py", ".yaml"}:
                for page in re.findall(r"docs/[\w/-]+\.md", file.read_text()):
                    assert page in all_pages(), f"{file.relative_to(ROOT)} names {page}"
