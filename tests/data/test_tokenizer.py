"""Tokenizers from files and from text, and the folder they are saved in."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from small_corpus import folder_bytes

from grmoe.data import prepare
from grmoe.data.documents import Document, Position
from grmoe.data.tokenizer import (
    END_OF_TEXT,
    LoadedTokenizer,
    bpe_size,
    load,
    sample,
    save,
    tokenizer_recipe,
    train,
)

pytest.importorskip("tokenizers")
SHARED = Path(os.environ.get("GRMOE_DATA", Path(__file__).parents[3] / "shared" / "data")) / "tokenizer"
TEXTS = [f"Text number {i}, with the same words, über 東京.\r\n  n't , it  ." for i in range(50)]


def as_documents(texts: list[str], split: str = "train") -> list[Document]:
    return [Document(Position(0, i), t, "d", len(t.encode()), split, 0) for i, t in enumerate(texts)]


@pytest.fixture
def gpt2_like(tmp_path: Path) -> Path:
    """A folder with vocab.json and merges.txt, as GPT-2's."""
    folder = tmp_path / "files"
    folder.mkdir()
    trained = json.loads(train(320, as_documents(TEXTS)).tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(trained["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in trained["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return folder


def test_training_is_deterministic_and_reversible() -> None:
    one, two = (train(300, as_documents(TEXTS)).tokenizer for _ in range(2))
    assert one.to_str() == two.to_str()
    assert one.get_vocab_size() == 300
    for text in [*TEXTS, "bytes nobody trained on: \x00\x7f🤖"]:
        assert one.decode(one.encode(text).ids) == text


def test_training_sees_no_validation_document() -> None:
    secret = as_documents(["zzzzqqqq zzzzqqqq zzzzqqqq"] * 100, split="validation")
    assert (
        train(300, as_documents(TEXTS) + secret).tokenizer.to_str()
        == train(300, as_documents(TEXTS)).tokenizer.to_str()
    )


def test_the_sample_fits_and_does_not_depend_on_what_it_cannot_hold() -> None:
    documents = as_documents(TEXTS)
    chosen = sample(documents, 1000)
    assert 0 < sum(len(t.encode()) for t in chosen) <= 1000
    assert chosen == [t for t in TEXTS if t in chosen]
    assert sample([d for d in documents if d.text in chosen], 1000) == chosen
    assert sample(documents, 10**6) == TEXTS


def test_saved_folder_opens_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    record = save(train(300, as_documents(TEXTS)), tmp_path / "tokenizer")
    assert sorted(p.name for p in (tmp_path / "tokenizer").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert record["vocab_size"] == len(opened) == 300
    ids = {opened.eos_token_id, opened.bos_token_id, opened.pad_token_id}
    assert ids == {record["end_of_text"]}
    for text in TEXTS[:3]:
        assert opened.decode(opened(text).input_ids) == text
    # and is itself a tokenizer to prepare with
    again = load(str(tmp_path / "tokenizer"))
    assert save(again, tmp_path / "again") == record


def test_from_vocabulary_and_merges(gpt2_like: Path) -> None:
    trained, loaded = train(320, as_documents(TEXTS)).tokenizer, load(str(gpt2_like)).tokenizer
    for text in TEXTS:
        assert loaded.encode(text).ids == trained.encode(text).ids
    (gpt2_like / "vocab.json").rename(gpt2_like / "encoder.json")
    (gpt2_like / "merges.txt").rename(gpt2_like / "vocab.bpe")
    assert load(str(gpt2_like)).tokenizer.to_str() == loaded.to_str()


def test_a_folder_is_known_by_its_content(gpt2_like: Path) -> None:
    before = tokenizer_recipe(str(gpt2_like))
    assert str(gpt2_like.parent) not in before
    (gpt2_like / "merges.txt").write_text("#version: 0.2\n")
    assert tokenizer_recipe(str(gpt2_like)) != before
    assert tokenizer_recipe("bpe:300") == "bpe:300"


def test_mistakes_are_named(tmp_path: Path) -> None:
    for name in ("bpe:", "bpe:12", "bpe:many"):
        with pytest.raises(ValueError, match=r"bpe:N with N >= 257"):
            bpe_size(name)
    with pytest.raises(ValueError, match=r"holds neither tokenizer.json nor encoder.json and vocab.bpe"):
        load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="could not be read"):
        load(str(tmp_path))
    with pytest.raises(ValueError, match="no document to train"):
        train(300, [])


def test_a_tokenizer_json_is_a_tokenizer(tmp_path: Path) -> None:
    """Before, only a folder was: a path to the file itself was looked up on the hub."""
    trained = train(300, as_documents(TEXTS))
    record = save(trained, tmp_path / "folder")
    whole = load(str(tmp_path / "folder" / "tokenizer.json"))
    assert save(whole, tmp_path / "again") == record
    (tmp_path / "mine.json").write_text(trained.tokenizer.to_str())
    alone = load(str(tmp_path / "mine.json"))
    assert alone.special["eos_token"] == END_OF_TEXT
    assert tokenizer_recipe(str(tmp_path / "mine.json")).startswith("mine.json (sha256 ")
    (tmp_path / "mine.json").write_text('{"text": "no tokenizer"}')
    with pytest.raises(ValueError, match=r"tokenizer .*mine.json could not be read"):
        load(str(tmp_path / "mine.json"))
    (tmp_path / "folder" / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json must hold a JSON object"):
        load(str(tmp_path / "folder"))


def test_a_file_that_is_not_there_is_not_looked_up_on_the_hub() -> None:
    for name in ("some/where/tokenizer.json", "/no/such/folder", "./tokenizer", "~/x", "tokenizer.json"):
        with pytest.raises(ValueError, match=f"tokenizer {name} is neither a file nor a folder"):
            load(name)


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_name_fails_at_once_without_the_hub(monkeypatch: pytest.MonkeyPatch, offline: bool) -> None:
    """Before, transformers tried for 46 seconds. The hub is asked once, and then only the cache is."""
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def no_network(self: Any, name: str, timeout: float) -> None:
        asked.append(timeout)
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(hub.HfApi, "model_info", no_network)
    reason = "HF_HUB_OFFLINE is set" if offline else "Name or service not known"
    message = (
        rf"'owner/name' could not be loaded: it is not in the local cache, and .* \({reason}\); give its"
    )
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        load("owner/name")
    assert time.monotonic() - start < 5
    assert len(asked) == (0 if offline else 1)


def test_a_tokenizer_that_cannot_be_loaded_leaves_nothing_behind(corpus: Path, tmp_path: Path) -> None:
    """Before, the next try with another tokenizer was refused: "was prepared differently"."""
    good: dict[str, Any] = {"tokenizer": "bpe:300", "validation": 0.1, "workers": 1}
    for _ in range(2):  # with an empty folder, then with prepared data that would be replaced
        before = folder_bytes(tmp_path / "out")
        with pytest.raises(ValueError, match="is neither a file nor a folder"):
            prepare(
                [corpus], tmp_path / "out", **good | {"tokenizer": "no/such/file.json", "overwrite": True}
            )
        assert folder_bytes(tmp_path / "out") == before
        prepare([corpus], tmp_path / "out", **good)
    (corpus / "0.jsonl").write_text("not JSON")
    with pytest.raises(ValueError, match="row 1: invalid JSON"):
        prepare([corpus], tmp_path / "strict", strict=True, **good)
    assert not (tmp_path / "strict").exists()


def test_a_chat_template_stays_with_its_tokenizer(tmp_path: Path) -> None:
    trained = train(300, as_documents(TEXTS))
    save(LoadedTokenizer(trained.tokenizer, trained.special, "{{ messages }}"), tmp_path / "a")
    assert load(str(tmp_path / "a")).chat_template == "{{ messages }}"
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ other }}")
    assert load(str(tmp_path / "a")).chat_template == "{{ other }}"
    (tmp_path / "a" / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "a" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert load(str(tmp_path / "a")).chat_template == "yes"


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    def no_network(name: str, **options: Any) -> None:
        raise OSError("We couldn't connect\nand many more lines")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", no_network)
    monkeypatch.setattr("grmoe.data.tokenizer._why_unreachable", lambda name: "")
    with pytest.raises(
        ValueError, match=r"'owner/name' could not be loaded: We couldn't connect; give its tokenizer.json"
    ):
        load("owner/name")


def test_any_fast_tokenizer_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save(train(300, as_documents(TEXTS)), tmp_path / "hub")
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub", pad_token="Ġ", model_max_length=7)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **_: opened)
    monkeypatch.setattr("grmoe.data.tokenizer._why_unreachable", lambda name: "")
    named = load("owner/name")
    assert named.special["pad_token"] == "Ġ"
    assert named.special["eos_token"] == END_OF_TEXT
    assert len(named.tokenizer.encode(TEXTS[0]).ids) > 7


@pytest.mark.skipif(not SHARED.exists(), reason="GPT-2's files are not here")
def test_gpt2_is_gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    named = load(str(SHARED))
    assert named.tokenizer.encode("Hello world").ids == [15496, 995]
    assert named.tokenizer.token_to_id(END_OF_TEXT) == 50256
    assert save(named, tmp_path / "gpt2")["vocab_size"] == 50257
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    assert opened("Hello world").input_ids == [15496, 995]
    assert opened.eos_token_id == opened.pad_token_id == 50256
