"""Would the tests notice? Change the source at random places, one change at a time, and run the tests.

    python tools/mutate.py --count 200                    # routing, optim, regularizers, train, dial, evaluate
    python tools/mutate.py --count 50 --seed 7 routing    # other rooms, another sample
    python tools/mutate.py --only 17                      # one mutant of the sample again, with pytest's output
    python tools/mutate.py --coverage FILE                # keep what the first pass found, and use it again

Remove FILE when tests were added: a test that the file does not know is never run.

A mutant is one small change: a comparison, an operator, a constant, a condition, a call left out. It is caught when a
test fails or runs into the time limit. Coverage with one context per test says which tests run a line; at most 150 of
these are run, in a copy of the source. A mutant on a line that no test runs survives by definition.

Not mutated, because no result depends on it: docstrings, annotations, messages, `strict=True` (lengths are equal in a
correct program), `non_blocking=`, and in files that draw the look of a line (`alpha=`, `lw=`, `ms=`, …).

Results go to results/mutation.json: every mutant with its diff and the test that caught it. The survivors are printed.
Some changes do not change what the code does; a survivor is a question, not a verdict.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("routing", "optim", "regularizers", "train", "dial", "evaluate")
# Tests of the rooms, and of the rooms that use them most.
TESTS = (
    "tests/routing", "tests/test_layer.py", "tests/optim", "tests/test_regularizers.py", "tests/train", "tests/runs",
    "tests/model/test_model.py", "tests/studies", "tests/probe", "tests/dial", "tests/evaluate",
    "tests/kernels/test_fused_router.py", "tests/kernels/test_gate_budget.py",
)  # fmt: skip
# Per mutant, because lines that everything runs would take minutes each. Those of its own room come first, and one case
# of every test before the second case of any: a test with many cases must not push out the others.
MAX_TESTS = 150
USAGE_ERROR = 4  # of pytest: a test that does not exist. Nothing ran, so nothing was caught.
TIME_LIMIT = 300  # seconds per mutant; its tests take far less

# Importing these takes longer than most tests: every mutant is a fork of a process that has them.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = (
    "torch",
    "torch._dynamo",
    "transformers.modeling_utils",
    "tokenizers",
    "hypothesis",
    "pytest",
    "typer",
    "rich",
)

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


# Keyword arguments in files that draw: how a line looks, not where it is.
LOOK = {"alpha", "lw", "linewidth", "ms", "mew", "fontsize"}


@dataclass
class Mutant:
    number: int
    file: str
    line: int
    before: str
    after: str
    tests: int = 0
    """Tests that run the line."""
    caught_by: str | None = None
    """The first test that failed; "time limit"; None for a survivor."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Change:
    """Replace the source between two positions."""

    line: int
    start: int
    stop: int
    before: str
    after: str


def changes(source: str) -> Iterator[Change]:
    """Every change of one node that fits on one line. Docstrings, annotations and messages are left alone."""
    tree = ast.parse(source)
    skipped = {id(child) for node in _left_alone(tree) for child in ast.walk(node)}
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    content = source.encode()
    for node in ast.walk(tree):
        if id(node) in skipped or getattr(node, "lineno", None) != getattr(node, "end_lineno", 0):
            continue
        for new in _variants(node):
            start = offsets[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            stop = offsets[node.lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            before, after = content[start:stop].decode(), ast.unparse(new)
            # Parentheses keep the meaning of the surrounding expression.
            after = f"({after})" if isinstance(new, ast.expr) and not isinstance(new, ast.Constant) else after
            yield Change(node.lineno, start, stop, before, after)  # type: ignore[attr-defined]


def _left_alone(tree: ast.AST) -> Iterator[ast.AST]:
    draws = any(isinstance(n, ast.ImportFrom) and n.module == "grmoe.pictures" for n in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            strict = node.arg == "strict" and ast.unparse(node.value) == "True"
            if strict or node.arg == "non_blocking" or (draws and node.arg in LOOK):
                yield node.value
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom | ast.Assert):
            yield node
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node  # docstrings
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from node.decorator_list
            if isinstance(node, ast.FunctionDef):
                yield from (
                    a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg) and a.annotation
                )
                if node.returns is not None:
                    yield node.returns
        elif (isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal") or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            yield node


def _variants(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        if not any(
            isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right)
        ):
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1 if isinstance(node.value, int) else 2 * node.value or 1.0)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def sample(rooms: list[str], count: int, seed: int) -> list[tuple[Path, Change]]:
    """Random changes, each file in proportion to how many it has."""
    found = []
    for room in rooms:
        place = ROOT / "src" / "grmoe" / room
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
            found += [(path, change) for change in changes(path.read_text(encoding="utf-8"))]
    print(
        f"{len(found)} possible mutants in {', '.join(rooms)}; {min(count, len(found))} drawn with seed {seed}"
    )
    return random.Random(seed).sample(found, min(count, len(found)))


def cover(tests: list[str], data: Path) -> None:
    """Run the tests once on the source as it is, and note which test runs which line."""
    environment = {"COVERAGE_FILE": str(data)} | _environment(ROOT / "src")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    command += [f"--cov={ROOT / 'src' / 'grmoe'}", "--cov-context=test", "--cov-report="]
    print("running the tests once to see which lines each one runs", flush=True)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the tests must pass before anything is mutated:\n{done.stdout[-3000:]}")


def covering(data: Path, path: Path, line: int) -> list[str]:
    """The tests that run a line, by name. A line that runs on import counts for every test of its file."""
    with sqlite3.connect(data) as base:
        rows = base.execute(
            "select c.context, l.numbits from line_bits l join context c on c.id = l.context_id "
            "join file f on f.id = l.file_id where f.path like ?",
            (f"%/{path.relative_to(ROOT).as_posix()}",),
        ).fetchall()
    here = {name for name, bits in rows if len(bits) > line // 8 and bits[line // 8] >> line % 8 & 1}
    if here == {""}:
        here = {name for name, _ in rows}
    room = path.relative_to(ROOT / "src" / "grmoe").parts[0].removesuffix(".py")
    names = sorted({name.rpartition("|")[0] for name in here if name})  # the end says "run" or "setup"
    cases: Counter[str] = Counter()
    order = {}
    for name in names:
        test = name.split("[")[0]
        order[name] = (f"/{room}" not in name.replace("test_", ""), cases[test], name)
        cases[test] += 1
    return sorted(names, key=order.__getitem__)[:MAX_TESTS]


def judge(mutant: Mutant, change: Change, path: Path, tests: list[str], place: Path) -> str:
    """Run the tests on the changed source in `place`, which is put back afterwards. Returns what pytest printed."""
    target = place / path.relative_to(ROOT / "src")
    content = target.read_bytes()
    began = time.perf_counter()
    target.write_bytes(content[: change.start] + change.after.encode() + content[change.stop :])
    log = place.with_suffix(".log")
    process = CONTEXT.Process(target=run_tests, args=(place, tests, log))
    try:
        process.start()
        process.join(TIME_LIMIT)
        if process.exitcode is None:
            process.kill()
            process.join()
            mutant.caught_by = "time limit"
        elif process.exitcode == USAGE_ERROR and "ERROR collecting" not in log.read_text():
            raise ValueError(
                f"pytest does not know some of these tests; make new coverage data: {log.read_text()}"
            )
        elif process.exitcode:
            failed = [w for w in log.read_text().splitlines() if w.startswith(("FAILED", "ERROR"))]
            mutant.caught_by = failed[0].split(" - ")[0] if failed else f"exit status {process.exitcode}"
    finally:
        target.write_bytes(content)
    mutant.seconds = round(time.perf_counter() - began, 1)
    return log.read_text()


def run_tests(source: Path, tests: list[str], log: Path) -> None:
    """In a process of its own, forked from one that has imported torch already."""
    import pytest

    os.chdir(ROOT)
    os.environ.update(_environment(source))
    sys.path.insert(0, str(source))
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))


def _environment(source: Path) -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return os.environ | quiet | {"PYTHONPATH": str(source)}


def main() -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py wants it before triton is imported
    CONTEXT.set_forkserver_preload(list(PRELOADED))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rooms", nargs="*", default=list(ROOMS))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--only", type=int, help="judge this mutant of the sample alone, and show pytest's output"
    )
    parser.add_argument("--coverage", type=Path, help="coverage data to use; made if the file does not exist")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "mutation.json")
    options = parser.parse_args()
    drawn = sample(options.rooms, options.count, options.seed)
    mutants = [
        Mutant(n, str(path.relative_to(ROOT)), change.line, change.before, change.after)
        for n, (path, change) in enumerate(drawn)
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = options.coverage or Path(folder) / "coverage"
        if not data.exists():
            cover([t for t in TESTS if (ROOT / t).exists()], data)
        places: Queue[Path] = Queue()
        for worker in range(options.workers):
            shutil.copytree(ROOT / "src", Path(folder) / f"src-{worker}")
            places.put(Path(folder) / f"src-{worker}")

        def work(number: int) -> None:
            (path, change), mutant = drawn[number], mutants[number]
            tests = covering(data, path, change.line)
            mutant.tests = len(tests)
            place = places.get()
            try:
                printed = judge(mutant, change, path, tests, place) if tests else ""
                if options.only is not None:
                    print(printed)
            finally:
                places.put(place)
            fate = mutant.caught_by or "SURVIVED"
            print(
                f"{number:>3} {mutant.file}:{mutant.line} {mutant.before} → {mutant.after}: {fate}",
                flush=True,
            )

        chosen = range(len(drawn)) if options.only is None else [options.only]
        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(work, chosen))
    if options.only is not None:
        return
    survivors = [m for m in mutants if m.caught_by is None]
    caught = len(mutants) - len(survivors)
    print(f"\n{caught} of {len(mutants)} caught ({caught / max(1, len(mutants)):.1%}); survivors:")
    for m in survivors:
        where = "no test runs this line" if not m.tests else f"{m.tests} tests run this line"
        print(f"  {m.number} {m.file}:{m.line} {m.before} → {m.after} ({where})")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "rooms": options.rooms,
        "seed": options.seed,
        "caught": caught,
        "mutants": [asdict(m) for m in mutants],
    }
    options.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
