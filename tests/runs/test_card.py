"""Sections of the model card: each kind once, replaced by a newer one, removed when it no longer holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grmoe.model import GrmoeConfig
from grmoe.runs.card import _use, card_name, describe_setting, model_card, put_section
from grmoe.runs.config import TrainConfig
from grmoe.runs.export import export, write_model
from grmoe.runs.open import open_model
from grmoe.runs.results import results_folder, save_results
from grmoe.train.loop import train

KINDS = st.sampled_from(["dial", "eval", "prune"])


@given(st.lists(st.tuples(KINDS, st.text("ab\n# |", min_size=0, max_size=8)), max_size=8))
def test_every_kind_stands_once_with_its_last_text(steps: list[tuple[str, str]]) -> None:
    card = "# name\n\nHead.\n"
    for kind, text in steps:
        card = put_section(card, kind, text)
    assert card.startswith("# name\n\nHead.\n")
    last = {kind: text.strip() for kind, text in steps}
    for kind, text in last.items():
        block = f"<!-- grmoe:{kind} -->\n{text}\n<!-- /grmoe:{kind} -->\n"
        assert card.count(f"<!-- grmoe:{kind} -->") == (1 if text else 0)
        assert (block in card) == bool(text)


def test_put_twice_is_put_once() -> None:
    once = put_section("head\n", "dial", "## The dial\n\ntext")
    assert put_section(once, "dial", "## The dial\n\ntext") == once


def test_the_setting_in_words() -> None:
    assert describe_setting(GrmoeConfig()) == "α 1, the 2 most probable experts per token"
    mass = GrmoeConfig(selection="mass", selection_tau=0.45, alpha=[1.5] * 6)
    assert "reach probability 0.45, at most 2" in describe_setting(mass)
    assert describe_setting(GrmoeConfig(num_experts_per_tok=1)) == "α 1, the most probable expert per token"
    low, high = ({"experts_per_token": k, "tau": 0.9, "alpha": 1.0, "cap": int(k)} for k in (1.0, 2.0))
    for budget, words in ((1.0, "1 expert per token"), (1.5, "1.5 experts per token")):
        config = GrmoeConfig(budget_curve=[low, high], budget=budget)
        assert describe_setting(config).startswith(f"a budget of {words} (the fewest")
    assert describe_setting(GrmoeConfig(router="switch")) == "router `switch`, α 1"


def test_the_lines_of_a_card_name_the_folder_as_it_was_given() -> None:
    assert card_name(Path("runs/first/dial/model")) == "runs/first/dial/model"
    assert card_name(Path("/data/mine/model")) == card_name(Path("../model")) == "model"
    shown = [_use(GrmoeConfig(router=router), 'a "b"') for router in ("grassmann", "switch")]
    assert ["set_alpha(2.0)" in text for text in shown] == [True, False]  # Switch has no dial
    for text in shown:
        compile(text.split("```")[1].removeprefix("python\n"), "card", "exec")


def test_a_card_has_the_sections_of_its_own_step_only(
    settings: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    config = settings(steps=4, checkpoint={"every": 2})
    train(config)
    run = Path(config.out)
    loaded = open_model(run, "4")
    save_results(loaded, "dial", {}, results_folder(run, "dial"), card="## The dial\n\nof step 4")
    assert "of step 4" in model_card(loaded, "name")
    assert "of step 4" not in model_card(open_model(run, "2"), "name")
    assert "of step 4" not in model_card(loaded, "name", measured=False)
    assert "After 4 steps" in model_card(loaded, "name", measured=False)
    # An exported folder keeps the section, until its experts change.
    export(run, tmp_path / "model", "4")
    folder = open_model(tmp_path / "model")
    assert "of step 4" in model_card(folder, "name")
    assert "of step 4" not in model_card(folder, "name", measured=False)


def test_what_is_written_is_the_model_in_memory(settings: Callable[..., TrainConfig], tmp_path: Path) -> None:
    config = settings(steps=2)
    train(config)
    export(Path(config.out), tmp_path / "model", dtype=torch.float32)
    (tmp_path / "model" / "LICENSE").write_text("mine")
    loaded = open_model(tmp_path / "model")
    before = {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir() if f.is_file()}
    loaded.model.set_alpha(3.0)
    with torch.no_grad():
        loaded.model.lm_head.weight.add_(1.0)
    card = (tmp_path / "model" / "README.md").read_text()
    old = card.replace("<!-- grmoe:use -->\n", "").replace("<!-- /grmoe:use -->\n", "")
    (tmp_path / "model" / "README.md").write_text(old.replace("\ntokenizer = ", "\nmodel = "))
    new = model_card(loaded, "new")
    (tmp_path / "model" / "README.md").write_text(card)
    for written in (new, model_card(loaded, "new")):  # from a card of an earlier version, and from today's
        assert written.count("```python") == 1
        assert written.count('from_pretrained("new"') == 2  # not the folder it was made from
        assert '"model"' not in written
    write_model(loaded, tmp_path / "new", new)
    again = open_model(tmp_path / "new")
    assert again.model.alpha == [3.0]
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name])
    assert (tmp_path / "new" / "LICENSE").read_text() == "mine"
    assert "α 3," in (tmp_path / "new" / "README.md").read_text()
    assert before == {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir() if f.is_file()}
    with pytest.raises(ValueError, match="must be outside the model's own folder"):
        write_model(loaded, tmp_path / "model", "card")
