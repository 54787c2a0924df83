"""Models and their folders: `grmoe export`, `grmoe info`, `grmoe generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from grmoe.cli.options import Checkpoint
from grmoe.terminal import console, fail, need


def export(
    run: Annotated[Path, typer.Argument(help="Folder of `grmoe train`.")],
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder for the model.", show_default="RUN/model"),
    ] = None,
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

    from grmoe.runs.checkpoint import CheckpointError
    from grmoe.runs.export import export as write

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

    No weights are loaded. Bytes follow from the code, times from the given rates: docs/explanation/parallel.md.

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


def generate(
    folder: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Folder of `grmoe train` or `grmoe export`.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    alpha: Annotated[
        float | None, typer.Option(min=0, help="The dial.", show_default="as saved with the model")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most probable token.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    checkpoint: Checkpoint = "best",
) -> None:
    """Continue a prompt, at any setting of the dial.

    Example: [bold]grmoe generate runs/first --prompt "def main(" --alpha 2 --temperature 0[/]
    """
    need("transformers", "yaml", extra="lm")
    import torch
    from transformers.utils import logging

    from grmoe.model.generation import stream
    from grmoe.runs.checkpoint import CheckpointError
    from grmoe.runs.open import open_model

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        opened = open_model(folder, checkpoint, alpha)
        torch.manual_seed(seed)
        model = opened.model
        stream(model, opened.tokenizer, prompt, max_new_tokens=max_new_tokens, temperature=temperature)
    except (ValueError, CheckpointError) as error:
        fail(escape(str(error)))
    mean = sum(m.experts_computed for m in model.routing_metrics()) / len(model.alpha)
    dial = ", ".join(f"{a:g}" for a in dict.fromkeys(model.alpha))
    Console(stderr=True).print(f"[dim]α = {dial}: {mean:.2f} experts a token and layer[/]", highlight=False)
