"""What a page claims, against the files it was made from; and what every reader needs: names, order, contrast, size."""

from __future__ import annotations

import base64
import colorsys
import json
import math
import re
import shlex
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer.main
from report_runs import collect, data_of

from grmoe.cli import app
from grmoe.dial.results import DialResults
from grmoe.report import Content, render
from grmoe.report.dialled import families, slider_stops, tells
from grmoe.report.facts import bits_per_byte
from grmoe.report.sample import MAX_NUMBERS
from grmoe.report.story import next_steps, what_it_is, what_the_dial_found
from grmoe.report.writing import prompt_ids, three_budgets, write_samples
from grmoe.runs.folder import read_log
from grmoe.runs.open import open_model


@pytest.fixture(scope="session")
def measured(run: Path) -> Any:
    """Body of the dial's results.json."""
    return json.loads((run / "dial" / "results.json").read_text())["body"]


# -- claims -----------------------------------------------------------------------------------------


def test_the_first_sentences_say_what_the_files_say(page: Path, run: Path, measured: Any) -> None:
    html = page.read_text(encoding="utf-8")
    story = html[html.index('<div id="story">') : html.index("</header>")]
    validation = [line for line in read_log(run) if line["kind"] == "validation"][-1]
    chosen, trained = measured["chosen"], measured["trained"]
    for claim in (
        "GrMoE language model with 4 experts in each of its 2 blocks",
        "10.2 k tokens",  # 40 steps × 8 sequences × 32 tokens
        "(40 steps)",
        f"Perplexity on held-out text: {validation['perplexity']:.2f}",
        f"{chosen['experts_per_token']:.2f} experts per token instead of {trained['experts_per_token']:.2f}",
        f"for {100 * chosen['increase']['value']:+.2f} % perplexity",
        f"({chosen['perplexity']:.2f} instead of {trained['perplexity']:.2f} on its calibration text)",
    ):
        assert claim in story
    low, high = chosen["speed"]["relative_interval"]
    assert ("no change beyond timing noise" in story) == (low <= 1 <= high)


def test_the_slider_stops_where_something_was_measured(page: Path, measured: Any) -> None:
    slider = data_of(page)["runs"][0]["slider"]
    assert slider["exact"]
    for stop, point in zip(slider["stops"], measured["curve"], strict=True):
        assert stop["experts_per_token"] == point["experts_per_token"]
        assert stop["perplexity"] == pytest.approx(math.exp(point["loss"]), rel=1e-5)
        grown = math.expm1(point["loss"] - measured["trained"]["loss"])
        assert stop["increase"]["value"] == pytest.approx(grown, abs=2e-5)
    for name in ("chosen", "trained"):
        for key in ("experts_per_token", "perplexity"):
            assert slider[name][key] == pytest.approx(measured[name][key], rel=1e-5)
    # Every speed is one that was timed, at the experts per token it was timed at.
    timed = [(p["experts_per_token"], p["speed"]["relative"]) for p in measured["points"] if p["speed"]]
    assert len(slider["speeds"]) >= 3
    for s in slider["speeds"]:
        found = (s["experts_per_token"], s["speed"]["relative"])
        assert any(found == pytest.approx(pair, rel=1e-4) for pair in timed)
    counts = [s["experts_per_token"] for s in slider["speeds"]]
    assert counts == sorted(set(counts))


def test_results_without_a_curve_stop_at_the_frontier(measured: Any) -> None:
    slider = slider_stops(measured | {"curve": []}, None, None)
    assert slider is not None
    assert not slider["exact"]
    assert [s["perplexity"] for s in slider["stops"]] == [
        p["perplexity"] for p in measured["points"] if p["on_frontier"]
    ]
    assert three_budgets(slider) == [None]


def test_a_written_model_brings_its_curve(measured: Any) -> None:
    """`dial --write` leaves no results beside the model: perplexities come from its configuration, speeds do not."""
    slider = slider_stops(None, measured["curve"], measured["budget"])
    assert slider is not None
    assert slider["chosen"]["experts_per_token"] == measured["budget"]
    assert slider["trained"] is None
    assert slider["speeds"] == []
    assert slider_stops(None, None, None) is None
    (sentence,) = what_the_dial_found(None, slider)
    assert f"{measured['curve'][0]['experts_per_token']:.2f} to" in sentence


def test_every_rule_of_the_results_is_drawn(page: Path, measured: Any) -> None:
    """Two rules came later than the page: k per layer, and gate × norm."""
    points = [SimpleNamespace(**p) for p in measured["points"]]
    wanted = DialResults.families.fget(SimpleNamespace(points=points))  # type: ignore[attr-defined]
    found = families(measured["points"])
    assert {"k per layer", "gate × norm"} <= set(found)
    assert {name: [p["name"] for p in those] for name, those in found.items()} == {
        name: [p.name for p in those] for name, those in wanted.items() if those
    }
    dial = data_of(page)["runs"][0]["dial"]
    shown = {f["name"]: [dial["points"][i]["perplexity"] for i in f["points"]] for f in dial["families"]}
    for name, those in found.items():
        assert shown[name] == pytest.approx([p["perplexity"] for p in those], rel=1e-5)


def test_a_certificate_tells_something_if_it_is_below_the_output() -> None:
    assert tells({"bound": 0.5, "output": 1.0, "holds": True})
    assert not tells({"bound": 0.5, "output": 1.0, "holds": False})
    assert not tells({"bound": 1.5, "output": 1.0, "holds": True})
    assert not tells({"bound": None, "output": 1.0, "holds": True})


def test_bits_per_byte_count_the_bytes_of_each_domain() -> None:
    sizes = {
        "a": {"tokens": 100, "bytes": 400},
        "b": {"tokens": 50, "bytes": 100},
        "unread": {"tokens": 9, "bytes": 9},
    }
    data: Any = SimpleNamespace(split="validation", index={"splits": {"validation": {"domains": sizes}}})
    # (2 · 100 + 4 · 50) nats in 500 bytes.
    assert bits_per_byte({"a": 2.0, "b": 4.0}, data) == pytest.approx(400 / 500 / math.log(2))
    assert bits_per_byte({"a": math.nan}, data) is None
    assert bits_per_byte({}, data) is None


def test_a_speed_within_noise_is_no_gain() -> None:
    chosen = {"experts_per_token": 1.2, "perplexity": 10.1, "increase": {"value": 0.01}}
    dial: dict[str, Any] = {"trained": {"experts_per_token": 2.0, "perplexity": 10.0}, "asked": "x"}
    told = []
    for interval in ([0.9, 1.3], [1.05, 1.3]):
        speed = {"relative": 1.1, "relative_interval": interval}
        told.append(list(what_the_dial_found(dial | {"chosen": chosen | {"speed": speed}}, None))[-1])
    assert "no change beyond timing noise" in told[0]
    assert told[1] == "It runs at 1.10 times the trained speed."
    stays = dial["trained"] | {"increase": {"value": 0.0}, "speed": None}
    assert "nothing cheaper" in next(what_the_dial_found(dial | {"chosen": stays}, None))


def test_a_run_without_a_model_tells_its_training() -> None:
    training = {
        "tokens": 5000,
        "text": "data",
        "logged": 40,
        "validation": {"perplexity": math.nan},
        "unigram": 3.0,
    }
    assert list(what_it_is(None, training)) == ["Trained on 5 k tokens of data (40 steps)."]


# -- commands ---------------------------------------------------------------------------------------

ROUTED = {"dial": True}
STOPS = {"stops": [{"experts_per_token": 1.0}, {"experts_per_token": 2.0}], "exact": True}


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize(
    "slider", [None, STOPS | {"chosen": {"experts_per_token": 1.38937}}, STOPS | {"chosen": None}]
)
def test_next_commands_are_ones_that_the_program_takes(exported: bool, slider: dict[str, Any] | None) -> None:
    """Options, and paths that a shell would take apart."""
    folder = "/some place/it's a run"
    steps = next_steps(folder, exported, ROUTED, slider, '"""Shared: 3 things\n')
    root: Any = typer.main.get_command(app)
    said = " ".join(step.command for step in steps)
    assert ("grmoe dial" in said) == (slider is None)
    assert ("--budget" in said) == (slider is not None and slider["chosen"] is not None)
    assert "'Shared things'" in said
    for command in [part for step in steps for part in step.command.split(" && ")]:
        program, name, *arguments = shlex.split(command)
        assert program == "grmoe"
        context = root.commands[name].make_context(name, arguments)
        (model,) = [context.params[key] for key in ("model", "run", "folder") if key in context.params]
        assert str(model).startswith(folder)
        if context.params.get("budget"):
            assert context.params["budget"] in (1.3894, ("1.3894",), ["1.3894"])


def test_a_model_that_the_dial_saved_is_served_as_it_is() -> None:
    """Before, the page said to export the run again."""
    slider = STOPS | {"chosen": {"experts_per_token": 1.5}}
    steps = next_steps("runs/a b", False, ROUTED, slider, None, Path("runs/a b/dial/model"))
    served = [step for step in steps if "serve" in step.command]
    assert [(s.text, s.command) for s in served] == [
        ("Serve it at the chosen budget", "grmoe serve 'runs/a b/dial/model'")
    ]


def test_commands_of_the_page_have_the_real_path(page: Path, run: Path) -> None:
    html = page.read_text(encoding="utf-8")
    commands = [re.sub("<.*?>", "", c) for c in re.findall(r"<code>(grmoe .*?)</code></li>", html)]
    assert len(commands) == 3
    assert all(str(run) in command for command in commands)


def test_a_run_that_was_not_dialled_says_how(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("dial"))
    content = collect(copy)
    assert content.slider is None
    assert content.found == []
    assert content.next[0].command == f"grmoe dial {copy}"
    assert content.writing is not None
    assert [text["budget"] for text in content.writing["texts"]] == [None]


# -- what it writes ---------------------------------------------------------------------------------


def test_texts_of_three_budgets_can_be_made_again(page: Path, run: Path, measured: Any) -> None:
    shown = data_of(page)["runs"][0]["writing"]
    budgets = [text["budget"] for text in shown["texts"]]
    assert budgets == sorted(set(budgets))
    assert {1.0, measured["budget"], 2.0} <= set(budgets)
    loaded = open_model(run)
    assert loaded.data is not None
    ids = prompt_ids(loaded, loaded.data)
    again = write_samples(loaded, ids, budgets, 60)
    assert again["texts"] == shown["texts"]
    assert shown["prompt"] == loaded.tokenizer.decode(ids)
    assert loaded.model.budget is None  # as it was
    assert all(text["text"] for text in shown["texts"])


def test_three_budgets_are_the_ends_and_the_chosen_one() -> None:
    stops = [{"experts_per_token": float(k)} for k in (1, 2, 3, 4)]

    def budgets(chosen: float | None) -> list[float | None]:
        point = None if chosen is None else {"experts_per_token": chosen}
        return three_budgets({"stops": stops, "exact": True, "chosen": point})

    assert budgets(1.23456) == [1.0, 1.2346, 4.0]
    assert budgets(4.0) == budgets(1.0) == budgets(None) == [1.0, 3.0, 4.0]


def test_without_a_prompt_nothing_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grmoe.report.content.prompt_ids", lambda loaded, stream: [])
    content = collect(run)
    assert content.writing is None
    (note,) = [n for n in content.notes if n.section == "writing"]
    assert "no token for a prompt" in note.text


# -- for every reader -------------------------------------------------------------------------------


class Outline(HTMLParser):
    """Headings, ids, links and folds of the markup, before any script runs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.levels: list[int] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.attributes: dict[str, dict[str, str | None]] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.attributes.setdefault(tag, found)
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if tag == "a":
            self.links.append(str(found["href"]))
        else:
            self.loaded += [str(v) for k, v in attrs if k in ("src", "href", "srcset", "data", "action")]


def test_the_markup_is_in_order(both: tuple[Path, str]) -> None:
    """Headings without gaps, landmarks, ids once, links that lead somewhere, nothing loaded."""
    page = Outline(both[0].read_text(encoding="utf-8"))
    assert page.levels[0] == 1
    assert page.levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(page.levels))
    assert len(page.ids) == len(set(page.ids))
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert page.loaded == ["data:,"]
    assert {"header", "main", "nav", "footer"} <= set(page.tags)
    assert page.tags.count("details") == page.tags.count("summary") == 1
    assert page.attributes["html"]["lang"] == "en"
    assert page.attributes["nav"]["aria-label"]
    viewport = next(
        s for s in re.findall("<meta .*?>", both[0].read_text(encoding="utf-8")) if "viewport" in s
    )
    assert "user-scalable" not in viewport
    assert "maximum-scale" not in viewport


def test_the_words_of_the_page_are_explained(page: Path) -> None:
    """A reader who does not know them finds them under the glossary's link, in order."""
    html = page.read_text(encoding="utf-8")
    assert '<a href="#glossary">' in html
    words = re.findall(
        r"<dt>(.+?)</dt><dd>(.+?)</dd>", html[html.index('<section id="glossary">') :], re.DOTALL
    )
    names = [name.lower() for name, _ in words]
    assert names == ["α", *sorted(names[1:])]
    assert all(20 < len(meaning) < 250 for _, meaning in words)
    wanted = "bits per byte, block, budget, certificate, entropy of the gate, expert, frontier, gate, load cv, overlap"
    assert {*wanted.split(", "), "α", "perplexity"} <= set(names)
    rules = {family["name"].lower() for family in data_of(page)["runs"][0]["dial"]["families"]}
    assert {"top-k", "gate × norm"} <= rules & set(names)


def test_the_first_screen_stays_text() -> None:
    """Sentences and commands are in the markup itself, where a tag would be a tag."""
    bad = "<img src=x onerror=alert(1)>"
    content = Content(name=bad, path=bad, exported=True, story=[bad], found=[bad])
    content.next = next_steps(bad, True, ROUTED, None, bad)
    html = render([content, content])
    assert "<img" not in html
    assert html.count("&lt;img") >= 6
    assert "<img" not in render([content])


Colour = tuple[float, ...]


def palettes() -> Iterator[dict[str, Colour]]:
    """The colours of the style sheet by name, light and dark."""
    css = files("grmoe.report").joinpath("page.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): #(\w{6})", part))
        for part in css.split("@media (prefers-color-scheme")[:2]
    )
    hot = re.findall(r"--hot: ([\d, ]+)", css)
    for palette, heat in zip((light, light | dark), hot, strict=True):
        found: dict[str, Colour] = {k: tuple(bytes.fromhex(v)) for k, v in palette.items()}
        yield found | {"hot": tuple(map(float, heat.split(",")))}


def luminance(colour: Colour) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(first: Colour, second: Colour) -> float:
    """The ratio of the accessibility guidelines."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def mixed(colour: Colour, share: float, ground: Colour) -> Colour:
    return tuple(share * a + (1 - share) * b for a, b in zip(colour, ground, strict=True))


@pytest.mark.parametrize("palette", list(palettes()), ids=["light", "dark"])
def test_colours_can_be_read(palette: dict[str, Colour]) -> None:
    """4.5 for text, also on the strongest colours behind it; 3 for lines and marks."""
    for text in ("ink", "soft", "accent"):
        for ground in ("paper", "panel", "warn"):
            assert contrast(palette[text], palette[ground]) >= 4.5, (text, ground)
    for i in range(6):
        assert contrast(palette[f"c{i}"], palette["paper"]) >= 3
    script = {
        name: files("grmoe.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("text.js", "types.js", "draw.js")
    }
    (hottest,) = re.findall(r"HOTTEST = (\d+);", script["types.js"])
    assert contrast(palette["ink"], mixed(palette["hot"], int(hottest) / 100, palette["panel"])) >= 4.5
    ((few, many),) = re.findall(r"EXPERTS\.length \? ([\d.]+) : ([\d.]+)", script["text.js"])
    experts = [tuple(map(float, rgb.split(","))) for rgb in re.findall(r'"(\d+,\d+,\d+)"', script["draw.js"])]
    assert len(experts) == 8
    hues = [
        tuple(255 * v for v in colorsys.hls_to_rgb(hue / 360, lightness, saturation))
        for hue in range(0, 360, 3)
        for lightness in (0.48, 0.62)
        for saturation in (0.55, 0.75)
    ]
    for colours, strongest in ((experts, few), (hues, many)):
        worst = min(contrast(palette["ink"], mixed(c, float(strongest), palette["panel"])) for c in colours)
        assert worst >= 4.5


def test_a_page_of_a_large_model_stays_below_a_megabyte(page: Path) -> None:
    """24 MoE layers, 64 experts, every section as large as it becomes."""
    (run,) = data_of(page)["runs"]
    L, N, K = 24, 64, 12
    numbers = np.random.default_rng(0)
    tokens = MAX_NUMBERS // (L * N)
    scores = base64.b64encode(numbers.bytes(2 * tokens * N)).decode()
    alphas = numbers.uniform(0.5, 2, L).tolist()
    run["sample"] = {
        "dial": True,
        "layers": [{"a": numbers.normal(size=N).tolist(), "step": 1e-4, "scores": scores} for _ in range(L)],
        "windows": [{"pieces": ["tokens"] * tokens, "types": [11] * tokens, "domain": "domain"}],
    }
    point = {"experts_per_token": 1.5, "tau": alphas, "alpha": alphas, "cap": 8, "loss": 3.123456}
    run["model"] |= {"alphas": alphas, "moe_layers": list(range(L)), "experts": N}
    run["model"]["curve"] = [
        point | {"bias": numbers.normal(size=(L, N)).round(4).tolist()} for _ in range(12)
    ]
    some = run["dial"]["points"][0] | {"name": f"α {[round(a, 2) for a in alphas]}, mass 0.242, cap 8"}
    run["dial"] |= {"points": [some] * 120, "families": [{"name": "x", "points": list(range(120))}]}
    layer = run["analysis"]["layers"][0] | {
        "counts": numbers.integers(0, 5000, (N, K)).tolist(),
        "domain_of_expert": numbers.uniform(0, 1, (8, N)).tolist(),
        "kappa": numbers.uniform(0, 9, N).tolist(),
    }
    run["analysis"]["layers"] = [layer] * L
    triple = numbers.uniform(0, 2, (401, 3)).tolist()
    run["curves"] |= {
        "steps": list(range(401)),
        "loss": [3.12345] * 401,
        "entropy": triple,
        "load_cv": triple,
    }
    assert len(render([Content(**run | {"next": []})]).encode()) < 1_000_000
