"""`mtkit benchmark decode`: how fast translation is here."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtkit.cli.quiet import say_if_busy
from mtkit.cli.translation import lexicon_for, note
from mtkit.cli.values import MOST, parse_names, parse_numbers
from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mtkit.benchmark.decoding import Decoder
    from mtkit.decoding.lexicon import Lexicon
    from mtkit.model.network import Network
    from mtkit.runs import Run


def decode(
    run: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Run folder; several are measured in turns.  [default: the latest run]"),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="Name of the run in mtkit-runs; several are measured in turns."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Prepared data with the side.  [default: each run's]")
    ] = None,
    side: Annotated[str | None, typer.Option(help="Side to translate.  [default: the first test side]")] = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint: best, last, average or a name.")] = "best",
    segments: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Translate only the first segments.  [default: all]")
    ] = None,
    beam: Annotated[str, typer.Option(metavar="N,N", help="Beam sizes; 1 is greedy.")] = "1,5",
    dtype: Annotated[
        str, typer.Option(metavar="D,D", help="Arithmetics of mtkit; agreement is measured with the first.")
    ] = "float32",
    shortlist: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=100,
            help="Measure with this shortlist too (mtkit translate --shortlist N); 0: without only.",
        ),
    ] = 0,
    batch_tokens: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Padded source pieces per batch, counted per hypothesis; the fastest counts."),
    ] = None,
    beside: Annotated[
        str | None, typer.Option(metavar="A,B", help="Other programs with the same weights: huggingface,ctranslate2.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=MOST, help="Translations of the side per program and beam.")] = 3,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads.  [default: one per core]")] = None,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder for table, JSON and picture.")] = Path(
        "mtkit-benchmark"
    ),
) -> None:
    """Measure translation speed of trained runs.

    Reports segments/s from text to text, BLEU, and the share of the ceiling: the speed that the measured rate of matrix
    products allows for the operations a segment needs. Other programs translate with the same weights in turns, each at
    the fastest of several batch sizes. Several runs must have a side of the same text, prepared in any way.

    \b
    Examples:
      mtkit benchmark decode --dtype float32,bfloat16 --beside ctranslate2
      mtkit benchmark decode --name deep --name shallow --dtype int8 --shortlist 10
    """
    from mtkit.benchmark.peers import PACKAGES, check_peers
    from mtkit.recipe.decoding import MOST_HYPOTHESES
    from mtkit.runs import find_runs

    programs = parse_names("--beside", beside)
    beams, sizes = parse_numbers("--beam", beam, MOST_HYPOTHESES), parse_numbers("--batch-tokens", batch_tokens)
    check_peers(programs, list(PACKAGES), "decode")
    runs = list({each.folder.resolve(): each for each in find_runs(run, name)}.values())
    for each in runs:
        if len(each.directions) > 1:
            raise MtkitError(
                f"{each.folder} translates {', '.join(each.directions)}; decode takes runs of one direction"
            )

    import torch

    from mtkit.benchmark.decoding import (
        Candidate,
        OwnDecoder,
        as_object,
        bars,
        common_side,
        first_segments,
        measure_decoding,
        table,
    )
    from mtkit.benchmark.report import outputs, write
    from mtkit.cli.progress import steps
    from mtkit.data.prepared import open_prepared
    from mtkit.device import find_device

    if threads is not None:
        torch.set_num_threads(threads)
    say_if_busy()
    files = outputs(output, "decode")
    folders = [data or each.recipe.data.folder for each in runs]
    chosen = first_segments(common_side([open_prepared(each) for each in dict.fromkeys(folders)], side), segments)
    where, candidates = str(find_device(device)), []
    for found, folder in zip(runs, folders, strict=True):
        model, settings = found.load_model(checkpoint, where), found.recipe.decoding
        lexicons = [None, lexicon_for(found, folder, shortlist)] if shortlist else [None]
        decoders: list[Decoder] = [
            OwnDecoder(found, model, settings, each, sizes, short)
            for each in parse_names("--dtype", dtype)
            for short in lexicons
        ]
        for program in programs:
            try:
                decoders += _peers(program, found, model, lexicons)
            except MtkitError as error:
                if len(runs) == 1:
                    raise
                note(f"{found.folder} is measured without {program}: {error}")
        candidates.append(Candidate(found, model, decoders))
    with steps("benchmark", "turn") as on_progress:
        measured = measure_decoding(candidates, chosen, beams, repeats=repeats, on_progress=on_progress)
    typer.echo(table(measured))
    typer.echo(f"\n{write(files, table(measured), as_object(measured), bars(measured))}")


def _peers(program: str, run: "Run", model: "Network", lexicons: "Sequence[Lexicon | None]") -> "Iterator[Decoder]":
    """The run's model in a program, in each of its arithmetics for the device, with and without a shortlist.

    Raises: MtkitError where the program has no such model.
    """
    device, settings = model.output_weight.device.type, run.recipe.decoding
    if program == "ctranslate2":
        from mtkit.benchmark.peers import ctranslate2

        for arithmetic in ctranslate2.ARITHMETICS[device]:
            for lexicon in lexicons:
                yield ctranslate2.CTranslate2(run, model, settings, arithmetic, lexicon)
    else:
        from mtkit.benchmark.peers import huggingface_decoding

        for arithmetic in huggingface_decoding.ARITHMETICS[device]:
            yield huggingface_decoding.HuggingFaceDecoder(run, model, settings, arithmetic)
