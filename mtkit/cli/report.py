"""`mtkit report`: write one HTML page about runs."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from mtkit.cli.options import SegmentScores, Threads, output_path, use_threads
from mtkit.cli.progress import through


def report(
    run: Annotated[
        list[Path] | None,
        Argument(metavar="RUN", help="Run folders, or names of runs in mtkit-runs.  [default: the latest run]"),
    ] = None,
    name: Annotated[
        list[str] | None, Option("--name", metavar="NAME", help="Name of a run in mtkit-runs; repeatable, after RUN...")
    ] = None,
    output: Annotated[Path | None, Option(metavar="FILE", help="Page (HTML).  [default: report.html]")] = None,
    side: Annotated[
        list[str] | None, Option(metavar="NAME", help="Side to score; repeatable.  [default: those translated latest]")
    ] = None,
    segment_scores: SegmentScores = None,
    threads: Threads = None,
) -> None:
    """Write one page about runs that have translated.

    The page shows the settings that differ, curves, speeds, scores with intervals and paired tests, scores by source
    length and of documents, the best and worst segments, the attention to the source with word alignments, and the
    commands. It is one file, in light and dark, and loads nothing from the network. The first run is the baseline.

    \b
    Examples:
      mtkit report
      mtkit report full longformer --output report.html
    """
    from mtkit.evaluation.segment_scores import named_files
    from mtkit.reporting.page import report_page
    from mtkit.runs import find_run, named_run
    from mtkit.storage.files import write_text

    output = output_path(output, "report.html")
    use_threads(threads)
    runs = [*map(named_run, run or ()), *(find_run(name=chosen) for chosen in name or ())] or [find_run()]
    write_text(output, report_page(runs, side or (), through, named_files(segment_scores or [])))
    typer.echo(str(output))
