"""From sources to a folder of token shards. An interrupted preparation continues where it stopped.

The order of writes makes this possible: the journal, the tokenizer, then for each range its shards and their line in
the journal, at last `index.json`. Then the journal is removed. Every file appears complete under its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grmoe.checks import finite, positive_int, require
from grmoe.data import tokenizer as tokenizers
from grmoe.data.chat import DEFAULT_TEMPLATE
from grmoe.data.conversations import spoken_text
from grmoe.data.documents import MAX_DOCUMENT, Document, Position, Reader, Skipped
from grmoe.data.encoding import EncoderFile, encode_documents
from grmoe.data.index import MASKED, PLAIN, read_index, write_index
from grmoe.data.journal import JOURNAL, Journal, changes, recipe_of
from grmoe.data.packing import SPLITS, Packer, Range, Tally
from grmoe.data.room import check_room
from grmoe.data.shards import INDEX, TOKENIZER, check_shard, remove_unlisted, token_dtype, write_shard
from grmoe.data.sources import STDLIB, Unit, find_units, fingerprints, folder_domain, is_compressed
from grmoe.data.splitting import SEQUENCE_LENGTH, SHARE, Split, validation_bytes
from grmoe.data.survey import survey
from grmoe.data.tokenizer import LoadedTokenizer
from grmoe.files import alone_in

_SHARD_TOKENS = 2**25
_FEW_DOCUMENTS_SHARE = 0.05  # the standard library has about 700 files, and every domain needs a few
_BYTES_PER_WORKER = 16 * 2**20  # of text: with less, a worker takes longer to start than it saves


@dataclass(frozen=True)
class Progress:
    phase: str
    done: int
    """Bytes of the sources."""
    total: int | None
    """Bytes of the sources; None if the size of a source is unknown."""
    documents: int = 0
    tokens: int = 0


def prepare(
    sources: Sequence[str | Path] = (STDLIB,),
    out: str | Path = "runs/data",
    *,
    tokenizer: str = "bpe:4096",
    validation: float | None = None,
    validation_source: str | Path | None = None,
    sequence_length: int = SEQUENCE_LENGTH,
    shard_tokens: int = _SHARD_TOKENS,
    chat: bool = False,
    text_field: str | None = None,
    domain_field: str = "domain",
    max_document: int = MAX_DOCUMENT,
    workers: int | None = None,
    strict: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, Any]:
    """Tokenise `sources` into the folder `out`. Returns its index (the content of index.json).

    The files depend on the sources and the options alone: not on `workers`, and not on interruptions. A folder that
    was finished with the same sources and options stays as it is.

    `validation` is a share of the documents. Default: 0.01 (0.05 for the standard library), and more where later
    commands need more: eight windows of `sequence_length` tokens. Then text that is too short for these windows, or for
    a batch of training, is refused. Few or long documents are cut, and the end of each is held out.

    chat: rows hold conversations, `{"messages": [{"role": …, "content": …}, …]}`. `text_field` defaults to "messages".
    """
    asked = validation
    require(
        not validation or validation_source is None,
        "give validation or validation_source, not both: a source is held out instead of a share",
    )
    if validation is None:
        validation = _FEW_DOCUMENTS_SHARE if list(sources) == [STDLIB] else SHARE
    finite("validation", validation, at_least=0)
    require(validation < 1, f"validation must be a share below 1, got {validation!r}")
    positive_int("sequence_length", sequence_length)
    positive_int("shard_tokens", shard_tokens, at_least=2)
    positive_int("max_document", max_document)
    if workers is not None:
        positive_int("workers", workers)
    require(bool(sources), "sources must name at least one source")
    tokenizer_name = tokenizers.tokenizer_recipe(tokenizer)
    out = Path(out)
    if not overwrite or not (out / JOURNAL).exists():
        recipe_of(out)  # a folder that holds other things is refused before the sources are read
    units = _units(sources, validation_source, out)
    size = None if any(unit.kind == "hub" for unit in units) else sum(unit.size for unit in units)
    records = fingerprints(units, lambda read: progress(Progress("reading the sources", read, size)))
    automatic = asked is None and validation_source is None
    recipe: dict[str, Any] = {
        "version": MASKED if chat else PLAIN,
        "sources": records,
        "tokenizer": tokenizer_name,
        "validation": 0.0 if validation_source is not None else float(validation),
        "validation_bytes": validation_bytes(sequence_length) if automatic else 0,
        "shard_tokens": shard_tokens,
        "text_field": text_field or ("messages" if chat else "text"),
        "domain_field": domain_field,
        "max_document": max_document,
    }
    if (finished := _finished(out, recipe, overwrite)) is not None:
        return finished

    reader = Reader(units, [record.get("revision") for record in records], text_field=recipe["text_field"],
                    domain_field=domain_field, chat=chat, strict=strict, max_document=max_document)  # fmt: skip
    split = survey(reader, recipe["validation"], max(1, recipe["validation_bytes"]), whole=chat)
    # A tokenizer that cannot be loaded must not cost the data that --overwrite replaces.
    loaded = None if tokenizers.bpe_size(tokenizer) else tokenizers.load(tokenizer)
    with alone_in(out):
        # Again, because another preparation may have begun or ended while this one looked at its sources.
        if (finished := _finished(out, recipe, overwrite)) is not None:
            return finished
        journal = _begin(out, recipe, overwrite)
    run = _Preparation(out, replace(reader, split=split), journal, size, progress)
    try:
        run.ensure_tokenizer(tokenizer, loaded)
        run.write_ranges(shard_tokens, workers or _automatic_workers(units))
        index = _index(journal, split)
        check_room(index, sequence_length if automatic else None, bool(validation_source or validation))
        return run.finish(index)
    except ValueError:
        if not journal.ranges or journal.ranges[-1]["end"] is None:
            _discard(
                out
            )  # no range is finished, or all of them and the text is too short: nothing to continue
        raise
    except OSError as error:
        done = sum(len(r["shards"]) for r in journal.ranges)
        kept = f"{done} finished shards are kept: run the same command again to continue"
        raise OSError(f"{error}; {kept}") from error
    finally:
        journal.close()


def _units(sources: Sequence[str | Path], validation_source: str | Path | None, out: Path) -> list[Unit]:
    """Units for training, then units for validation. A unit in both is for validation.

    `out` may lie in a source: what is noted there until it is finished is no text.
    """
    held_out = [] if validation_source is None else find_units([validation_source], held_out=True)
    notes = os.path.realpath(out / JOURNAL)
    held_out = [unit for unit in held_out if _identity(unit) != notes]
    taken = {notes, *map(_identity, held_out)}
    training = [unit for unit in find_units(sources) if _identity(unit) not in taken]
    require(bool(training), "sources must hold more than the validation source")
    given = [*sources] if validation_source is None else [*sources, validation_source]
    return _one_domain_per_folder(given, training + held_out)


def _one_domain_per_folder(sources: Sequence[str | Path], units: list[Unit]) -> list[Unit]:
    """A file that is a source is a domain, unless its folder or other files of the folder are sources, too.

    Because a shell turns corpus/*.txt into many files.
    """
    paths = [Path(source).resolve() for source in map(str, sources) if Path(source).exists()]
    folders = Counter(path if path.is_dir() else path.parent for path in paths)
    named = []
    for unit in units:
        folder = Path(unit.location).resolve().parent
        shared = unit.kind != "hub" and "/" not in unit.name and folders[folder] > 1
        named.append(replace(unit, domain=folder_domain(folder)) if shared else unit)
    return named


def _identity(unit: Unit) -> str:
    return unit.location if unit.kind == "hub" else os.path.realpath(unit.location)


def _finished(out: Path, recipe: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The index of a finished folder, else None. Raises if the folder has another recipe."""
    if overwrite and (out / JOURNAL).exists():
        return None  # an unfinished preparation: start again
    before = recipe_of(out)
    if before is None or overwrite:
        return None
    is_finished = not (out / JOURNAL).exists()
    now = json.loads(json.dumps(recipe))
    if is_finished:  # by an older version, perhaps, which had fewer options
        now = {key: value for key, value in now.items() if key in before}
    if differences := changes(before, now):
        raise ValueError(
            f"{out} was prepared differently ({'; '.join(differences)}); start again with --overwrite, "
            "or choose another folder"
        )
    if not is_finished:
        return None
    index = read_index(out)
    dtype = token_dtype(index["tokenizer"]["vocab_size"], index["version"] == MASKED)
    for split in SPLITS:
        for record in index["splits"][split]["shards"]:
            check_shard(out, record, dtype)
    return index


def _begin(out: Path, recipe: dict[str, Any], overwrite: bool) -> Journal:
    """Open the journal, and remove every shard that it does not list."""
    journal = Journal(out, recipe, overwrite)
    (out / INDEX).unlink(missing_ok=True)
    listed = [record for r in journal.ranges for record in r["shards"].values()]
    remove_unlisted(out, [record["name"] for record in listed])
    if journal.tokenizer is not None:
        dtype = token_dtype(journal.tokenizer["vocab_size"], recipe["version"] == MASKED)
        for record in listed:
            check_shard(out, record, dtype)
    return journal


def _discard(out: Path) -> None:
    """Remove what this preparation wrote, so that other options can be tried in the same folder."""
    remove_unlisted(out, [])
    shutil.rmtree(out / TOKENIZER, ignore_errors=True)
    (out / JOURNAL).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        out.rmdir()  # only if it is empty


def _automatic_workers(units: Sequence[Unit]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if any(unit.kind == "hub" for unit in units):
        return cores
    # Text compresses to about a quarter.
    text = sum(unit.size * (4 if is_compressed(unit) else 1) for unit in units)
    return min(cores, text // _BYTES_PER_WORKER + 1)


class _Preparation:
    """The writing part of a preparation."""

    def __init__(
        self,
        out: Path,
        reader: Reader,
        journal: Journal,
        size: int | None,
        progress: Callable[[Progress], None],
    ) -> None:
        self.out, self.reader, self.journal, self.size, self.progress = out, reader, journal, size, progress
        self.before = [0]  # bytes of all units before each unit
        for unit in reader.units:
            self.before.append(self.before[-1] + unit.size)

    def ensure_tokenizer(self, name: str, loaded: LoadedTokenizer | None) -> None:
        """loaded: the tokenizer, unless it is to be trained."""
        if self.journal.tokenizer is not None:
            return
        made = loaded or tokenizers.train(tokenizers.bpe_size(name) or 0, self._training_texts())
        if self.reader.chat and made.chat_template is None:
            made = replace(made, chat_template=DEFAULT_TEMPLATE)
        self.journal.record_tokenizer(tokenizers.save(made, self.out / TOKENIZER))

    def _training_texts(self) -> Iterator[Document]:
        for number, row in enumerate(self.reader.read()):
            if isinstance(row, Document):
                yield row._replace(text=spoken_text(row.text)) if self.reader.chat else row
                if number % 256 == 0:
                    self._report("training the tokenizer", row, number, 0)

    def _report(self, phase: str, row: Document, documents: int, tokens: int) -> None:
        done = self.before[row.at.unit] + row.consumed
        self.progress(Progress(phase, done, self.size, documents, tokens))

    def write_ranges(self, shard_tokens: int, workers: int) -> None:
        tokenizer, ranges = self.journal.tokenizer, self.journal.ranges
        assert tokenizer is not None
        start = Position()
        if ranges:
            if ranges[-1]["end"] is None:
                return
            start = Position(*ranges[-1]["end"])
        chat = self.reader.chat
        self.dtype = token_dtype(tokenizer["vocab_size"], masked=chat)
        encoder = EncoderFile(self.out / TOKENIZER, tokenizer["end_of_text"], self.dtype, chat)
        packer = Packer(shard_tokens, ranges[-1]["domains"] if ranges else [])
        earlier = [Tally(**t) for r in ranges for s in r["shards"].values() for t in s["domains"].values()]
        documents, tokens = sum(t.documents for t in earlier), sum(t.tokens for t in earlier)
        for row, ids in encode_documents(self.reader.read(start), encoder, workers):
            if isinstance(row, Skipped):
                packer.skip(row)
            elif isinstance(ids, str):
                reason, _, detail = ids.partition(": ")
                packer.skip(self.reader.skip(row.at, reason, detail))
            else:
                assert ids is not None
                first = start.token if row.at == start._replace(token=0) else 0
                for finished in packer.add(row, ids, first):
                    self._write(finished)
                documents, tokens = documents + 1, tokens + len(ids) - first
                self._report("tokenising", row, documents, tokens)
        self._write(packer.finish())

    def _write(self, finished: Range) -> None:
        number = len(self.journal.ranges)
        shards = {
            split: write_shard(self.out, f"{split}-{number:05d}", shard, self.dtype)
            for split, shard in finished.shards.items()
        }
        self.journal.record_range(
            {
                "shards": shards,
                "skipped": dict(sorted(finished.skipped.items())),
                "first_skipped": finished.first_skipped,
                "domains": finished.domains,
                "end": finished.end,
            }
        )

    def finish(self, index: dict[str, Any]) -> dict[str, Any]:
        index = write_index(self.out, index)
        self.journal.remove()
        return index


def _index(journal: Journal, split_by: Split) -> dict[str, Any]:
    assert journal.tokenizer is not None
    ranges = journal.ranges
    skipped: Counter[str] = Counter()
    first_skipped: dict[str, str] = {}
    for finished in ranges:
        skipped.update(finished["skipped"])
        first_skipped = finished["first_skipped"] | first_skipped
    masked = journal.recipe["version"] == MASKED
    splits = {}
    for split in SPLITS:
        shards = [r["shards"][split] for r in ranges if split in r["shards"]]
        domains = {name: Tally() for name in ranges[-1]["domains"]}
        for shard in shards:
            for name, tally in shard["domains"].items():
                domains[name] += Tally(**tally)
        total = Tally()
        for tally in domains.values():
            total += tally
        by_domain = {name: asdict(tally) for name, tally in domains.items() if tally.tokens}
        splits[split] = asdict(total) | {"domains": by_domain, "shards": shards}
    return {
        "format": "grmoe tokens",
        "version": journal.recipe["version"],
        "dtype": token_dtype(journal.tokenizer["vocab_size"], masked).name,
        "tokenizer": {"name": journal.recipe["tokenizer"], "folder": TOKENIZER, **journal.tokenizer},
        "domains": ranges[-1]["domains"],
        "splits": splits,
        "held_out": asdict(split_by),
        "skipped": dict(sorted(skipped.items())),
        "first_skipped": dict(sorted(first_skipped.items())),
        "recipe": journal.recipe,
    }
