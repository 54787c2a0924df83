"""The synthetic study as files: numbers, tables, one figure per setting."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from grmoe.files import write_file
from grmoe.studies.synthetic.figure import draw
from grmoe.studies.synthetic.study import Result
from grmoe.studies.synthetic.tables import NOTES, Row, table


def save(result: Result, out: Path) -> dict[str, Path]:
    """results.json with every seed, table.md, and synthetic-SETTING.png for each setting."""
    content = {
        "config": asdict(result.config),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "settings": [
            {**asdict(each), "rows": [asdict(Row.of(m, each.num_experts)) for m in each.methods]}
            for each in result.settings
        ],
    }
    out.mkdir(parents=True, exist_ok=True)
    written = {"Numbers": out / "results.json", "Table": out / "table.md"}
    write_file(written["Numbers"], json.dumps(content, indent=1).encode())
    tables = [f"{shown.title}\n\n{shown.markdown()}\n" for shown in map(table, result.settings)]
    write_file(written["Table"], "\n".join([*tables, f"{NOTES}\n"]).encode())
    for each in result.settings:
        name = each.setting.name
        written[f"Figure, {name}"] = draw(each, out / f"synthetic-{name}.png")
    return written
