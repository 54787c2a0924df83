"""The synthetic study as files beside the numbers: tables, and one figure per setting."""

from __future__ import annotations

from pathlib import Path

from grmoe.files import write_file
from grmoe.studies.synthetic.figure import draw
from grmoe.studies.synthetic.study import Result
from grmoe.studies.synthetic.tables import show
from grmoe.tables import Table


def save(result: Result, out: Path) -> dict[str, Path]:
    """table.md, and synthetic-SETTING.png for each setting. The numbers are in METHOD.json already."""
    out.mkdir(parents=True, exist_ok=True)
    parts = [f"{p.title}\n\n{p.markdown()}" if isinstance(p, Table) else p for p in show(result)]
    written = {"Numbers": out, "Table": out / "table.md"}
    write_file(written["Table"], ("\n\n".join(parts) + "\n").encode())
    for each in result.settings:
        name = each.setting.name
        written[f"Figure, {name}"] = draw(each, out / f"synthetic-{name}.png")
    return written
