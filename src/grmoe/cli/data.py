"""Text into tokens: `grmoe prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grmoe.cli import options
from grmoe.cli.shell import shell
from grmoe.terminal import say, say_all, say_written, show_progress


def prepare(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, a file or a quoted pattern of .txt, .jsonl, .parquet or .arrow files (.txt and .jsonl also "
            "as .gz, .xz, .zst). hf:OWNER/NAME or hf:OWNER/NAME:CONFIG streams from the Hugging Face hub. "
            "python-stdlib is the source code of Python's standard library and needs no download.",
            show_default="python-stdlib",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the token files.")] = Path("runs/data"),
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bpe:N trains a byte-level BPE of N tokens on the text. A tokenizer.json, or a folder with "
            "tokenizer.json, encoder.json + vocab.bpe or vocab.json + merges.txt, is loaded. gpt2, or any other name, "
            "comes from the hub or from its local cache."
        ),
    ] = "bpe:4096",
    validation: Annotated[
        str | None,
        typer.Option(
            help="Share of the documents to hold out for validation, chosen by their hash: 5% or 0.05. Of few or long "
            "documents: this share of each, its end.",
            show_default="1%, and more where later commands need it; 5% of python-stdlib",
        ),
    ] = None,
    validation_source: Annotated[
        str | None, typer.Option(help="Hold out this source instead. It may be one of the sources given.")
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="1024",
            help="Tokens per sequence that you will train with. Validation gets at least eight of them. Text that is "
            "too short for that, or for a batch of training, is refused.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Rows hold conversations: a field messages with a list of role and content. The tokenizer's chat "
            "template turns them into text, and training counts the loss on the assistant's words only.",
        ),
    ] = False,
    text_field: Annotated[
        str | None,
        typer.Option(
            help="Field of a row that holds the text.", show_default="text, or messages with --chat"
        ),
    ] = None,
    domain_field: Annotated[
        str, typer.Option(help="Field that names the domain. Rows without it take the folder's name.")
    ] = "domain",
    max_document_mb: Annotated[
        float,
        typer.Option(min=0.001, help="Skip longer documents: MiB of a .txt file, of a row of the others."),
    ] = 64.0,
    shard_tokens: Annotated[int, typer.Option(min=2, help="Most tokens per file.")] = 2**25,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes. They change the time, not the result.",
            show_default="by the size of the text",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first row that is not a document.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start over if the folder holds other data.")
    ] = False,
) -> None:
    """Turn text into token files to train on.

    A row is a document: a line of .jsonl, a row of .parquet or .arrow, a whole .txt file. Each document is tokenised,
    closed by the end-of-text token, and written to files that training maps into memory. Whole documents are held out
    for validation. A document stays on its side when you add others. Of a single file, or of a few, the end is held
    out.
    The files of a folder are one domain, and each folder in it is another. Rows without text, invalid JSON, text that
    is not UTF-8 and documents that are too long are skipped, counted and named.

    Run the same command again after an interruption, even after kill -9 or a full disk. It continues where it stopped
    and writes the same bytes. Changed sources or options are refused by name.

    Example: [bold]grmoe prepare input.txt[/]

    Example: [bold]grmoe prepare corpus/ --validation-source corpus/validation.jsonl.xz --tokenizer bpe:8192[/]

    Example: [bold]grmoe prepare conversations.jsonl --chat --tokenizer path/to/tokenizer.json[/]
    """
    with shell("lm", continues=True):
        from grmoe.data.prepare import prepare as run
        from grmoe.data.progress import Reporter, next_command, show
        from grmoe.data.sources import STDLIB
        from grmoe.data.splitting import SEQUENCE_LENGTH

        share = None
        if validation is not None:
            share = options.parse_percent("validation", validation, ambiguous=1, zero=True)
        with show_progress() as progress:
            index = run(
                source or [STDLIB], out, tokenizer=tokenizer, validation=share,
                validation_source=validation_source, sequence_length=sequence_length or SEQUENCE_LENGTH,
                shard_tokens=shard_tokens, chat=chat, text_field=text_field, domain_field=domain_field,
                max_document=round(max_document_mb * 2**20), workers=workers, strict=strict, overwrite=overwrite,
                progress=Reporter(progress),
            )  # fmt: skip
        say_all(show(index, sequence_length))
        say_written(Tokens=out)
        if command := next_command(index, out, sequence_length):
            say(f"Next: {command}")
