"""The page in a real browser: what it computes and shows against Python, and that it can be read everywhere."""

from __future__ import annotations

import base64
import json
import math
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_runs import data_of, report, train_run
from torch import Tensor

from grmoe.certificates import entropy_bounds
from grmoe.report import Content, Note, render
from grmoe.report.story import NextStep
from grmoe.routing import Dense, Mass, Selection, TopK, curve_numbers
from grmoe.routing.curve import NO_WEIGHT
from grmoe.routing.selection import NO_LIMIT, largest

BAD = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"


class Page:
    """One page in the browser, at a size and in a colour scheme."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver, self.data = driver, data_of(path)
        self.size(1200)
        driver.get(path.as_uri())
        self.wait_until_drawn()
        self.js("document.documentElement.style.scrollBehavior = 'auto'")

    def wait_until_drawn(self) -> None:
        """The first screen is drawn at once, the rest part by part."""
        self.driver.execute_async_script(
            "const done = arguments[0], drawn = () =>"
            " document.documentElement.hasAttribute('data-drawn') ? done() : setTimeout(drawn, 5); drawn()"
        )

    def js(self, code: str, *arguments: object) -> Any:
        return self.driver.execute_script(code, *arguments)

    def size(self, width: int, dark: bool = False) -> None:
        command = self.driver.execute_cdp_cmd
        command(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        command("Emulation.setEmulatedMedia", {"features": [scheme]})

    def settle(self) -> None:
        """Two frames: one that draws what was asked for, one that has it."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done)))"
        )

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return str(self.js("return document.querySelector(arguments[0]).textContent", selector))

    def point_at(self, element: Any) -> str:
        """The tooltip's words."""
        from selenium.webdriver import ActionChains

        # The driver scrolls what it moves to, and scrolling hides a tooltip: then a move of a pixel on the spot.
        ActionChains(self.driver).move_to_element_with_offset(element, 1, 1).perform()
        self.settle()
        ActionChains(self.driver).move_to_element(element).perform()
        assert self.one("#tip").is_displayed()
        return str(self.one("#tip").text)

    def set_alpha(self, value: float) -> None:
        self.js(
            "const n = document.getElementById('alpha-number'); n.value = arguments[0];"
            "n.dispatchEvent(new Event('change'))",
            value,
        )
        self.settle()

    def set_budget(self, value: float) -> None:
        self.js(
            "const b = document.getElementById('budget'); b.value = arguments[0]; b.dispatchEvent(new Event('input'))",
            value,
        )
        self.settle()

    def read(self, name: str) -> str:
        """A number of the dial at the top: experts, perplexity or speed."""
        return self.text(f"[data-read={name}] .value")

    def set_selection(self, **selection: object) -> None:
        self.js("setState({selection: arguments[0]})", selection)
        self.settle()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[[Path], Page]]:
    """Opens pages; none may have logged an error by the end of a test."""
    browser.get_log("browser")
    yield lambda path: Page(browser, path)
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def page_content(run: Any) -> Content:
    """The content a page's data was made from."""
    return Content(**run | {"next": [NextStep(**step) for step in run["next"]]})


def gates(run: Any, layer: int) -> tuple[Tensor, Tensor]:
    """(a_N, b_TN) as the page holds them."""
    packed = run["sample"]["layers"][layer]
    N = run["model"]["experts"] + run["model"]["identity_experts"]
    steps = np.frombuffer(base64.b64decode(packed["scores"]), "<u2").reshape(-1, N)
    return torch.tensor(packed["a"], dtype=torch.float64), -packed["step"] * torch.from_numpy(
        steps.astype(float)
    )


def expected(run: Any, layer: int, alpha: float, selection: Selection) -> dict[str, Any]:
    """Means over the sample by the library itself, in fp64."""
    a_N, b_TN = gates(run, layer)
    logits_TN = a_N + alpha * b_TN
    probs_TN = torch.softmax(logits_TN, -1)
    kept_TN = selection(probs_TN)
    band = entropy_bounds(logits_TN)
    N = probs_TN.shape[-1]
    counted_TN = torch.nn.functional.one_hot(probs_TN.argmax(-1), N) if selection.dense else kept_TN
    load_N = counted_TN.double().mean(0)
    return {
        "entropy": float(-torch.xlogy(probs_TN, probs_TN).sum(-1).mean()),
        "lower": float(band.lower.bound.mean()),
        "upper": float(band.upper.bound.mean()),
        "experts": float(kept_TN.sum(-1).double().mean()),
        "dropped": float(1 - (probs_TN * kept_TN).sum(-1).mean()),
        "load": load_N.tolist(),
        "gate": probs_TN.mean(0).tolist(),
        "sorted": probs_TN.sort(-1, descending=True).values.mean(0).tolist(),
        "cv": float(load_N.std(correction=0) / load_N.mean()),
    }


def number(text: str) -> float:
    return float(text.replace("−", "-").replace("%", "").replace(",", "").strip())


def test_the_band_is_the_librarys(page: Path, show: Callable[[Path], Page]) -> None:
    shown = show(page)
    generator = torch.Generator().manual_seed(0)
    for N in (2, 3, 8, 64):
        for size in (0.0, 1e-6, 0.1, 1.0, 10.0, 300.0):
            logits = size * torch.randn(N, generator=generator, dtype=torch.float64)
            band = entropy_bounds(logits)
            lower, upper = shown.js("return entropyBounds(Float64Array.from(arguments[0]))", logits.tolist())
            # Both in doubles; the library divides by the range first, which costs a few last digits.
            assert lower == pytest.approx(float(band.lower.bound), abs=1e-12, rel=1e-12)
            assert upper == pytest.approx(float(band.upper.bound), abs=1e-12, rel=1e-12)


def test_ticks_can_be_told_apart(page: Path, show: Callable[[Path], Page]) -> None:
    shown = show(page)
    for ticks, labels in (
        ([51.6, 51.65, 51.7, 51.75], ["51.6", "51.65", "51.7", "51.75"]),  # three digits: 51.7 twice
        ([0, 0.5, 1], ["0", "0.5", "1"]),
        ([-2, 1000, 1001], ["−2", "1000", "1001"]),
        ([1e6], ["1000000"]),
    ):
        assert shown.js("return tickLabels(arguments[0])", ticks) == labels


SELECTIONS: list[tuple[dict[str, Any], Selection]] = [
    ({"kind": "mass", "tau": 0.5, "k": 2}, Mass(0.5, cap=2)),
    ({"kind": "mass", "tau": 0.9, "k": 4}, Mass(0.9)),
    ({"kind": "topk", "tau": None, "k": 3}, TopK(3)),
    ({"kind": "dense", "tau": None, "k": 4}, Dense()),
]


@pytest.mark.parametrize(("said", "selection"), SELECTIONS)
def test_cards_show_what_python_computes(
    page: Path, show: Callable[[Path], Page], said: dict[str, Any], selection: Selection
) -> None:
    shown = show(page)
    (run,) = shown.data["runs"]
    shown.set_selection(**said)
    # At α = 0 all experts are equal, and which of them `topk` takes is not said.
    for alpha in (0.5, 1.0, 2.0, 7.3) if said["kind"] == "topk" else (0.0, 0.5, 1.0, 2.0, 7.3):
        shown.set_alpha(alpha)
        for layer in range(2):
            want = expected(run, layer, alpha, selection)
            card = f".card[data-layer='{layer}'] "
            stat = {
                key: shown.text(f"{card}[data-stat={key}]")
                for key in ("entropy", "experts", "dropped", "load", "cv", "alpha")
            }
            assert number(stat["alpha"]) == alpha
            # To the digits that are shown.
            assert number(stat["entropy"]) == pytest.approx(want["entropy"], abs=0.000501)
            # A band that excludes less than half of all entropies says nothing and is not shown.
            tells = want["upper"] - want["lower"] <= math.log(4) / 2
            assert bool(shown.all(f"{card}[data-stat=band]")) == tells
            if tells:
                lower, upper = map(number, shown.text(f"{card}[data-stat=band]").split(" – "))
                assert (lower, upper) == pytest.approx((want["lower"], want["upper"]), abs=0.000501)
                assert lower <= number(stat["entropy"]) <= upper
            assert number(stat["experts"]) == pytest.approx(want["experts"], abs=0.000501)
            assert number(stat["dropped"]) == pytest.approx(100 * want["dropped"], abs=0.0501)
            assert number(stat["cv"]) == pytest.approx(want["cv"], abs=0.000501)
            least, most = map(number, stat["load"].split(" – "))
            assert (least, most) == pytest.approx(
                (100 * min(want["load"]), 100 * max(want["load"])), abs=0.0501
            )
            bars = shown.js(
                "return [...document.querySelectorAll(arguments[0])].map((b) => Number(b.dataset.value))",
                card + ".bar",
            )
            # Load of each expert, then the gate by rank: not rounded.
            assert bars == pytest.approx(want["load"] + want["sorted"], abs=1e-9)


def test_identity_experts_are_chosen_and_compute_nothing(
    data: Path, tmp_path: Path, show: Callable[[Path], Page]
) -> None:
    run = train_run(tmp_path / "run", data, identity_experts=2)
    status, said = report(run, "--tokens", 500)
    assert status == 0, said
    shown = show(run / "report.html")
    (facts,) = shown.data["runs"]
    shown.set_selection(kind="topk", tau=None, k=2)
    shown.set_alpha(1.5)
    for layer in range(2):
        a_N, b_TN = gates(facts, layer)
        probs_TN = torch.softmax(a_N + 1.5 * b_TN, -1)
        assert probs_TN.shape[-1] == 6
        load_N = TopK(2)(probs_TN)[:, :4].double().mean(0)
        assert 0.5 < load_N.sum() < 2  # some choices compute nothing
        card = f".card[data-layer='{layer}'] [data-stat="
        assert number(shown.text(f"{card}experts]")) == pytest.approx(float(load_N.sum()), abs=0.000501)
        cv = float(load_N.std(correction=0) / load_N.mean())
        assert number(shown.text(f"{card}cv]")) == pytest.approx(cv, abs=0.000501)
        entropy = float(-torch.xlogy(probs_TN, probs_TN).sum(-1).mean())
        assert number(shown.text(f"{card}entropy]")) == pytest.approx(entropy, abs=0.000501)
    kept = torch.softmax(gates(facts, 0)[0] + 1.5 * gates(facts, 0)[1][0], -1).topk(2).indices
    tip = shown.point_at(shown.one("#tokens .tok"))
    assert f"{int((kept < 4).sum())} of 4" in tip
    assert len(shown.all("#tip .gate")) == 6


def test_alpha_moves_by_keys_and_goes_back(page: Path, show: Callable[[Path], Page]) -> None:
    from selenium.webdriver import Keys

    shown = show(page)
    (run,) = shown.data["runs"]
    shown.one("[data-mark=trained]").click()
    shown.settle()
    # As trained: each layer at its own α.
    assert [shown.text(f".card[data-layer='{i}'] [data-stat=alpha]") for i in range(2)] == ["1.5", "1"]
    before = number(shown.text(".card [data-stat=entropy]"))
    slider = shown.one("#alpha")
    assert slider.get_attribute("aria-valuetext") == "α = 1.5, 1"
    slider.send_keys(*[Keys.ARROW_RIGHT] * 5)
    shown.settle()
    alpha = number(slider.get_attribute("aria-valuetext").removeprefix("α = "))
    assert alpha > 1.2
    after = number(shown.text(".card[data-layer='1'] [data-stat=entropy]"))
    want = expected(run, 1, alpha, TopK(2))
    assert after == pytest.approx(want["entropy"], abs=0.000501)
    slider.send_keys(Keys.END)
    shown.settle()
    assert number(shown.text(".card [data-stat=entropy]")) < before
    assert number(shown.text(".card [data-stat=alpha]")) == 10
    shown.one("#alpha-reset").click()
    shown.settle()
    assert number(shown.text(".card [data-stat=entropy]")) == before


def test_gates_follow_the_budget(page: Path, show: Callable[[Path], Page]) -> None:
    """The same τ, α and cap as `model.set_budget`, and then about as many experts as it says."""
    shown = show(page)
    curve = shown.data["runs"][0]["model"]["curve"]
    for budget in (1.0, 1.2, curve[2]["experts_per_token"], 1.77, 2.0):
        shown.set_budget(budget)
        wanted = curve_numbers(curve, shown.js("return state.budget"), 2)
        for layer, want in enumerate(wanted):
            found = shown.js("return settingOf(data.runs[0], state, arguments[0])", layer)
            kind, tau = ("at_least", -want.tau) if want.tau < 0 else ("mass", min(1.0, want.tau))
            assert found["selection"]["tau"] == pytest.approx(tau, abs=1e-6)
            assert (found["selection"]["kind"], found["selection"]["k"]) == (kind, want.cap)
            assert found["alpha"] == pytest.approx(want.alpha, rel=1e-5)
        experts = number(shown.text(".total b").removesuffix(" experts per token"))
        assert experts == pytest.approx(budget, abs=0.1)


def test_any_curve_is_followed_as_the_library_follows_it(page: Path, show: Callable[[Path], Page]) -> None:
    """Caps that differ by layer, an α per layer, a bias at one end only, and a cap that falls."""
    curve: list[dict[str, Any]] = [
        {"experts_per_token": 1.0, "tau": 0.2, "alpha": [1.0, 2.0, 1.0], "cap": [1, 1, 1]},
        {"experts_per_token": 1.4, "tau": [0.3, 0.5, 0.4], "alpha": 1.5, "cap": 2, "bias": [[0.1, -0.1]] * 3},
        {"experts_per_token": 2.0, "tau": 1.0, "alpha": 1.0, "cap": [2, 3, 2]},
        {"experts_per_token": 2.2, "tau": 1.0, "alpha": 1.0, "cap": [2, 2, 4]},
        {"experts_per_token": 4.0, "tau": 1.0, "alpha": 2.0, "cap": [4, 5, 4], "bias": [[0.2, -0.3]] * 3},
    ]
    shown = show(page)
    for budget in (1.0, 1.1, 1.25, 1.39, 1.4, 1.7, 1.99, 2.0, 2.05, 2.15, 2.2, 2.6, 3.1, 3.7, 4.0):
        found = shown.js("return curveNumbers(arguments[0], arguments[1], 3)", curve, budget)
        for mine, want in zip(found, curve_numbers(curve, budget, 3), strict=True):
            assert mine["cap"] == want.cap
            assert mine["alpha"] == pytest.approx(want.alpha)
            assert min(1.0, mine["tau"]) == pytest.approx(min(1.0, want.tau))
            assert (mine["bias"] or [0, 0]) == pytest.approx(list(want.bias or (0, 0)))


def test_where_the_cap_alone_decides_a_clear_gate_gets_all_of_it(
    page: Path, show: Callable[[Path], Page]
) -> None:
    """One expert holds all the probability there is. The library computes the second one too, and so does the page."""
    shown = show(page)
    curve = shown.data["runs"][0]["model"]["curve"]
    clear = [1.0, 0.0, 0.0, 0.0]
    kept = (
        "const p = arguments[0]; return keptOf(settingOf(data.runs[0], state, 0).selection, 4, (i) => p[i])"
    )
    counts = {}
    for budget in (1.2, 2.0):
        shown.set_budget(budget)
        tau, _, cap, _ = curve_numbers(curve, shown.js("return state.budget"), 2)[0]
        counts[budget] = int(largest(torch.tensor(clear), tau, cap).sum())
        assert shown.js(kept, clear) == counts[budget]
    assert counts == {1.2: 1, 2.0: 2}
    none = {"weight": [NO_WEIGHT, 0.3], "alpha": 1.0, "cap": 1}
    ends = [{"experts_per_token": 1.32, **none}, {"experts_per_token": 3.02, **none}]
    for budget in (1.3454454350095368, 2.0, 2.9):  # the first one rounds
        found = shown.js("return curveNumbers(arguments[0], arguments[1], 2).map(byCap)", ends, budget)
        assert found == [n.tau == NO_LIMIT for n in curve_numbers(ends, budget, 2)] == [True, False]


def test_the_dial_shows_what_was_measured(page: Path, run: Path, show: Callable[[Path], Page]) -> None:
    """At measured settings the numbers of results.json; in between, numbers between them, and the page says so."""
    body = json.loads((run / "dial" / "results.json").read_text())["body"]
    shown = show(page)
    for mark in ("trained", "chosen"):
        shown.one(f"[data-mark={mark}]").click()
        shown.settle()
        point = body[mark]
        assert number(shown.read("experts")) == pytest.approx(point["experts_per_token"], abs=0.00501)
        assert number(shown.read("perplexity")) == pytest.approx(point["perplexity"], abs=0.00501)
        assert number(shown.read("speed").rstrip("×")) == pytest.approx(
            point["speed"]["relative"], abs=0.00501
        )
        assert shown.text("#how") == "Measured at this setting."
    low, high = body["curve"][2], body["curve"][3]
    for point in (low, high):
        shown.set_budget(point["experts_per_token"])
        assert number(shown.read("perplexity")) == pytest.approx(math.exp(point["loss"]), abs=0.00501)
        assert "Perplexity is measured" in shown.text("#how")
    between = (low["experts_per_token"] + high["experts_per_token"]) / 2
    shown.js("setState({budget: arguments[0], mark: null})", between)
    shown.settle()
    middle = math.exp((low["loss"] + high["loss"]) / 2)
    assert number(shown.read("perplexity")) == pytest.approx(middle, abs=0.00501)
    assert f"interpolated between settings measured at {low['experts_per_token']:.2f}" in shown.text("#how")
    said = shown.one("#budget").get_attribute("aria-valuetext")
    assert number(said.split()[0]) == pytest.approx(between, abs=0.00501)
    assert " experts per token" in said


def test_a_dial_without_speeds_shows_none(page: Path, tmp_path: Path, show: Callable[[Path], Page]) -> None:
    """As `grmoe dial --no-speed` leaves it: no picture and no column for speeds. The rest is as it was."""

    def tables(shown: Page) -> list[str]:
        return [t.get_attribute("textContent") for t in shown.all("#frontier table")]

    (run,) = data_of(page)["runs"]
    timed = show(page)
    before, pictures = tables(timed), len(timed.all("#frontier svg[role=img]"))
    assert sum("speed" in text for text in before) == 2
    assert "speed relative to trained" in timed.text("#frontier")
    dial, slider = run["dial"], run["slider"]
    points = [*dial["points"], *dial["table"], dial["trained"], dial["chosen"], *slider["stops"]]
    for point in [*points, slider["trained"], slider["chosen"]]:
        point["speed"] = None
    slider["speeds"] = []
    path = tmp_path / "untimed.html"
    path.write_text(render([page_content(run)]), encoding="utf-8")
    shown = show(path)
    assert len(tables(shown)) == len(before)
    assert len(shown.all("#frontier svg[role=img]")) == pictures - 1
    assert "speed" not in shown.text("#frontier")
    assert not any("–" in text for text in tables(shown))
    assert shown.read("speed") == "–"
    shown.set_budget((slider["stops"][0]["experts_per_token"] + slider["stops"][1]["experts_per_token"]) / 2)
    assert "peed" not in shown.text("#how")


def test_the_dial_is_turned_by_keys(page: Path, show: Callable[[Path], Page]) -> None:
    from selenium.webdriver import Keys

    shown = show(page)
    # From the top of the page, a few presses of Tab reach the slider, its marks, the commands and the sections.
    reached = []
    for _ in range(8):
        shown.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(
            shown.js(
                "const a = document.activeElement, s = getComputedStyle(a);"
                "return [a.id || a.dataset.mark || a.className || a.tagName, s.outlineStyle]"
            )
        )
    assert [name for name, _ in reached] == ["budget", "chosen", "trained", *["copy"] * 3, "A", "A"]
    assert {outline for _, outline in reached} == {"solid"}
    slider = shown.one("#budget")
    slider.send_keys(Keys.HOME)
    shown.settle()
    assert number(shown.read("experts")) == 1
    slider.send_keys(Keys.END)
    shown.settle()
    assert number(shown.read("experts")) == 2


def test_a_token_says_its_gate_at_the_present_alpha(page: Path, show: Callable[[Path], Page]) -> None:
    from selenium.webdriver import Keys

    shown = show(page)
    (run,) = shown.data["runs"]
    shown.set_selection(kind="mass", tau=0.95, k=4)
    for alpha, layer, place in ((0.5, 0, 3), (4.0, 1, 17)):
        shown.js("setState({layer: arguments[0]})", layer)
        shown.set_alpha(alpha)
        token = shown.all(".tok")[place]
        said = shown.point_at(token)
        a_N, b_TN = gates(run, layer)
        probs_N = torch.softmax(a_N + alpha * b_TN[place], -1)
        values = [number(node.text) for node in shown.all("#tip .gate .v")]
        assert values == pytest.approx((100 * probs_N).tolist(), abs=0.0501)
        kept = [int(node.get_attribute("data-expert")) for node in shown.all("#tip .gate.kept")]
        assert kept == Mass(0.95, cap=4)(probs_N).nonzero()[:, 0].tolist()
        assert int(token.get_attribute("data-expert")) == int(probs_N.argmax())
        window = run["sample"]["windows"][0]
        assert run["analysis"]["types"][window["types"][place]] in said
        assert f"block {run['model']['moe_layers'][layer]}" in said
    # By keys as well: one stop for all tokens, arrows between them.
    token.send_keys(Keys.ARROW_RIGHT)
    assert shown.js("return document.activeElement.dataset.t") == "18"
    assert shown.one("#tip").is_displayed()
    assert shown.js("return document.querySelectorAll('.tok[tabindex=\"0\"]').length") <= 2
    shown.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not shown.one("#tip").is_displayed()


def test_a_finger_does_what_a_pointer_does(page: Path, show: Callable[[Path], Page]) -> None:
    shown = show(page)
    shown.size(375)
    for selector in (".tok", ".heat td", ".bar", "#training svg .area"):
        element = shown.one(selector)
        shown.js("arguments[0].scrollIntoView({block: 'center'})", element)
        shown.settle()
        box = shown.js("return arguments[0].getBoundingClientRect().toJSON()", element)
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        touch = shown.driver.execute_cdp_cmd
        touch("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [place]})
        touch("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        shown.settle()
        assert shown.one("#tip").is_displayed(), selector
        box = shown.js("return document.getElementById('tip').getBoundingClientRect().toJSON()")
        assert box["left"] >= 0
        assert box["right"] <= 375
        touch("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": 2, "y": 790}]})
        touch("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        shown.settle()
        assert not shown.one("#tip").is_displayed()


def test_the_heat_map_is_the_analysis(page: Path, show: Callable[[Path], Page]) -> None:
    shown = show(page)
    (run,) = shown.data["runs"]
    for layer in range(2):
        shown.js("setState({layer: arguments[0]})", layer)
        shown.settle()
        cells = shown.js(
            "return [...document.querySelectorAll('.heat')]"
            ".map((t) => [...t.querySelectorAll('td')].map((c) => c.textContent))"
        )
        found = run["analysis"]["layers"][layer]
        domains = np.array(found["domain_of_expert"], dtype=float).T
        counts = np.array(found["counts"], dtype=float)
        with np.errstate(invalid="ignore"):
            of_type, of_expert = counts / counts.sum(0), counts / counts.sum(1, keepdims=True)
        for table, wanted in zip(cells, (of_type, of_expert, domains), strict=True):
            values = [v for row in wanted for v in row]
            assert [c != "–" for c in table] == [v is not None and v == v for v in values]
            pairs = [(number(c), 100 * v) for c, v in zip(table, values, strict=True) if c != "–"]
            assert all(abs(a - b) <= 0.5001 for a, b in pairs)
    assert "tokens it leads" in shown.point_at(shown.one(".heat td"))


def test_the_pictures_show_every_rule(page: Path, show: Callable[[Path], Page]) -> None:
    """All points of all rules, the chosen and the trained setting with their marks."""
    shown = show(page)
    dial = shown.data["runs"][0]["dial"]
    shown.settle()
    names = [family["name"] for family in dial["families"]]
    assert {"k per layer", "gate × norm"} <= set(names)
    legend = shown.text("#rules .legend")
    assert all(name in legend for name in names)
    assert len(shown.all("#rules .point")) == sum(len(f["points"]) for f in dial["families"])
    assert len(shown.all("#rules .plot .ring")) == 2
    said = shown.point_at(shown.all("#rules .point")[0])
    assert any(
        f"{p['perplexity']:.2f}" in said and f"{p['experts_per_token']:.3f}" in said for p in dial["points"]
    )
    assert f"{dial['chosen']['experts_per_token']:.2f} experts per token" in shown.text("#frontier")
    rows = shown.js(
        "return [...document.querySelectorAll('#frontier table')].map((t) => t.querySelectorAll('tbody tr').length)"
    )
    assert rows[0] == len(dial["table"]) + 2
    assert rows[-1] == sum(len(f["points"]) for f in dial["families"])


def test_certificates_that_exclude_nothing_are_folded(
    page: Path, tmp_path: Path, show: Callable[[Path], Page]
) -> None:
    (run,) = data_of(page)["runs"]
    first, second = run["dial"]["certificates"]
    first |= {"tells": True, "layer": 7}
    second |= {"tells": False}
    path = tmp_path / "some.html"
    path.write_text(render([page_content(run)]), encoding="utf-8")
    shown = show(path)
    rows = shown.all("#frontier [aria-label=Certificates] tbody tr")
    assert [row.text.startswith("block 7") for row in rows] == [True]
    assert "says something where" in shown.text("#frontier")
    first["tells"] = False
    path.write_text(render([page_content(run)]), encoding="utf-8")
    shown = show(path)
    assert not shown.one("#frontier [aria-label=Certificates]").is_displayed()
    assert "they exclude nothing here" in shown.text("#frontier summary")


def test_texts_stand_side_by_side(page: Path, show: Callable[[Path], Page]) -> None:
    shown = show(page)
    (run,) = shown.data["runs"]
    written = [node.get_attribute("textContent") for node in shown.all("#writing .prose")]
    assert written == [run["writing"]["prompt"] + text["text"] for text in run["writing"]["texts"]]
    assert len(written) == 3
    tops = {shown.js("return arguments[0].getBoundingClientRect().top", n) for n in shown.all(".written")}
    assert len(tops) == 1


def test_a_dialled_run_whose_model_is_gone_shows_what_was_measured(
    page: Path, run: Path, tmp_path: Path, show: Callable[[Path], Page]
) -> None:
    """Checkpoints are removed to save room. The page has no slider then, and all else that it knows."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "report.html"))
    status, said = report(copy)
    assert status == 0, said
    shown = show(copy / "report.html")
    assert not shown.all("#budget")
    assert shown.all("#rules svg .point")
    assert shown.all("#frontier svg")
    assert shown.all("#training svg")


def test_other_data_is_not_compared_by_perplexity(
    both: tuple[Path, str], tmp_path: Path, show: Callable[[Path], Page]
) -> None:
    """Bits per byte stand for perplexities in the table, and losses are drawn apart."""
    runs = data_of(both[0])["runs"]
    runs[1]["training"]["data"] = "other"
    path = tmp_path / "other.html"
    path.write_text(render([page_content(run) for run in runs]), encoding="utf-8")
    shown = show(path)
    shown.settle()
    facts = shown.text("#summary .facts")
    assert "perplexity" not in facts
    assert all(f"{run['training']['bits_per_byte']:.3f}" in facts for run in runs)
    assert "different data" in shown.text("#summary")
    counts = shown.js(
        "return [...document.querySelectorAll('#training svg[role=img]')]"
        ".map((s) => s.querySelectorAll('.line').length)"
    )
    assert counts == [1, 1, 2, 2, 4]


def test_several_runs_side_by_side(both: tuple[Path, str], show: Callable[[Path], Page]) -> None:
    shown = show(both[0])
    first, second = shown.data["runs"]
    heading = shown.text("#summary thead")
    assert first["name"] in heading
    assert second["name"] in heading
    for run in (first, second):
        assert f"{run['training']['validation']['perplexity']:.2f}" in shown.text("#summary tbody")
    assert f"grmoe dial {second['path']}" in shown.text("#frontier .note")
    shown.settle()
    # One line per run in each picture of training; two in the one of smallest and largest load.
    counts = shown.js(
        "return [...document.querySelectorAll('#training svg[role=img]')]"
        ".map((s) => s.querySelectorAll('.line').length)"
    )
    assert counts == [2, 2, 2, 4]
    shown.js("setState({...firstState(data.runs[1]), run: 1})")
    shown.settle()
    assert f"grmoe dial {second['path']}" in shown.text("#dial .note")
    assert [node.is_displayed() for node in shown.all("#next ul")] == [False, True]
    assert not shown.one("#rules").is_displayed()
    want = expected(second, 0, 1.0, Mass(0.5, cap=2))
    assert number(shown.text(".card [data-stat=entropy]")) == pytest.approx(want["entropy"], abs=0.000501)


def test_a_tooltip_holds_nothing_but_its_rows(
    page: Path, tmp_path: Path, show: Callable[[Path], Page]
) -> None:
    (run,) = data_of(page)["runs"]
    run["training"]["validation"]["domains"] = {"books": 1.0, "code": 2.0}
    path = tmp_path / "domains.html"
    path.write_text(render([page_content(run)]), encoding="utf-8")
    shown = show(path)
    shown.settle()
    said = shown.point_at(shown.one("#summary .point"))
    assert said.split() == ["books", run["name"], "2.72"]


def test_notes_on_experts_stand_with_what_is_shown(
    page: Path, tmp_path: Path, show: Callable[[Path], Page]
) -> None:
    """An analysis was made for the page, and the old one is named all the same."""
    (run,) = data_of(page)["runs"]
    run["notes"] = [Note("experts", "Old results.", "grmoe analyze run")]
    path = tmp_path / "notes.html"
    path.write_text(render([page_content(run)]), encoding="utf-8")
    shown = show(path)
    assert shown.text("#types .note") == "Old results. Get it with grmoe analyze run"
    assert shown.all(".heat")


def test_gates_do_not_tell_what_expert_choice_computes(
    data: Path, tmp_path: Path, show: Callable[[Path], Page]
) -> None:
    """Experts pick tokens, so the page shows entropies and leaders, and no experts per token or load."""
    run = train_run(tmp_path / "run", data, 4, router="expert_choice", alpha=1.0, allow_noncausal_router=True)
    status, said = report(run, "--tokens", 500)
    assert status == 0, said
    shown = show(run / "report.html")
    shown.settle()
    stats = shown.js("return [...document.querySelectorAll('.card [data-stat]')].map((s) => s.dataset.stat)")
    assert {"entropy", "effective"} <= set(stats) <= {"entropy", "band", "effective"}
    assert "experts per token" not in shown.text("#layers")
    assert "has no dial" in shown.text("#dial .note")
    assert not shown.one(".selection").is_displayed()
    assert "computed" not in shown.point_at(shown.all(".tok")[2])


@pytest.mark.parametrize("width", [1200, 390])
def test_a_far_setting_is_marked_and_does_not_flatten_the_picture(
    page: Path, tmp_path: Path, show: Callable[[Path], Page], width: int
) -> None:
    """A point at the end of the frontier, ten times the range above the rest: an arrow on the edge, with its number."""
    (run,) = data_of(page)["runs"]
    dial = run["dial"]
    far = dial["families"][0]["points"][0]
    low, high = dial["scale"]
    for point in dial["points"]:
        point["perplexity"] = min(
            point["perplexity"], high
        )  # a small model may have a far setting of its own
    dial["points"][far] |= {"perplexity": high + 10 * (high - low), "name": "far"}
    path = tmp_path / "far.html"
    path.write_text(render([page_content(run)]), encoding="utf-8")
    shown = show(path)
    shown.size(width)
    shown.settle()
    assert len(shown.all("#rules .point.above")) == 1
    (label,) = shown.all("#rules text.above")
    number_shown = f"{dial['points'][far]['perplexity']:.1f}"
    assert label.text == f"{number_shown}: above the scale"
    assert f"Above the picture: {number_shown}." in shown.one("#rules .plot svg").get_attribute("aria-label")
    assert "far" in shown.point_at(shown.one("#rules .point.above .mark"))
    # The label is inside the picture, and the other settings take up most of its height.
    boxes = shown.js(
        "return ['svg', 'text.above', '.point:not(.above) .mark'].map((s) => "
        "[...document.querySelectorAll('#rules .plot ' + s)].map((n) => n.getBoundingClientRect().toJSON()))"
    )
    (svg, *_), (words,), marks = boxes
    assert svg["left"] <= words["left"] < words["right"] <= svg["right"]
    assert max(m["bottom"] for m in marks) - min(m["top"] for m in marks) > 0.5 * svg["height"]


def colour(text: str) -> np.ndarray[Any, Any]:
    return np.array([float(v) for v in text[text.index("(") + 1 : -1].split(",")[:3]]) / 255


def contrast(first: str, second: str) -> float:
    """The ratio of the accessibility guidelines."""

    def luminance(text: str) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour(text)]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_both_colour_schemes_can_be_read(page: Path, show: Callable[[Path], Page], dark: bool) -> None:
    shown = show(page)
    shown.size(1200, dark)
    shown.settle()
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    paper, ink = shown.js(style, "body", "backgroundColor"), shown.js(style, "body", "color")
    assert (colour(paper).mean() < 0.2) == dark
    assert contrast(paper, ink) >= 7
    panel = shown.js(style, ".card", "backgroundColor")
    assert contrast(panel, shown.js(style, ".card dt", "color")) >= 4.5
    assert contrast(paper, shown.js(style, "#training svg text", "fill")) >= 4.5
    assert contrast(panel, shown.js(style, ".tok", "color")) >= 7


def test_a_screen_reader_finds_a_name_for_everything(
    both: tuple[Path, str], show: Callable[[Path], Page]
) -> None:
    """The tree that assistive software reads: controls, links, pictures and regions have names."""
    shown = show(both[0])
    shown.settle()
    shown.js("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    tree = shown.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    nodes = [n for n in tree if not n.get("ignored")]
    named = {
        "slider",
        "button",
        "combobox",
        "link",
        "img",
        "image",
        "radio",
        "checkbox",
        "spinbutton",
        "region",
    }
    found = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes]
    assert named - {"img", "image"} <= {role for role, _ in found}
    assert [role for role, name in found if role in named and not name.strip()] == []
    levels = [
        next(p["value"]["value"] for p in n["properties"] if p["name"] == "level")
        for n in nodes
        if n["role"]["value"] == "heading"
    ]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))


@pytest.mark.parametrize("width", [375, 768, 1200])
def test_nothing_reaches_over_the_edge(
    both: tuple[Path, str], show: Callable[[Path], Page], width: int
) -> None:
    shown = show(both[0])
    shown.size(width)
    shown.settle()
    shown.settle()
    assert shown.js("return innerWidth") == width
    assert shown.js("return document.documentElement.scrollWidth") <= width
    # Words of a picture neither leave it nor lie on each other.
    outside, crossed = shown.js(
        """
        let outside = 0, crossed = 0;
        for (const picture of document.querySelectorAll("svg[role=img]")) {
          const frame = picture.getBoundingClientRect();
          const boxes = [...picture.querySelectorAll("text")].map((t) => t.getBoundingClientRect());
          for (const [i, a] of boxes.entries()) {
            if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.bottom > frame.bottom + 1) outside++;
            for (const b of boxes.slice(i + 1)) {
              const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
              const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
              if (wide > 1 && high > 4) crossed++;
            }
          }
        }
        return [outside, crossed];
        """
    )
    assert (outside, crossed) == (0, 0)


def test_tables_fit_a_phone(both: tuple[Path, str], page: Path, show: Callable[[Path], Page]) -> None:
    """Before, three of six were wider than the screen. Their last columns had to be scrolled into view."""
    for path in (page, both[0]):
        shown = show(path)
        shown.size(375)
        shown.settle()
        shown.js("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        widths = shown.js(
            "return [...document.querySelectorAll('.scroll')].map((s) => [s.scrollWidth, s.clientWidth])"
        )
        assert len(widths) > 5
        assert all(table <= place for table, place in widths), widths


def test_it_opens_at_once_and_asks_for_nothing(both: tuple[Path, str], show: Callable[[Path], Page]) -> None:
    page = show(both[0])
    took = []
    for _ in range(3):  # the best: what else the machine does is not the page's affair
        page.driver.refresh()
        took.append(page.js("return performance.getEntriesByType('navigation')[0].loadEventEnd"))
        page.wait_until_drawn()
    assert min(took) < 1000, took  # milliseconds; a tenth of that on an idle machine
    assert page.js("return performance.getEntriesByType('resource').map((r) => r.name)") == []


def test_text_stays_text(page: Path, tmp_path: Path, show: Callable[[Path], Page]) -> None:
    (run,) = data_of(page)["runs"]
    run["name"] = run["path"] = run["training"]["text"] = run["analysis"]["text"] = BAD
    run["sample"]["windows"][0]["pieces"][:2] = [BAD, "</SCRIPT \n<!--"]
    run["sample"]["windows"][0]["domain"] = run["analysis"]["domains"][0] = BAD
    run["training"]["validation"]["domains"][BAD] = 2.0
    run["story"] = run["found"] = [BAD]
    run["next"] = [{"text": BAD, "command": f"grmoe {BAD} --text FILE"}]
    run["writing"]["prompt"] = run["writing"]["texts"][0]["text"] = BAD
    run["dial"]["points"][0]["name"] = run["dial"]["chosen"]["name"] = run["dial"]["asked"] = BAD
    notes = run.pop("notes")
    assert notes == []
    path = tmp_path / "bad.html"
    path.write_text(render([page_content(run)]), encoding="utf-8")
    shown = show(path)
    shown.settle()
    assert shown.js("return window.broken") is None
    assert shown.js("return document.querySelectorAll('img').length") == 0
    assert shown.text("h1") == shown.driver.title.removesuffix(" – grmoe report") == BAD
    assert shown.all(".tok")[0].text == BAD
    said = shown.point_at(shown.all(".tok")[0])
    assert "window.broken = 1" in said
    assert shown.js("return window.broken") is None
