"""`mtkit score`: score the translations of runs or of files, and compare systems."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from mtkit.cli.align import NO_FONT
from mtkit.cli.options import Checkpoint, Device, Direction, SegmentScores, Threads, use_threads
from mtkit.cli.progress import counted, note, through
from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from mtkit.decoding.translator import Translator
    from mtkit.evaluation.gold_alignments import GoldLinks, Link
    from mtkit.evaluation.systems import Translated
    from mtkit.recipe.recipe import ScoringSettings
    from mtkit.runs import Run

MODEL = {"direction", "checkpoint", "device", "threads"}
"""Options of scores that a model computes."""

CONTRASTIVE = {"contrastive", "source_context", "target_context", "documents", "length_penalty"}
"""Options of contrastive translations only."""

GOLD = {"gold_alignments", "one_based"}
"""Options of gold alignments only."""

DOCUMENTS = {"document_ids", "output"}
"""Options that only document scores have."""

OF_ALL = {"run", "name", "as_json"}


def score(
    run: Annotated[
        list[Path] | None, Option(metavar="FOLDER", help="Run folder; several are compared.  [default: the latest run]")
    ] = None,
    name: Annotated[
        list[str] | None, Option("--name", metavar="NAME", help="Name of the run in mtkit-runs; several are compared.")
    ] = None,
    recipe: Annotated[Path | None, Option(help="Recipe with scoring settings.  [default: the first run's]")] = None,
    hypothesis: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Translations, one per line, instead of a run's; several are compared."),
    ] = None,
    reference: Annotated[list[Path] | None, Option(metavar="FILE", help="Reference translations; repeatable.")] = None,
    source: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Source of --hypothesis, for --by-length and --documents, or of --gold-alignments."
        ),
    ] = None,
    side: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Side to score; repeatable.  [default: sides translated by the latest checkpoint]"),
    ] = None,
    metric: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Metric: BLEU, chrF, TER, exact, token, comet or comet:MODEL; repeatable.  [default: the recipe's]",
        ),
    ] = None,
    segment_scores: SegmentScores = None,
    paired_test: Annotated[
        list[str] | None, Option(metavar="NAME", help="Paired test: bootstrap or randomisation.  [default: both]")
    ] = None,
    by_length: Annotated[
        bool,
        Option(
            "--by-length", help="Print scores by source length too, in words (in Chinese, Japanese, Thai: characters)."
        ),
    ] = False,
    target_language: Annotated[
        str | None,
        Option(metavar="NAME", help="Language of the translations, e.g. zh.  [default: the run's or the reference's]"),
    ] = None,
    tokenize: Annotated[
        str | None, Option(help="sacrebleu tokenizer for BLEU.  [default: by target language, else 13a]")
    ] = None,
    lowercase: Annotated[
        bool | None,
        Option("--lowercase/--cased", help="Ignore case in all metrics; TER always does.  [default: cased]"),
    ] = None,
    contrastive: Annotated[
        Path | None,
        Option(metavar="FILE", help="Score contrastive translations: JSON Lines, or ContraPro's or LingEval97's JSON."),
    ] = None,
    source_context: Annotated[Path | None, Option(metavar="FILE", help="ContraPro's file of source contexts.")] = None,
    target_context: Annotated[Path | None, Option(metavar="FILE", help="ContraPro's file of target contexts.")] = None,
    documents: Annotated[
        bool | None,
        Option(
            "--documents/--sentences",
            help="Score whole documents; with --contrastive, use its contexts.  [default: lines; contexts as trained]",
        ),
    ] = None,
    document_ids: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Document ids of the lines, for --documents, one per line.  [default: the run's; blank lines]",
        ),
    ] = None,
    output: Annotated[
        Path | None, Option(metavar="FILE", help="Picture (PNG) of the scores by position of --documents.")
    ] = None,
    length_penalty: Annotated[
        float | None, Option(min=0, help="Exponent of length normalisation of --contrastive.  [default: 0]")
    ] = None,
    gold_alignments: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Score the word alignments of --source with --reference by these links of annotators."
        ),
    ] = None,
    one_based: Annotated[
        bool, Option("--one-based", help="Words of --gold-alignments are numbered from 1, not 0.")
    ] = False,
    direction: Direction = None,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
    threads: Threads = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON with unrounded numbers.")] = False,
) -> None:
    """Score translations, with confidence intervals and signatures.

    Without arguments, the latest translations of the latest run are scored by the recipe's metrics: BLEU, chrF and TER,
    or exact and token match of a built-in task. Token match is the percentage of positions with the right word;
    missing and superfluous words are wrong. 95% confidence intervals are percentiles of bootstrap
    resamples; exact match has Wilson's interval. The first of several systems is the baseline: the others are printed
    with their difference from it and p-values by paired bootstrap and approximate randomisation. The sacrebleu command
    computes the same scores from the same files.

    --metric comet runs the comet-score command, which has its own environment: MTKIT_COMET=/path/to/comet-score.
    --segment-scores adds the mean of the segment scores of any metric, with the same intervals and tests.

    --documents prints BLEU and chrF of whole documents (d-BLEU, d-chrF: the lines of a document are one segment), with
    intervals and tests over documents; scores by line number in the document; and the consistency of terms: the
    percentage of pairs that are translated alike; a pair is a source word at two places in a document.
    Words are linked by a statistical model of the same lines. A blank line or a changed id ends a document.

    --contrastive prints how often the right translation has a higher log-probability than each wrong one, by label. A
    line is {"source": "...", "right": "...", "wrong": ["..."]}, with optional "source_context" and "target_context":
    ["...", ...], the preceding sentences, and "labels": {"kind": "pronoun", "distance": 4}. Intervals are Wilson's;
    runs are compared by McNemar's exact test. Each run keeps the scores of all segments in its folder.

    --gold-alignments prints the alignment error rate (Och and Ney, 2003) of the links by a run's attention, or of the
    links in --hypothesis. Sure links are written 0-0, possible ones 1p2 or 1?2, or all in NAACL's form, "18 1 2 P".

    --direction, --checkpoint, --device and --threads apply only to --contrastive and --gold-alignments.

    \b
    Examples:
      mtkit score
      mtkit score --name one --name two
      mtkit score --hypothesis out.de --reference test.de
      mtkit score --metric BLEU --metric comet --name one --name two
      mtkit score --segment-scores MetricX=one.metricx --segment-scores MetricX=two.metricx --name one --name two
      mtkit score --documents --name one --name two --output positions.png
      mtkit score --documents --document-ids ids --source test.en --hypothesis out.de --reference test.de
      mtkit score --contrastive pronouns.jsonl --name one --name two
      mtkit score --gold-alignments links --source text.en --reference text.de
    """
    options = dict(locals())  # all parameters, by name
    _check_options(options)
    use_threads(threads)
    if contrastive is not None:
        typer.echo(_score_contrastive(options))
    elif gold_alignments is not None:
        typer.echo(_score_links(options))
    else:
        typer.echo(_score_texts(options))


def _check_options(options: dict[str, Any]) -> None:
    """Raises: MtkitError for an option, by its name in Python, that does not go with the others."""
    defaults = {"checkpoint": "best", "device": "auto"}
    chosen = {name for name, value in options.items() if value not in (None, [], defaults.get(name))}
    chosen -= {name for name in ("by_length", "as_json", "one_based") if not options[name]}
    if options["documents"] is False and options["contrastive"] is None:  # lines are the default
        chosen -= {"documents"}
    if "contrastive" in chosen:
        wrong, why = chosen - CONTRASTIVE - MODEL - OF_ALL, "does not go with --contrastive"
    elif "gold_alignments" in chosen:
        texts = {"hypothesis"} if "hypothesis" in chosen else {"source", "reference", "run", "name", *MODEL}
        wrong, why = chosen - GOLD - texts - {"paired_test", "as_json"}, "does not go with --gold-alignments"
        why += " of --hypothesis" if "hypothesis" in chosen else ""
    else:
        others = CONTRASTIVE | GOLD | MODEL
        wrong, why = chosen & others, "applies to --contrastive or --gold-alignments only"
        if options["documents"]:
            lines_only = {"by_length", "segment_scores"}
            wrong, why = chosen & (others | lines_only) - {"documents"}, "does not go with --documents"
        elif chosen & DOCUMENTS:
            wrong, why = chosen & DOCUMENTS, "applies to --documents only"
    for name in options:
        if name in wrong:
            raise MtkitError(f"--{name.replace('_', '-')} {why}; leave it out")
    is_gold = "gold_alignments" in chosen and "hypothesis" not in chosen
    if is_gold and (options["source"] is None or len(options["reference"] or []) != 1):
        raise MtkitError("--gold-alignments needs --source FILE and one --reference FILE, the text that was annotated")
    if len(chosen & {"source_context", "target_context"}) == 1:
        raise MtkitError("--source-context and --target-context go together; give both, or neither")
    systems = options["hypothesis"] or [*(options["run"] or []), *(options["name"] or [])]
    if options["paired_test"] and len(systems) < 2:
        raise MtkitError("--paired-test compares several systems, and there is one; name several, or leave it out")


def _score_texts(options: dict[str, Any]) -> str:
    """Score translations of runs or of files; print notes, draw the picture; return the tables or the JSON object."""
    from mtkit.evaluation.documents import document_metrics
    from mtkit.evaluation.pictures.document_positions import draw_by_position
    from mtkit.evaluation.report import sides_object, sides_text
    from mtkit.evaluation.segment_scores import check_files, named_files
    from mtkit.evaluation.side_scores import score_side
    from mtkit.evaluation.significance import TESTS
    from mtkit.storage.files import json_text
    from mtkit.storage.outputs import check_outputs

    output: Path | None = options["output"]
    if output is not None:
        from mtkit.cli.plot import check_matplotlib

        check_matplotlib()
        texts = [*(options["hypothesis"] or []), *(options["reference"] or [])]
        check_outputs([output], [*texts, *filter(None, (options["source"], options["document_ids"]))])
    sides, settings, language = _texts(options)
    segment_scores = named_files(options["segment_scores"] or [])
    check_files(segment_scores, len(sides[0][1]), len(sides))
    metrics = options["metric"] or settings.metrics
    if options["documents"]:
        metrics = document_metrics(options["metric"], settings.metrics)
    has_bleu = options["by_length"] or any(name.lower() == "bleu" for name in metrics)
    if options["tokenize"] is not None and not has_bleu:
        raise MtkitError(f"--tokenize is for BLEU, not for {', '.join(metrics)}; leave it out")
    scored = [
        score_side(
            side_name,
            files,
            metrics=metrics,
            segment_scores=segment_scores,
            tests=options["paired_test"] or TESTS,
            lengths=options["by_length"],
            documents=bool(options["documents"]),
            language=language,
            tokenize=settings.tokenize if options["tokenize"] is None else options["tokenize"],
            lowercase=settings.lowercase if options["lowercase"] is None else options["lowercase"],
            progress=through,
        )
        for side_name, files in sides
    ]
    for message in dict.fromkeys(message for scores in scored for message in scores.notes):
        note(message)
    if output is not None:
        has_fonts = draw_by_position([side.by_position for side in scored], output)
        note(f"picture: {output}" + ("" if has_fonts else NO_FONT))
    if not options["as_json"]:
        return sides_text(scored)
    return json_text(sides_object(scored), indent=2, ensure_ascii=False)


def _texts(
    options: dict[str, Any],
) -> "tuple[list[tuple[str | None, list[Translated]]], ScoringSettings, str | None]":
    """Return the files of each side, the settings, and the target language if it is known."""
    from dataclasses import replace

    from mtkit.data.resolve import with_languages
    from mtkit.evaluation.systems import Translated, run_sides
    from mtkit.recipe import load_recipe
    from mtkit.runs import find_runs
    from mtkit.text.languages import is_language, languages_of

    hypothesis, reference, source = options["hypothesis"], options["reference"], options["source"]
    recipe, language, ids = options["recipe"], options["target_language"], options["document_ids"]
    if language is not None and not is_language(language):
        note(
            f"--target-language {language} is unknown, and scored as a language with spaces between words; give a code"
        )
    sides: list[tuple[str | None, list[Translated]]]
    if hypothesis or reference or source:
        if options["run"] or options["name"] or options["side"]:
            raise MtkitError(
                "--hypothesis, --reference and --source do not combine with --run, --name and --side; leave these out"
            )
        if not hypothesis or not reference:
            raise MtkitError("--hypothesis and --reference go together; give both, or neither for a run's translations")
        sides = [(None, [Translated(str(file), file, tuple(reference), source) for file in hypothesis])]
        chosen = load_recipe(recipe)
        settings = chosen.scoring
        if recipe is not None and language is None:
            first, *others = with_languages(chosen.data)[0].directions
            language = None if others else languages_of(first)[1]
    else:
        runs = find_runs(options["run"], options["name"])
        language = language or runs[0].target_language
        sides = list(run_sides(runs, options["side"] or []).items())
        settings = load_recipe(recipe).scoring if recipe else runs[0].recipe.scoring
    if ids is not None:
        sides = [(name, [replace(file, documents=ids) for file in files]) for name, files in sides]
    return sides, settings, language


def _score_contrastive(options: dict[str, Any]) -> str:
    """Score contrastive translations by each run; return the table or the JSON object."""
    from mtkit.evaluation.contrastive.files import ContrastiveFile
    from mtkit.evaluation.contrastive.report import contrastive_object, contrastive_text
    from mtkit.evaluation.contrastive.scores import compare_contrastive, score_contrastive
    from mtkit.evaluation.systems import system_names
    from mtkit.runs import find_runs
    from mtkit.storage.files import json_text

    contexts = options["source_context"], options["target_context"]
    file = ContrastiveFile(options["contrastive"], None if None in contexts else contexts)
    length_penalty = options["length_penalty"] or 0.0
    how = {"direction": options["direction"], "documents": options["documents"], "length_penalty": length_penalty}
    runs = find_runs(options["run"], options["name"])
    names, total, systems = system_names(runs), file.count(), []
    for run, name in zip(runs, names, strict=True):
        translator = _translator(run, options)
        with counted(name, "segments", total) as advance:
            systems.append(score_contrastive(translator, file, **how, say=note, on_progress=advance))
    if repeated := systems[0].repeated:
        note(f"in {repeated:,} segments a wrong translation equals the right one, so that none is right")
    groups = compare_contrastive(systems)
    if options["as_json"]:
        content = contrastive_object(str(file.path), names, systems, groups, length_penalty)
        return json_text(content, indent=2, ensure_ascii=False)
    return contrastive_text(str(file.path), names, groups, length_penalty)


def _score_links(options: dict[str, Any]) -> str:
    """Compare word alignments of runs, or files of links, with gold links; return the table or the JSON object."""
    from mtkit.evaluation.gold_alignments import compare_links, links_object, links_text, read_systems
    from mtkit.evaluation.significance import TESTS
    from mtkit.storage.files import json_text

    file: Path = options["gold_alignments"]
    if options["hypothesis"]:
        names = [str(path) for path in options["hypothesis"]]
        gold, systems = read_systems(file, options["hypothesis"], one_based=options["one_based"])
    else:
        gold, names, systems = _link_runs(options)
    comparison = compare_links(gold, systems, tests=options["paired_test"] or TESTS, progress=through)
    if options["as_json"]:
        return json_text(links_object(str(file), names, gold, comparison), indent=2, ensure_ascii=False)
    return links_text(str(file), names, gold, comparison)


def _link_runs(options: dict[str, Any]) -> "tuple[list[GoldLinks], list[str], list[list[set[Link]]]]":
    """Link the words of the annotated text by each run; return gold links, names of runs and their links."""
    from mtkit.evaluation.gold_alignments import link_words, read_links
    from mtkit.evaluation.systems import system_names
    from mtkit.runs import find_runs
    from mtkit.text.text_files import Lines

    sources, targets = (list(Lines(path)) for path in (options["source"], options["reference"][0]))
    gold = read_links(options["gold_alignments"], len(sources), one_based=options["one_based"])
    runs, how = find_runs(options["run"], options["name"]), {"direction": options["direction"]}
    systems = [
        link_words(_translator(run, options), sources, targets, gold, **how, say=note, progress=through) for run in runs
    ]
    return gold, system_names(runs), systems


def _translator(run: "Run", options: dict[str, Any]) -> "Translator":
    from mtkit.decoding.translator import Translator

    chosen = {"checkpoint": options["checkpoint"], "device": options["device"]}
    return Translator([run], engine="mtkit", say=note, **chosen)
