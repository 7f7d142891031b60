"""`mtkit score`: BLEU, chrF and TER of a run's translations, or of any files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mtkit.errors import MtkitError


def score(
    run: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of the run.  [default: the latest]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run under mtkit-runs.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file with scoring settings.  [default: the run's]")] = None,
    hypothesis: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Translations to score, one a line, in place of a run's.")
    ] = None,
    reference: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="What they are scored against; may be given several times."),
    ] = None,
    tokenize: Annotated[
        str | None, typer.Option(help="BLEU's tokenizer, as sacrebleu names it.  [default: 13a]")
    ] = None,
    lowercase: Annotated[
        bool | None, typer.Option("--lowercase/--cased", help="Ignore case in BLEU and chrF.  [default: cased]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, numbers unrounded.")] = False,
) -> None:
    """Print BLEU, chrF and TER with 95% bootstrap confidence intervals and sacrebleu's signatures.

    Bare: the latest run's latest translations. The numbers are those of the sacrebleu command on the same files.

    Examples: mtkit score; mtkit score --hypothesis out.de --reference test.de
    """
    from mtkit.decoding.held_out import latest_translations, reference_of
    from mtkit.evaluation.report import as_objects, table
    from mtkit.evaluation.scores import score_files
    from mtkit.recipe import load_recipe
    from mtkit.runs import find_run

    if (hypothesis is None) != (not reference):
        raise MtkitError("--hypothesis and --reference go together; give both, or neither for a run's translations")
    if hypothesis is not None and (run or name):
        raise MtkitError("--hypothesis is scored by itself; leave --run and --name out")
    settings = load_recipe(recipe).scoring
    references = reference or []
    if hypothesis is None:
        found = find_run(run, name)
        settings = found.recipe.scoring if recipe is None else settings
        hypothesis = latest_translations(found)
        references = [reference_of(hypothesis)]
    scores = score_files(
        hypothesis,
        references,
        tokenize=settings.tokenize if tokenize is None else tokenize,
        lowercase=settings.lowercase if lowercase is None else lowercase,
    )
    files = {"hypothesis": str(hypothesis), "references": [str(each) for each in references]}
    if as_json:
        typer.echo(json.dumps({**files, "scores": as_objects(scores)}, indent=2, ensure_ascii=False))
    else:
        typer.echo(f"{hypothesis} against {', '.join(files['references'])}\n\n{table(scores)}")
