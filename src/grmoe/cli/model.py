"""Models and their folders: `grmoe export`, `grmoe generate`, `grmoe info`."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from grmoe.cli.options import Alpha, Budget, Checkpoint, ModelFolder
from grmoe.cli.shell import shell
from grmoe.terminal import note, say, say_all, say_written


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of `grmoe train`.")],
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the model.", show_default="RUN/model")
    ] = None,
    checkpoint: Checkpoint = "best",
    alpha: Annotated[
        float | None, typer.Option(min=0, help="The dial α to save with the model.", show_default="the run's")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Experts per token to save with the model, within the range that `grmoe dial` calibrated.",
            show_default="as trained",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp32. Routers are fp32 in both.")] = "bf16",
) -> None:
    """Export a run as a model folder that Hugging Face loads: safetensors, tokenizer, code, model card.

    Checkpoints of any number of processes work. AutoModelForCausalLM loads the folder where grmoe is installed, and
    anywhere else with trust_remote_code=True.

    Example: [bold]grmoe export runs/first --out my-model && grmoe generate my-model --prompt "def main("[/]
    """
    with shell("lm"):
        import torch

        from grmoe import checks
        from grmoe.runs.export import export as write

        dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
        folder = out or run / "model"
        kind = dtypes[checks.one_of("dtype", dtype, tuple(dtypes))]
        used = write(run, folder, checkpoint, alpha, kind, budget)
        say_written(**{f"Model of step {used.step}": folder})
        say(f"Next: grmoe serve {quote(str(folder))}")


def generate(
    model: ModelFolder,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    alpha: Alpha = None,
    budget: Budget = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", "--max-tokens", min=1, help="Most tokens to write after the prompt."
        ),
    ] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the most probable token.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    checkpoint: Checkpoint = "best",
) -> None:
    """Continue a prompt at any budget or setting of the dial.

    α works for every model with a dial, a budget where grmoe dial has calibrated one. The last line says how many
    experts per token and layer were computed.

    Example: [bold]grmoe generate runs/first --prompt "def main(" --budget 1.3 --temperature 0[/]
    """
    with shell("lm"):
        import torch

        from grmoe.model.generation import stream
        from grmoe.runs.open import open_model

        loaded = open_model(model, checkpoint, alpha, budget=budget)
        torch.manual_seed(seed)
        network = loaded.model
        stream(network, loaded.tokenizer, prompt, max_new_tokens=max_new_tokens, temperature=temperature)
        mean = sum(m.experts_per_token for m in network.routing_metrics()) / len(network.alpha)
        dial = ", ".join(f"{a:g}" for a in dict.fromkeys(network.alpha))
        given = f"α = {dial}" if network.budget is None else f"budget {network.budget:g}"
        note(f"{given}: {mean:.2f} experts per token and layer")


def info(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset (tiny, small, 350m, 1.3b, 2.7b, small-fine, …), or the folder of a run or exported model.",
        ),
    ],
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Context length, in tokens, at which attention is counted.",
            show_default="the model's",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=2, help="Also show what a training step takes on this many GPUs.")
    ] = None,
    replicate: Annotated[int, typer.Option(min=1, help="With --gpus: copies of the model.")] = 1,
    expert: Annotated[
        int, typer.Option(min=1, help="With --gpus: GPUs that each set of experts is divided among.")
    ] = 1,
    batch: Annotated[int, typer.Option(min=1, help="With --gpus: sequences per GPU.")] = 8,
    micro_batches: Annotated[
        int, typer.Option(min=1, help="With --gpus: parts that the batch is split into.")
    ] = 1,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="With --gpus: recompute activations in the backward pass.")
    ] = False,
    nvlink: Annotated[
        float, typer.Option(help="With --gpus: GB/s from a GPU to the others of its node of eight.")
    ] = 450,
    network: Annotated[float, typer.Option(help="With --gpus: GB/s from a GPU to other nodes.")] = 50,
    tflops: Annotated[float, typer.Option(help="With --gpus: bf16 TFLOP/s that a GPU achieves.")] = 400,
) -> None:
    """Say what a folder is: how the model was trained, whether it was dialled, its sizes, and the next command.

    Counts parameters, arithmetic and memory of a run, an exported model or a preset. With --gpus, also estimates a
    training step. No weights are loaded. Bytes are counted from the code; times follow from them and the rates you
    give.

    Example: [bold]grmoe info runs/first[/]

    Example: [bold]grmoe info 1.3b --context 4096[/]

    Example: [bold]grmoe info 2.7b --gpus 64 --replicate 2 --expert 8[/]
    """
    with shell("lm"):
        from grmoe.model.count import count, describe
        from grmoe.parallel.cost import Plan
        from grmoe.parallel.tables import Machine, describe_step
        from grmoe.runs.about import about

        config, known, following = about(model)
        tables = [] if known is None else [known]
        tables.append(describe(model if known is None else "Sizes", config, count(config, context)))
        if gpus is not None:
            plan = Plan.on(
                gpus, replicate=replicate, expert=expert, sequences=batch, micro_batches=micro_batches,
                checkpointing=checkpointing, length=context or config.max_position_embeddings,
            )  # fmt: skip
            machine = Machine(nvlink=nvlink * 1e9, network=network * 1e9, flops=tflops * 1e12)
            tables.append(describe_step(model, config, plan, machine))
        say_all(tables)
        say(f"Next: {following}")
