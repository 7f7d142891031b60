"""`mtkit benchmark`: what things cost on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtkit.cli.benchmark_decode import decode
from mtkit.cli.benchmark_documents import documents
from mtkit.cli.benchmark_train import train
from mtkit.cli.quiet import say_if_busy
from mtkit.cli.values import MOST, parse_names, parse_numbers, parse_options

if TYPE_CHECKING:
    from mtkit.benchmark.attention import Benchmark

benchmark = typer.Typer(help="Measure speed and memory on this machine.", invoke_without_command=True)


@benchmark.callback()
def _benchmark(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


benchmark.command()(train)
benchmark.command()(decode)
benchmark.command()(documents)


@benchmark.command()
def attention(
    names: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Mechanisms.  [default: those of linear cost published for the role]"),
    ] = None,
    lengths: Annotated[str, typer.Option(metavar="T,T", help="Sequence lengths.")] = "512,1024,2048,4096",
    role: Annotated[str, typer.Option(help="Role: encoder, decoder or cross.")] = "encoder",
    heads: Annotated[int, typer.Option(min=1, max=1_000_000, help="Attention heads.")] = 8,
    width: Annotated[int, typer.Option(min=1, max=1_000_000, help="Model width, all heads together.")] = 512,
    batch: Annotated[int, typer.Option(min=1, max=1_000_000, help="Segments per batch.")] = 1,
    attention_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Option of every mechanism that has it, e.g. window_radius=64."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=MOST, help="Measurements per case; the fastest counts.")] = 3,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads.  [default: one per core]")] = None,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder for table, JSON and picture.")] = Path(
        "mtkit-benchmark"
    ),
) -> None:
    """Measure time, memory and FLOPs of attention mechanisms.

    Each mechanism runs beside full on the same inputs: forward and backward at each length, and a decoding step in the
    decoder and cross roles. The whole sub-layer and the attention without projections are measured separately.
    Cases that do not fit in memory are skipped and named. The exit code is 1 if a mechanism failed.

    \b
    Examples:
      mtkit benchmark attention --names band,linear --lengths 1024,4096,16384
    """
    import torch

    from mtkit.benchmark.attention import Setting, default_names, measure_attention
    from mtkit.benchmark.attention_report import as_object, table
    from mtkit.benchmark.report import outputs
    from mtkit.cli.progress import steps
    from mtkit.device import find_device
    from mtkit.storage.files import write_json, write_text

    if threads is not None:
        torch.set_num_threads(threads)
    say_if_busy()
    text, data, picture = outputs(output, f"attention-{role}")
    setting = Setting(
        role=role,
        width=width,
        heads=heads,
        batch=batch,
        repeats=repeats,
        device=find_device(device),
        options=parse_options(attention_option or []),
    )
    chosen = default_names(role) if names is None else parse_names("--names", names)
    with steps("benchmark", "part") as on_progress:
        measured = measure_attention(chosen, parse_numbers("--lengths", lengths), setting, on_progress=on_progress)
    typer.echo(table(measured))
    write_text(text, table(measured) + "\n")
    write_json(data, as_object(measured))
    typer.echo(f"\n{text}, {data}{_picture(measured, picture)}")
    if measured.failed:
        raise typer.Exit(1)


def _picture(measured: "Benchmark", path: Path) -> str:
    """Draws the picture where matplotlib is installed; gives the words that say where it is, or is not."""
    from mtkit.benchmark.attention_report import draw_benchmark

    try:
        draw_benchmark(measured, path)
    except ModuleNotFoundError:
        return " (no picture: matplotlib is not installed)"
    return f", {path}"
