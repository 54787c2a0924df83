"""Text into tokens: `grmoe prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from grmoe.terminal import console, fail, need, progress


def prepare(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            help="A folder, a file or a quoted pattern of .txt, .jsonl or .parquet (.txt and .jsonl also .gz, .xz, "
            ".zst); hf:OWNER/NAME or hf:OWNER/NAME:CONFIG, streamed from the hub; or python-stdlib, the source code "
            "of Python's standard library, which needs no download.",
            show_default="python-stdlib",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the tokens.")] = Path("runs/data"),
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bpe:N trains a byte-level BPE of N tokens on the text; gpt2 or any name loads one from the hub; a "
            "folder loads its tokenizer.json, encoder.json + vocab.bpe or vocab.json + merges.txt."
        ),
    ] = "bpe:4096",
    validation: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.99,
            help="Share of the documents held out, chosen by their hash.",
            show_default="0.01; 0.05 of python-stdlib",
        ),
    ] = None,
    validation_source: Annotated[
        str | None, typer.Option(help="Hold this source out instead; it may lie among the others.")
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field of a row that holds the text.")] = "text",
    domain_field: Annotated[
        str, typer.Option(help="Field that names its domain; without one, the file's name does.")
    ] = "domain",
    shard_tokens: Annotated[int, typer.Option(min=2, help="Tokens a file at most.")] = 2**25,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; they change the time, not the result.", show_default="by size"),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first row that is no document.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start again where the folder holds other data.")
    ] = False,
) -> None:
    """Turn text into token files to train on.

    A row is a document: a line of .jsonl, a row of .parquet, a whole .txt file. Documents are tokenised, closed by the
    end-of-text token, and written to files that training maps into memory. Whole documents are held out for
    validation; a document keeps its side when others are added. Rows without text, invalid JSON and undecodable
    bytes are skipped and counted.

    A preparation that is interrupted, even by kill -9 or a full disk, goes on where it stopped when started again, and
    ends with the same bytes. Changed sources or options are refused by name.

    Example: [bold]grmoe prepare corpus/ --validation-source corpus/validation.jsonl.xz --tokenizer bpe:8192[/]
    """
    need("tokenizers", extra="lm")
    from grmoe.data.prepare import prepare as run
    from grmoe.data.report import Reporter, rich_table, skipped_line
    from grmoe.data.sources import STDLIB

    with progress() as bar:
        try:
            index = run(
                source or [STDLIB],
                out,
                tokenizer=tokenizer,
                validation=validation,
                validation_source=validation_source,
                shard_tokens=shard_tokens,
                text_field=text_field,
                domain_field=domain_field,
                workers=workers,
                strict=strict,
                overwrite=overwrite,
                progress=Reporter(bar),
            )
        except (ValueError, ModuleNotFoundError) as error:
            fail(escape(str(error)))
        except KeyboardInterrupt:
            fail("interrupted; the same command goes on where it stopped")
    console.print(rich_table(index))
    for line in filter(None, [skipped_line(index)]):
        console.print(line, highlight=False, soft_wrap=True)
    if not index["splits"]["validation"]["tokens"]:
        console.print(
            "No document is held out for validation; give --validation-source or a larger --validation."
        )
    console.print(f"Tokens: [bold]{escape(str(out))}[/]", highlight=False, soft_wrap=True)
    console.print(f"Next:   grmoe train data.path={escape(str(out))}", highlight=False, soft_wrap=True)
