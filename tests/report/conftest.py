"""Runs trained in a second, one of them with its frontier, as pages; and a browser to open them in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from counting import prepare_corpus
from report_runs import report, train_run

from grmoe.dial import Plan, Target
from grmoe.dial import run as run_dial
from grmoe.dial import save as save_dial


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="session")
def data(folder: Path) -> Path:
    words = ("zero", "One", "the", "three", "4", "five;", "six()", "seven", "eight", "</script>")
    return prepare_corpus(folder, words)


@pytest.fixture(scope="session")
def run(folder: Path, data: Path) -> Path:
    """With the results of `grmoe dial`."""
    made = train_run(folder / "run", data)
    save_dial(run_dial(Plan(model=made, target=Target("experts", 1.5), tokens=1024)), made / "dial")
    return made


@pytest.fixture(scope="session")
def softmax_run(folder: Path, data: Path) -> Path:
    """Only trained."""
    return train_run(folder / "softmax", data, router="softmax", alpha=1.0)


@pytest.fixture(scope="session")
def page(run: Path) -> Path:
    status, said = report(run, "--tokens", 2000)
    assert status == 0, said
    return run / "report.html"


@pytest.fixture(scope="session")
def both(run: Path, softmax_run: Path, folder: Path) -> tuple[Path, str]:
    status, said = report(run, softmax_run, "--tokens", 2000, "--out", folder / "both.html")
    assert status == 0, said
    return folder / "both.html", said


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window, with its own driver: nothing is downloaded."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()
