"""Preparation as a whole: what goes in comes out, whatever happens on the way."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from killing import OPTIONS
from small_corpus import folder_bytes, make_documents, write_jsonl

from grmoe.data import TokenDataset, prepare
from grmoe.data.journal import JOURNAL, Journal, changes
from grmoe.data.prepare import Progress
from grmoe.files import write_file

tokenizers = pytest.importorskip("tokenizers")
KILLING = Path(__file__).with_name("killing.py")
OUTSIDE = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def texts_of(folder: Path, split: str) -> list[tuple[str, str]]:
    """(domain, text) of every document, decoded."""
    data = TokenDataset(folder, split, verify=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(data.tokenizer_folder / "tokenizer.json"))
    found = []
    for domain, ids in data.iter_documents():
        assert ids[-1] == data.end_of_text
        assert data.end_of_text not in ids[:-1]
        found.append((domain, tokenizer.decode(ids[:-1].tolist())))
    assert len(found) == data.documents
    return found


def rows_of(corpus: Path) -> list[tuple[str, str]]:
    lines = [line for path in sorted(corpus.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [(row["domain"], row["text"]) for row in map(json.loads, lines)]


def test_round_trip(corpus: Path, tmp_path: Path) -> None:
    quoting = {"text": "an <|endoftext|> quoted, not meant", "domain": "prose"}
    long = {"text": "longer than a shard " * 700, "domain": "code"}
    write_jsonl(corpus / "c.jsonl", [quoting, long, *make_documents(10, seed=3)])
    index = prepare([corpus], tmp_path / "out", **OPTIONS)
    train, validation = (texts_of(tmp_path / "out", split) for split in ("train", "validation"))
    assert len(validation) > 5
    assert sorted(train + validation) == sorted(rows_of(corpus))
    order = {row: i for i, row in enumerate(rows_of(corpus))}
    assert [order[row] for row in train] == sorted(order[row] for row in train)
    for split in ("train", "validation"):
        shards = index["splits"][split]["shards"]
        assert all(0 < shard["tokens"] <= 900 for shard in shards)
        rows = train if split == "train" else validation
        for domain, tally in index["splits"][split]["domains"].items():
            mine = [text for name, text in rows if name == domain]
            assert tally["documents"] == len(mine)
            assert tally["bytes"] == sum(len(text.encode()) for text in mine)
    assert sum(s["documents"] for s in index["splits"]["train"]["shards"]) == len(train)
    assert not list((tmp_path / "out").glob("*partial")) + list((tmp_path / "out").glob(JOURNAL))


def test_workers_change_nothing(corpus: Path, tmp_path: Path) -> None:
    one = prepare([corpus], tmp_path / "one", workers=1, **OPTIONS)
    two = prepare([corpus], tmp_path / "two", workers=2, **OPTIONS)
    assert one == two
    assert folder_bytes(tmp_path / "one") == folder_bytes(tmp_path / "two")


@pytest.mark.parametrize("mode", [["random", "20"], ["steps"]])
def test_killed_and_resumed_is_the_same_to_the_byte(corpus: Path, tmp_path: Path, mode: list[str]) -> None:
    with (corpus / "b.jsonl").open("a") as file:
        file.write('not JSON\n{"text": "' + "longer than a shard " * 700 + '"}\n{"text": ""}\n')
    prepare([corpus], tmp_path / "straight", workers=1, **OPTIONS)
    command = [sys.executable, str(KILLING), str(corpus), str(tmp_path / "killed"), *mode]
    done = subprocess.run(command, env=OUTSIDE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20  # killed, not merely asked to
    assert folder_bytes(tmp_path / "killed") == folder_bytes(tmp_path / "straight")


def test_workers_end_with_a_killed_main_process(corpus: Path, tmp_path: Path) -> None:
    write_jsonl(corpus / "a.jsonl", make_documents(4000))
    options = OPTIONS | {"shard_tokens": 5000}
    code = f"from grmoe.data import prepare\nif __name__ == '__main__': prepare([{str(corpus)!r}], "
    code += f"{str(tmp_path / 'out')!r}, workers=2, **{options!r})"
    script = tmp_path / "script.py"
    script.write_text(code)
    main = subprocess.Popen([sys.executable, str(script)], env=OUTSIDE, start_new_session=True)
    journal = tmp_path / "out" / JOURNAL
    wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 3)
    main.send_signal(signal.SIGKILL)
    main.wait()
    wait_for(lambda: not _group_alive(main.pid))
    lines = journal.read_bytes().count(b"\n")
    prepare([corpus], tmp_path / "out", workers=1, **options)
    prepare([corpus], tmp_path / "straight", workers=1, **options)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "straight")
    assert lines > 3


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_finished_folder_is_left_alone(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare([corpus], tmp_path / "out", **OPTIONS)
    monkeypatch.setattr(sys.modules["grmoe.data.prepare"], "_begin", None)
    assert prepare([corpus], tmp_path / "out", **OPTIONS) == first
    (tmp_path / "out" / "train-00001.bin").unlink()
    with pytest.raises(ValueError, match=r"train-00001.bin is missing"):
        prepare([corpus], tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("unfinished", [False, True])
def test_changes_are_refused_by_name(corpus: Path, tmp_path: Path, unfinished: bool) -> None:
    out = tmp_path / "out"
    prepare([corpus], out, **OPTIONS)
    if unfinished:
        recipe = json.loads((out / "index.json").read_text())["recipe"]
        (out / "index.json").unlink()
        Journal(out, recipe, overwrite=False).close()
    for change, words in {
        "validation": (0.3, "validation: 0.1 before, 0.3 now"),
        "tokenizer": ("bpe:301", "tokenizer: 'bpe:300' before, 'bpe:301' now"),
        "shard_tokens": (800, "shard tokens: 900 before, 800 now"),
        "text_field": ("body", "text field: 'text' before, 'body' now"),
    }.items():
        with pytest.raises(ValueError, match=words[1]):
            prepare([corpus], out, **OPTIONS | {change: words[0]})
    write_jsonl(corpus / "a.jsonl", make_documents(119, seed=1))
    (corpus / "b.jsonl").rename(corpus / "c.jsonl")
    with pytest.raises(
        ValueError, match=r"gone in the sources: b.jsonl; new .*: c.jsonl; changed .*: a.jsonl"
    ):
        prepare([corpus], out, **OPTIONS)
    fewer = OPTIONS | {"shard_tokens": 3000}  # shards that are left over must go
    prepare([corpus], out, overwrite=True, **fewer)
    prepare([corpus], tmp_path / "fresh", **fewer)
    assert folder_bytes(out) == folder_bytes(tmp_path / "fresh")


def test_another_sequence_length_is_named_as_such(corpus: Path, tmp_path: Path) -> None:
    prepare([corpus], tmp_path / "out", tokenizer="bpe:300", sequence_length=64)
    with pytest.raises(ValueError, match="differently \\(sequence length: 64 before, 128 now\\)"):
        prepare([corpus], tmp_path / "out", tokenizer="bpe:300", sequence_length=128)


def test_a_share_in_place_of_the_default_is_the_only_difference(corpus: Path, tmp_path: Path) -> None:
    """It also said "sequence length: 64 before, None now": with a share nothing depends on the length."""
    prepare([corpus], tmp_path / "out", tokenizer="bpe:300", sequence_length=64)
    for share in (0.01, 0.1):
        said = rf"differently \(validation: 0\.01 or more before, {share} now\)"
        with pytest.raises(ValueError, match=said):
            prepare([corpus], tmp_path / "out", tokenizer="bpe:300", validation=share)


def test_what_is_made_inside_the_source_is_no_text(corpus: Path) -> None:
    """`grmoe prepare .`: its own journal, and the log of a run, changed the sources."""
    out = corpus / "runs" / "data"
    first = prepare([corpus], out, **OPTIONS)
    run = corpus / "runs" / "first"
    run.mkdir()
    for name in ("config.yaml", "environment.json", "log.jsonl"):
        (run / name).write_text('{"step": 1}\n')
    assert prepare([corpus], out, **OPTIONS) == first
    (out / "index.json").unlink()
    Journal(out, first["recipe"], overwrite=False).close()
    assert prepare([corpus], out, **OPTIONS) == first
    (run / "environment.json").unlink()  # a file of somebody who names his like ours
    with pytest.raises(ValueError, match=r"new in the sources: runs/first/log\.jsonl"):
        prepare([corpus], out, **OPTIONS)


def test_folders_that_are_not_ours_are_not_touched(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"holds thesis.tex, but no prepared data"):
            prepare([corpus], tmp_path / "home", overwrite=overwrite, **OPTIONS)
    assert list(folder_bytes(tmp_path / "home")) == ["thesis.tex"]


def test_two_at_once_are_refused(corpus: Path, tmp_path: Path) -> None:
    def interfere(_: object) -> None:
        with pytest.raises(ValueError, match="is being prepared by another process"):
            prepare([corpus], tmp_path / "out", **OPTIONS)
        raise KeyError("seen")

    with pytest.raises(KeyError, match="seen"):
        prepare(
            [corpus],
            tmp_path / "out",
            progress=lambda now: interfere(now) if now.phase == "tokenising" else None,
            **OPTIONS,
        )
    prepare([corpus], tmp_path / "out", **OPTIONS)


@pytest.mark.parametrize("ends", [True, False])
def test_another_that_comes_in_between_is_not_replaced(
    ends: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one looks at its sources, another prepares the same folder. What it wrote was once replaced or mixed."""
    out, other = tmp_path / "out", tmp_path / "other.txt"
    other.write_text("quite other words " * 300)
    module = sys.modules["grmoe.data.prepare"]  # `grmoe.data.prepare` itself is the function
    survey = module.survey

    def interrupt(now: Progress) -> None:
        if not ends and now.phase == "tokenising":
            raise KeyboardInterrupt

    def interfere(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(module, "survey", survey)
        with nullcontext() if ends else pytest.raises(KeyboardInterrupt):
            prepare([other], out, progress=interrupt, **OPTIONS)
        return survey(*args, **options)

    monkeypatch.setattr(module, "survey", interfere)
    with pytest.raises(ValueError, match=r"was prepared differently .*new in the sources"):
        prepare([corpus], out, **OPTIONS)
    index = prepare([other], out, **OPTIONS)
    assert [source["name"] for source in index["recipe"]["sources"]] == ["other.txt"]


def test_a_source_that_changes_its_part_is_neither_gone_nor_new() -> None:
    def recipe(*sources: tuple[str, bool]) -> dict[str, Any]:
        return {"sources": [{"name": name, "held_out": held_out} for name, held_out in sources]}

    split, whole = recipe(("a", False), ("b", True)), recipe(("a", False), ("b", False))
    assert changes(whole, split) == ["for validation now: b"]
    assert changes(split, whole) == ["for training now: b"]
    both = recipe(("a", False), ("b", False), ("b", True))  # the same name in both parts
    assert changes(whole, both) == ["new in the sources: b"]
    assert changes(both, split) == ["gone in the sources: b"]


def test_a_full_disk_damages_nothing(tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    corpus.mkdir()
    short, long = "a few words " * 200, "many more words, " * 4000
    write_jsonl(corpus / "a.jsonl", [{"text": short}, {"text": long}, {"text": short}])
    options: dict[str, Any] = {"tokenizer": "bpe:257", "validation": 0.0, "shard_tokens": 70_000}
    limit = 60_000  # bytes a file: the tokenizer and the first shard fit, the second shard does not
    code = (
        f"from grmoe.data import prepare\nprepare([{str(corpus)!r}], {str(out)!r}, workers=1, **{options!r})"
    )
    full = subprocess.run(
        [sys.executable, "-c", code],
        env=OUTSIDE,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert full.returncode == 1
    message = (
        "train-00001.bin: File too large; 1 finished shards are kept: run the same command again to continue"
    )
    assert message in full.stderr
    kept = (out / "train-00000.bin").stat()
    prepare([corpus], out, **options)
    assert (out / "train-00000.bin").stat().st_mtime_ns == kept.st_mtime_ns
    prepare([corpus], tmp_path / "straight", **options)
    assert folder_bytes(out) == folder_bytes(tmp_path / "straight")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "file", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*file: No space left on device"):
        write_file(tmp_path / "file", b"new")
    assert folder_bytes(tmp_path) == {"file": b"old"}


def test_a_torn_line_of_the_journal_counts_as_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path, {"version": 1}, overwrite=False)
    journal.record_tokenizer({"vocab_size": 3})
    journal.close()
    whole = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(whole + b'{"shards": {"tr')
    again = Journal(tmp_path, {"version": 1}, overwrite=False)
    assert (again.tokenizer, again.ranges) == ({"vocab_size": 3}, [])
    again.close()
    assert (tmp_path / JOURNAL).read_bytes() == whole


def test_validation_is_disjoint_and_stays_when_documents_are_added(corpus: Path, tmp_path: Path) -> None:
    prepare([corpus], tmp_path / "one", **OPTIONS)
    write_jsonl(corpus / "aa.jsonl", make_documents(150, seed=9))
    prepare([corpus], tmp_path / "two", **OPTIONS)
    held_out = [set(texts_of(tmp_path / out, "validation")) for out in ("one", "two")]
    train = [set(texts_of(tmp_path / out, "train")) for out in ("one", "two")]
    assert not held_out[0] & train[0]
    assert not held_out[1] & train[1]
    assert held_out[0] < held_out[1]
    assert train[0] < train[1]


def test_a_validation_source_may_lie_among_the_sources(corpus: Path, tmp_path: Path) -> None:
    prepare([corpus], tmp_path / "out", tokenizer="bpe:300", validation_source=corpus / "b.jsonl")
    rows = rows_of(corpus)
    assert texts_of(tmp_path / "out", "train") == rows[:120]
    assert texts_of(tmp_path / "out", "validation") == rows[120:]
    with pytest.raises(ValueError, match="sources must hold more than the validation source"):
        prepare([corpus / "b.jsonl"], tmp_path / "none", validation_source=corpus)
    with pytest.raises(
        ValueError, match="give validation or validation_source, not both"
    ):  # it had no effect
        prepare([corpus], tmp_path / "both", validation=0.05, validation_source=corpus / "b.jsonl")


def test_a_folder_that_cannot_be_used_is_refused_before_the_sources_are_read(
    corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("")

    def stop(now: Progress) -> None:
        raise AssertionError(now)

    for out, message in (
        ("full", "full holds notes"),
        ("full/notes", r"out must be a folder, but .*full.notes"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare([corpus], tmp_path / out, progress=stop)


def test_a_large_vocabulary_takes_four_bytes(corpus: Path, tmp_path: Path) -> None:
    prepare([corpus], tmp_path / "small", **OPTIONS)
    content = json.loads((tmp_path / "small" / "tokenizer" / "tokenizer.json").read_text())
    for number in range(len(content["model"]["vocab"]), 70_000):
        content["model"]["vocab"][f"unused {number}"] = number
    ends = content["added_tokens"][0]
    content["model"]["vocab"] = {k: v for k, v in content["model"]["vocab"].items() if k != ends["content"]}
    content["model"]["vocab"][ends["content"]] = ends["id"] = 70_000
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "tokenizer.json").write_text(json.dumps(content))
    options = OPTIONS | {"tokenizer": str(tmp_path / "large")}
    index = prepare([corpus], tmp_path / "out", **options)
    assert (index["dtype"], index["tokenizer"]["vocab_size"]) == ("uint32", 70_001)
    assert TokenDataset(tmp_path / "out").end_of_text == 70_000
    assert texts_of(tmp_path / "out", "train") == texts_of(tmp_path / "small", "train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": 1.0}, "validation must be a share below 1, got 1.0"),
        ({"validation": -0.1}, "validation must be a finite number >= 0"),
        ({"shard_tokens": 1}, "shard_tokens must be an integer >= 2"),
        ({"workers": 0}, "workers must be an integer >= 1"),
        ({"tokenizer": "bpe:9"}, "tokenizer must be bpe:N with N >= 257"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    corpus: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare([corpus], tmp_path / "out", **OPTIONS | options)
    assert not (tmp_path / "out").exists()


def test_no_document_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"title": "nothing"}\n')
    message = r"no document to train on; empty.jsonl, row 1: no text \(field 'text' is missing\)"
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path / "empty.jsonl"], tmp_path / "out", tokenizer="bpe:300")
    assert not (tmp_path / "out").exists()
