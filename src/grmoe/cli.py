"""The command line: parses, calls, prints."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from grmoe import __version__
from grmoe.bench.cli import app as bench
from grmoe.terminal import Watch, console, fail, need, progress

app = typer.Typer(
    help="Grassmannian Mixture-of-Experts: experts own subspaces, one dial sets the sparsity after training.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
app.add_typer(bench, name="bench")


def _version(show: bool) -> None:
    if show:
        console.print(f"grmoe {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def synthetic(
    out: Annotated[Path, typer.Option(help="Folder for results.json, table.md and the figures.")] = Path(
        "runs/synthetic"
    ),
    quick: Annotated[
        bool, typer.Option("--quick", help="Easy setting, seven methods, six seeds: under a minute.")
    ] = False,
    setting: Annotated[
        list[str] | None, typer.Option(help="easy or hard; repeatable. Default: both.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; `--method ?` lists them. Default: all.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds a method, trained as one batch.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
) -> None:
    """Run the paper's synthetic routing study: nine methods, the Bayes oracle, the dial.

    Tokens of 8 classes live near 8 subspaces of R^128; each class has its own linear map as target. Routers
    and experts are trained end to end on the regression loss; nobody sees a label, except the row that says so.
    A run that is interrupted goes on where it stopped when started again with the same options.

    Example: [bold]grmoe synthetic --setting easy --method grmoe --method softmax_top1 --seeds 10[/]
    """
    need("scipy", "matplotlib")
    from grmoe.studies.synthetic.figure import draw
    from grmoe.studies.synthetic.methods import find_methods
    from grmoe.studies.synthetic.report import rich_table, write_results
    from grmoe.studies.synthetic.study import QUICK_METHODS, SETTINGS, Config, run_setting

    config = Config.quick() if quick else Config()
    if seeds is not None:
        config = replace(config, seeds=seeds)
    if steps is not None:
        config = replace(config, training=replace(config.training, steps=steps))
    names = setting or (["easy"] if quick else list(SETTINGS))
    if unknown := [n for n in names if n not in SETTINGS]:
        fail(f"setting must be one of {', '.join(SETTINGS)}, got {', '.join(unknown)}")
    try:
        methods = find_methods(method or (QUICK_METHODS if quick else None))
    except ValueError as error:
        fail(str(error))
    total = len(names) * len(methods) * config.training.steps
    results = []
    with progress() as bar:
        watch = Watch(bar, total)
        for name in names:
            results.append(run_setting(SETTINGS[name], methods, config, out, watch))
    figures = [draw(result, out / f"synthetic-{result.setting.name}.png") for result in results]
    for result in results:
        console.print(rich_table(result))
    numbers = write_results(results, config, out)
    console.print(f"Numbers: {numbers}", highlight=False, soft_wrap=True)
    for figure in figures:
        console.print(f"Figure:  [bold]{figure}[/]", highlight=False, soft_wrap=True)


@app.command()
def normalizer(
    kappa: Annotated[list[float] | None, typer.Option(help="Concentration; repeatable.")] = None,
    dim: Annotated[
        list[int] | None, typer.Option(help="Dimension d; repeatable, one for each --rank.")
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Subspace rank k.")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Monte Carlo samples.")] = 1_000_000,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the rows here.")] = None,
) -> None:
    """Validate the Bingham normaliser: contour integral, Kume-Wood and Monte Carlo side by side.

    Example: [bold]grmoe normalizer --dim 768 --rank 48 --kappa 0.4 --kappa 4.2[/]
    """
    from grmoe.studies import normalizer as study

    if len(dim or []) != len(rank or []):
        fail(f"give one --rank for each --dim, got {len(dim or [])} and {len(rank or [])}")
    shapes = list(zip(dim, rank, strict=True)) if dim and rank else list(study.SHAPES)
    cases = [(d, k, value) for d, k in shapes for value in kappa or study.KAPPAS]
    rows = []
    with progress() as bar:
        task = bar.add_task("normaliser", total=len(cases))
        for d, k, value in cases:
            try:
                rows.append(study.validate(d, k, value, samples))
            except ValueError as error:
                fail(str(error))
            bar.advance(task)
    console.print(study.rich_table(rows, samples))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps([asdict(r) for r in rows], indent=1))


@app.command()
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


@app.command()
def info(
    model: Annotated[
        str, typer.Argument(help="A preset (tiny, small, 350m, 1.3b, 2.7b) or a saved model's folder.")
    ],
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of context to count attention at.", show_default="the model's"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=2, help="Also what a step of training takes on so many.")
    ] = None,
    replicate: Annotated[int, typer.Option(min=1, help="With --gpus: copies of the model.")] = 1,
    expert: Annotated[int, typer.Option(min=1, help="With --gpus: how many divide the experts.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="With --gpus: sequences a GPU.")] = 8,
    micro_batches: Annotated[int, typer.Option(min=1, help="With --gpus: parts of the batch.")] = 1,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="With --gpus: activations computed again.")
    ] = False,
    nvlink: Annotated[float, typer.Option(help="GB/s of a GPU to others of its eight.")] = 450,
    network: Annotated[float, typer.Option(help="GB/s of a GPU to other nodes.")] = 50,
    tflops: Annotated[float, typer.Option(help="TFLOP/s that a GPU achieves, bf16.")] = 400,
) -> None:
    """Count a model's parameters, arithmetic and memory, and with --gpus what a step of training takes.

    No weights are loaded. Bytes are those of the code, times what the given rates make of them: docs/scaling.md.

    Example: [bold]grmoe info 1.3b --context 4096[/]

    Example: [bold]grmoe info 2.7b --gpus 64 --replicate 2 --expert 8[/]
    """
    need("transformers", extra="lm")
    from grmoe.model.count import count, describe
    from grmoe.model.presets import find_config
    from grmoe.parallel.cost import Plan
    from grmoe.parallel.report import Machine, describe_step

    try:
        config = find_config(model)
        tables = [describe(escape(model), config, count(config, context))]
        if gpus is not None:
            plan = Plan.on(
                gpus,
                replicate=replicate,
                expert=expert,
                sequences=batch,
                length=context or config.max_position_embeddings,
                micro_batches=micro_batches,
                checkpointing=checkpointing,
            )
            machine = Machine(nvlink=nvlink * 1e9, network=network * 1e9, flops=tflops * 1e12)
            tables.append(describe_step(escape(model), config, plan, machine))
    except ValueError as error:
        fail(escape(str(error)))
    for table in tables:
        console.print(table, highlight=False)


@app.command()
def train(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml] [key=value]...", help="A YAML file, and single keys in its place."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run's last checkpoint, to the bit.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the resolved configuration, and train nothing.")
    ] = False,
) -> None:
    """Train a language model on prepared text.

    Every setting has a default: [bold]grmoe train --show[/] prints them all, as the YAML file they could stand in. A
    model is a preset and changes to it: model.preset=tiny model.router=softmax model.router_options.balance=true.

    The run's folder gets config.yaml, environment.json, log.jsonl, curves.png and checkpoints. Ctrl-C and SIGTERM
    save a checkpoint first; a run that was killed goes on from its last one with --resume. On several GPUs:
    torchrun --nproc-per-node 8 -m grmoe train run.yaml parallel.expert=2

    Example: [bold]grmoe train data.path=runs/data out=runs/first steps=2000 optim.lr=6e-4[/]
    """
    need("transformers", "yaml", extra="lm")
    from grmoe.config import ConfigError, load, to_yaml
    from grmoe.train.config import TrainConfig
    from grmoe.train.record import CONFIG

    given = list(settings or [])
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    try:
        config = load(TrainConfig, path, given)
        saved = Path(config.out) / CONFIG
        if resume and path is None and saved.is_file():
            config = load(TrainConfig, saved, given)
    except ConfigError as error:
        fail(escape(str(error)))
    if show:
        print(to_yaml(config), end="")
        return
    from grmoe.train.command import run

    status = run(config, resume)
    if status:
        raise typer.Exit(status)


@app.command()
def quality(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml] [key=value]...", help="As of `grmoe train`; the routers are filled in."
        ),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Repeatable; `--method ?` lists them. Default: the first four.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs a method.")] = 3,
    at_once: Annotated[int, typer.Option(min=1, help="Runs side by side on the device.")] = 1,
    out: Annotated[
        Path, typer.Option(help="Folder for the runs, results.json, table.md, curves.png.")
    ] = Path("runs/quality"),
) -> None:
    """Compare routers as language models: the same text, tokens and experts a token, several seeds.

    A study that is interrupted goes on where it stopped when started again.

    Example: [bold]grmoe quality data.path=runs/data steps=1400 optim.lr=6e-4 --seeds 3 --at-once 4[/]
    """
    need("transformers", "yaml", extra="lm")
    need("scipy", "matplotlib")
    from grmoe.config import ConfigError, load
    from grmoe.studies import quality as compare
    from grmoe.train.config import TrainConfig
    from grmoe.train.curves import draw_curves

    given = list(settings or [])
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    methods = method or list(compare.DEFAULT)
    if unknown := [m for m in methods if m not in compare.METHODS]:
        fail(f"method must be one of {', '.join(compare.METHODS)}, got {escape(', '.join(unknown))}")
    try:
        base = load(TrainConfig, path, given)
        runs = compare.study(
            base, methods, seeds, out, at_once, lambda text: print(text, file=sys.stderr, flush=True)
        )
    except (ConfigError, RuntimeError) as error:
        fail(escape(str(error)))
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on where it stopped")
    console.print(compare.rich_table(compare.rows(runs)))
    numbers = compare.write_results(runs, base, out)
    first = [out / f"{name}-0" for name in methods]
    figure = draw_curves(first, out / "curves.png")
    console.print(f"Numbers: {numbers}", highlight=False, soft_wrap=True)
    console.print(f"Figure:  [bold]{figure}[/] (first seed)", highlight=False, soft_wrap=True)


@app.command()
def curves(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `grmoe train`, drawn over each other.")],
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("runs/curves.png"),
) -> None:
    """Draw loss, load and entropy of one or several runs, finished or not, and print where they stand.

    Example: [bold]grmoe curves runs/grassmann runs/softmax[/]
    """
    need("matplotlib")
    need("transformers", "yaml", extra="lm")
    from grmoe.train.curves import draw_curves, summary

    try:
        draw_curves(runs, out)
        console.print(summary(runs))
    except ValueError as error:
        fail(escape(str(error)))
    console.print(f"Figure: [bold]{escape(str(out))}[/]", highlight=False, soft_wrap=True)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of `grmoe train`.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the model.", show_default="RUN/model")] = None,
    checkpoint: Annotated[str, typer.Option(help="best (of validation), last, or a step.")] = "best",
    alpha: Annotated[
        float | None, typer.Option(min=0, help="Dial to save with it.", show_default="the run's")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32; routers are fp32 in both.")] = "bf16",
) -> None:
    """Make a model folder that Hugging Face loads: safetensors, tokenizer, code, model card.

    Works on checkpoints of any number of processes. The folder loads with AutoModelForCausalLM where grmoe is
    installed, and anywhere else with trust_remote_code=True.

    Example: [bold]grmoe export runs/first --out my-model && grmoe generate my-model --prompt "def main("[/]
    """
    need("transformers", "safetensors", extra="lm")
    import torch
    from transformers.utils import logging

    from grmoe.train.checkpoint import CheckpointError
    from grmoe.train.export import export as write

    logging.disable_progress_bar()
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if dtype not in dtypes:
        fail(f"dtype must be bf16 or fp32, got {escape(dtype)}")
    folder = out or run / "model"
    try:
        used = write(run, folder, checkpoint, alpha, dtypes[dtype])
    except (ValueError, CheckpointError) as error:
        fail(escape(str(error)))
    console.print(
        f"Model of step {used.step}: [bold]{escape(str(folder))}[/]", highlight=False, soft_wrap=True
    )


@app.command()
def dial(
    model: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of `grmoe train`, or an exported model.")
    ],
    target_experts: Annotated[
        float | None, typer.Option(help="Lowest perplexity with at most so many experts a token.")
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(
            help="Fewest experts with a perplexity increase of at most this, e.g. 1%.", show_default="1%"
        ),
    ] = None,
    throughput: Annotated[
        str | None, typer.Option(help="Lowest perplexity at this measured speed-up or more, e.g. 1.3x.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Calibration text: prepared tokens, or .txt, .jsonl, .parquet.",
            show_default="the run's validation split",
        ),
    ] = None,
    check: Annotated[
        list[str] | None, typer.Option(help="Other text to hold the promise against; repeatable.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each text.", show_default="8192; 131072 on a GPU")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a window.", show_default="as trained")
    ] = None,
    cap: Annotated[
        int | None, typer.Option(min=1, help="Most experts of a token.", show_default="as trained")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: best (of validation), last, or a step.")
    ] = "best",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results.json and pareto.png.", show_default="RUN/dial, MODEL-dial"),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Save the model with the chosen setting to OUT/model.")
    ] = False,
) -> None:
    """Choose how sparse a trained model is: the cheapest setting that meets a target, with certificates.

    Experts per token are chosen by mass: the fewest that reach probability τ, at most as many as in training. Measured
    on the same text: one α for all layers, one α per layer (by what each layer's experts are worth), plain top-k.
    Nothing is retrained.

    Example: [bold]grmoe dial runs/first --max-ppl-increase 1% --check wikitext.txt --write[/]
    """
    need("transformers", "yaml", extra="lm")
    need("matplotlib")
    from transformers.utils import logging

    from grmoe.dial.command import command
    from grmoe.dial.run import Plan
    from grmoe.dial.target import parse_target
    from grmoe.train.checkpoint import CheckpointError

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        target = parse_target(target_experts, max_ppl_increase, throughput)
        plan = Plan(target, text, check or [], tokens, length, cap, checkpoint)
        command(model, plan, out, write)
    except (ValueError, CheckpointError, ModuleNotFoundError) as error:
        fail(escape(str(error)))


@app.command("eval")
def evaluate(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of `grmoe train` or `grmoe export`.")
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="A file or folder of .txt or .jsonl (also .gz, .xz, .zst); `validation` is the split a run was "
            "validated on. Repeatable.",
            show_default="validation, unless there are tasks",
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(help="A task of lm-evaluation-harness, by name or as a YAML file of it. Repeatable."),
    ] = None,
    tasks_from: Annotated[
        Path | None,
        typer.Option(
            help="Folder of TASK_SPLIT.jsonl (also .gz, .xz, .zst), such as hellaswag_val.jsonl: tasks come from here "
            "and not from the hub; without --task, all of them."
        ),
    ] = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(min=0, help="The dial; repeatable.", show_default="as saved with the model"),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Examples in a task's prompt.", show_default="the task's own; 0")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each task.", show_default="all")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of each domain of a text.", show_default="all")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens a window.", show_default="as trained, or the model's longest"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens from window to window; less overlaps.", show_default="the length: no overlap"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows, or a task's sequences, at once.")] = 8,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: best (of validation), last, or a step.")
    ] = "best",
    out: Annotated[Path, typer.Option(help="Folder for results.json and the tasks made.")] = Path(
        "runs/eval"
    ),
) -> None:
    """Measure a model: perplexity of texts, lm-evaluation-harness tasks, at one or several settings of the dial.

    A table has a column for each α, with the experts a token above the numbers. Local files need no network. Tasks need
    lm_eval: pip install 'grmoe\\[eval]'.

    Example: [bold]grmoe eval my-model --text heldout/ --tasks-from evals/ --alpha 0.5 --alpha 1 --alpha 2[/]
    """
    need("transformers", "yaml", extra="lm")
    tasks = task or []
    if tasks or tasks_from:
        need("lm_eval", "accelerate", extra="eval")
    from transformers.utils import logging

    from grmoe.evaluate.command import Settings, run
    from grmoe.evaluate.report import domains, summary
    from grmoe.train.checkpoint import CheckpointError

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    settings = Settings(
        model=folder, texts=text or [], tasks=tasks, tasks_from=tasks_from, alphas=alpha or [], shots=shots,
        limit=limit, tokens=tokens, length=length, stride=stride, batch=batch, checkpoint=checkpoint, out=out,
    )  # fmt: skip
    try:
        result = run(settings, progress, lambda text: print(text, file=sys.stderr, flush=True))
    except (ValueError, CheckpointError, ModuleNotFoundError) as error:
        fail(escape(str(error)))
    if result.points[0].texts:
        console.print(domains(result.points, result.length, result.stride))
    console.print(summary(result.points))
    console.print(f"Numbers: {escape(str(result.numbers))}", highlight=False, soft_wrap=True)


@app.command()
def analyze(
    model: Annotated[Path, typer.Argument(help="Folder of `grmoe train` or of `grmoe export`.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to route, as `grmoe prepare` reads it; repeatable.", show_default="the run's held-out"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many, rounded up to whole windows.")] = 50_000,
    alpha: Annotated[
        float | None, typer.Option(min=0, help="The dial.", show_default="as saved with the model")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: best (of validation), last, or a step.")
    ] = "best",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results.json, analysis.md and the figures.", show_default="MODEL/analysis"
        ),
    ] = None,
) -> None:
    """Look at what each expert does: token types, domains, entropy, concentration, overlap, load over training.

    Works for every router. Specialisation is shown beside what chance and a hash of the tokens would give.

    Example: [bold]grmoe analyze runs/first --tokens 50000[/]
    """
    need("transformers", "yaml", extra="lm")
    need("scipy", "matplotlib")
    from grmoe.analyze.command import run

    with progress() as bar:
        written = run(model, text or [], tokens, alpha, checkpoint, out or model / "analysis", bar)
    for part in written:
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="A saved model with its tokenizer.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    alpha: Annotated[
        float | None, typer.Option(min=0, help="The dial.", show_default="as saved with the model")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most probable token.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
) -> None:
    """Continue a prompt, at any setting of the dial.

    Example: [bold]grmoe generate runs/model --prompt "def main(" --alpha 2 --temperature 0[/]
    """
    need("transformers", extra="lm")
    import torch
    from transformers.utils import logging

    from grmoe.model.generation import load, stream

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model, tokenizer = load(folder, alpha)
        torch.manual_seed(seed)
        stream(model, tokenizer, prompt, max_new_tokens=max_new_tokens, temperature=temperature)
    except ValueError as error:
        fail(escape(str(error)))
    mean = sum(m.experts_computed for m in model.routing_metrics()) / len(model.alpha)
    dial = ", ".join(f"{a:g}" for a in dict.fromkeys(model.alpha))
    Console(stderr=True).print(f"[dim]α = {dial}: {mean:.2f} experts a token and layer[/]", highlight=False)


def main() -> None:
    """Entry point. A full disk or a folder that cannot be written is the machine's trouble, not a traceback's."""
    try:
        app()
    except OSError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)
