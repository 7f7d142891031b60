"""`mtkit score`: score the translations of runs or of files, and compare systems."""

from pathlib import Path
from typing import Annotated

import typer

from mtkit.cli.progress import note, through
from mtkit.errors import MtkitError


def score(
    run: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Run folder; several are compared.  [default: the latest run]"),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="Name of the run in mtkit-runs; several are compared."),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe with scoring settings.  [default: the first run's]")
    ] = None,
    hypothesis: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Translations, one per line, instead of a run's; several are compared."),
    ] = None,
    reference: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Reference translations; repeatable."),
    ] = None,
    source: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Source of --hypothesis, for --by-length.")
    ] = None,
    side: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Side to score; repeatable.  [default: sides translated by the latest checkpoint]"
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Metric: BLEU, chrF, TER or exact; repeatable.  [default: the recipe's]"),
    ] = None,
    paired_test: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Paired test: bootstrap or randomisation.  [default: both]"),
    ] = None,
    by_length: Annotated[
        bool,
        typer.Option(
            "--by-length", help="Print scores by source length too, in words (in Chinese, Japanese, Thai: characters)."
        ),
    ] = False,
    target_language: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Language of the translations, e.g. zh.  [default: the run's]"),
    ] = None,
    tokenize: Annotated[
        str | None,
        typer.Option(help="sacrebleu tokenizer for BLEU.  [default: by target language, else 13a]"),
    ] = None,
    lowercase: Annotated[
        bool | None,
        typer.Option("--lowercase/--cased", help="Ignore case in BLEU, chrF and exact match.  [default: cased]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with unrounded numbers.")] = False,
) -> None:
    """Score translations, with confidence intervals and signatures.

    Without arguments, the latest translations of the latest run are scored by BLEU, chrF and TER. 95% confidence
    intervals are percentiles of bootstrap resamples; exact match has Wilson's interval. The first of several systems is
    the baseline: the others are printed with their difference from it and p-values by paired bootstrap and approximate
    randomisation. The sacrebleu command computes the same scores from the same files.

    \b
    Examples:
      mtkit score
      mtkit score --name one --name two
      mtkit score --hypothesis out.de --reference test.de
    """
    from mtkit.data.resolve import with_languages
    from mtkit.evaluation.report import score_side, side_object, sides_text
    from mtkit.evaluation.significance import TESTS
    from mtkit.evaluation.systems import Translated, run_sides
    from mtkit.recipe import load_recipe
    from mtkit.runs import find_runs
    from mtkit.storage.files import json_text
    from mtkit.text.languages import languages_of

    sides: list[tuple[str | None, list[Translated]]]
    if hypothesis or reference or source:
        if run or name or side:
            raise MtkitError(
                "--hypothesis, --reference and --source do not combine with --run, --name and --side; leave these out"
            )
        if not hypothesis or not reference:
            raise MtkitError("--hypothesis and --reference go together; give both, or neither for a run's translations")
        sides = [(None, [Translated(str(file), file, tuple(reference), source) for file in hypothesis])]
        chosen = load_recipe(recipe)
        settings = chosen.scoring
        if recipe is not None and target_language is None:
            first, *others = with_languages(chosen.data)[0].directions
            target_language = None if others else languages_of(first)[1]
    else:
        runs = find_runs(run, name)
        target_language = target_language or runs[0].target_language
        sides = list(run_sides(runs, side or []).items())
        settings = load_recipe(recipe).scoring if recipe else runs[0].recipe.scoring
    scored = [
        score_side(
            side_name,
            files,
            metrics=metric or settings.metrics,
            tests=paired_test or TESTS,
            lengths=by_length,
            language=target_language,
            tokenize=settings.tokenize if tokenize is None else tokenize,
            lowercase=settings.lowercase if lowercase is None else lowercase,
            progress=through,
        )
        for side_name, files in sides
    ]
    for message in dict.fromkeys(message for scores in scored for message in scores.notes):
        note(message)
    if as_json:
        objects = [side_object(scores) for scores in scored]
        first = objects[0]["systems"][0]
        short = {key: first[key] for key in ("hypothesis", "references", "scores")}
        typer.echo(json_text({**short, "sides": objects}, indent=2, ensure_ascii=False))
    else:
        typer.echo(sides_text(scored))
