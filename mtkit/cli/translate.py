"""`mtkit translate`: translate the test sides, a file or standard input with a trained run, or with several as one."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from mtkit.cli.progress import note
from mtkit.cli.translation import (
    check_alone,
    check_documents,
    check_options,
    check_parts,
    check_set,
    check_standard_input,
    check_standard_output,
    count,
    folder_of,
    given_settings,
    heads_for,
    is_live,
    lexicon_for,
    own_part,
    recipe_of,
    text,
)
from mtkit.cli.translation import join as join_parts
from mtkit.errors import MtkitError

if TYPE_CHECKING:
    from mtkit.decoding.held_out import HeldOut
    from mtkit.decoding.translator import Translator
    from mtkit.decoding.word_alignment import Heads
    from mtkit.runs import Run

SAMPLES = 3


def translate(
    input: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Text file, one segment per line (.gz too); - is standard input."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output file (.gz too).  [default: standard output with --input]"),
    ] = None,
    run: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Run folder; several form an ensemble.  [default: the latest run]"),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="Name of the run in mtkit-runs; several form an ensemble."),
    ] = None,
    side: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Test side, or valid; repeatable.  [default: all test sides]"),
    ] = None,
    test: Annotated[
        str | None, typer.Option(metavar="NAME", help="Test text of sacrebleu instead, downloaded, e.g. wmt14.")
    ] = None,
    languages: Annotated[
        str | None, typer.Option(metavar="EN-DE", help="Language pair of --test.  [default: the run's direction]")
    ] = None,
    direction: Annotated[
        str | None,
        typer.Option(metavar="EN-FR", help="Direction of --input or --test; required for runs with several."),
    ] = None,
    documents: Annotated[
        bool | None,
        typer.Option(
            "--documents/--sentences",
            help="Translate lines of a document together (blank lines separate documents), or each alone.  "
            "[default: as trained]",
        ),
    ] = None,
    document_ids: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Document ids of the lines of --input, one per line.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Translate part I of N of --input only, into a file of that part."),
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Check and join the translated parts of --input.")] = False,
    recipe: Annotated[Path | None, typer.Option(help="Recipe with decoding settings.  [default: the run's]")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Prepared data with test sides and text for the lexicon.  [default: the run's]"
        ),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint: best, last, average or a name.")] = "best",
    target: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Print the log-probabilities of these translations instead.")
    ] = None,
    alignments: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write which words belong together, as 0-0 1-2: source word first, counted from 0."
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Search: greedy, beam or sample.")] = None,
    beam: Annotated[int | None, typer.Option(help="Beam size; without --method it selects beam search.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Exponent of length normalisation; 0 disables it.")
    ] = None,
    coverage_penalty: Annotated[
        float | None, typer.Option(help="Weight of the penalty for unattended source pieces.")
    ] = None,
    max_pieces: Annotated[
        int | None,
        typer.Option(help="Maximum pieces per translation.  [default: by source length, from training data]"),
    ] = None,
    no_repeat_ngram: Annotated[int | None, typer.Option(help="Forbid repeated n-grams of this many pieces.")] = None,
    n_best: Annotated[
        int | None, typer.Option(help="Translations per line, printed as line number, score, text.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest pieces; 0: from all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest pieces with this total probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of sampling.")] = None,
    shortlist: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=100, help="Restrict output to the N likeliest translations of each source piece."
        ),
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Print score, tab, translation.")] = False,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Maximum padded source pieces per batch, counted per hypothesis.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Arithmetic: auto (float32), bfloat16, float16, or int8 (CPU only, faster).")
    ] = "auto",
    engine: Annotated[
        str,
        typer.Option(
            help="Decoder: mtkit, ctranslate2, or auto (ctranslate2 where installed and able to do the same, on CPUs)."
        ),
    ] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads.  [default: one per core]")] = None,
) -> None:
    """Translate test sides, a file or standard input.

    Without --input, the prepared test sides are translated by the latest run. N lines in give N lines out. Decoding
    settings default to those of the run's recipe. The same command resumes a killed translation of --input to --output.
    An ensemble averages the probabilities of its runs. A shortlist also contains the pieces of the source and frequent
    pieces; its lexicon is learned from the prepared data at first use and kept with the run.

    --alignments writes a line per line: each word of the translation with the source word that gets the most
    attention, by the heads that follow the lexicon best on the validation side; they are chosen at first use. Words are
    what white space parts; of Chinese, Japanese, Thai, Lao, Khmer and Burmese text each character is a word.

    --part divides --input by bytes, so that any machines can translate the parts of a large file; each line is in one
    part. Processes of torchrun take a part each. --join checks that all lines are there and writes --output.

    \b
    Examples:
      mtkit translate --side test
      mtkit translate --test wmt14 && mtkit score
      mtkit translate --input - < text.en > text.de
      mtkit translate --input text.en --output text.fr --direction en-fr
      mtkit translate --name one --name two --beam 5
      mtkit translate --dtype int8 --shortlist 20
      mtkit translate --input text.en --output text.de --alignments text.en-de
      mtkit translate --input text.en --output text.de --part 2/8
      mtkit translate --input text.en --output text.de --join
    """
    import torch

    from mtkit.decoding.files import force_file, translate_file
    from mtkit.decoding.translator import Translator, joins_documents
    from mtkit.runs import find_runs
    from mtkit.storage.files import check_outputs

    given = given_settings(
        method=method,
        beam=beam,
        length_penalty=length_penalty,
        coverage_penalty=coverage_penalty,
        max_pieces=max_pieces,
        no_repeat_ngram=no_repeat_ngram,
        n_best=n_best,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        batch_tokens=batch_tokens,
    )
    check_options(
        input,
        {"--scores": scores, "--direction": None if test else direction, "--document-ids": document_ids},
        {"--side": side, "--test": test, "--data": None if shortlist or alignments else data},
    )
    check_standard_input(input, {"--document-ids": document_ids, "--target": target})
    if target is not None:
        check_alone({"--alignments": alignments, "--scores": scores, "--document-ids": document_ids}, shortlist, given)
    check_documents(documents, document_ids)
    check_set(test, languages, side)
    check_parts(part, join, input, output, target)
    read = None if input in (None, "-") else Path(str(input))
    check_outputs(
        [each for each in (output, alignments) if each is not None],
        [each for each in (read, target, document_ids, recipe) if each is not None],
    )
    check_standard_output(output, {"--input": read, "--target": target})
    if join:
        join_parts(Path(str(input)), cast(Path, output), alignments)
        return
    piece, device = own_part(part, input, output, target, device)
    runs = find_runs(run, name)
    whole = recipe_of(runs[0], recipe, given)
    asked = True if document_ids is not None and documents is None else documents
    joined = joins_documents(runs, asked, whole.decoding, scores=scores, forced=target is not None, say=note)
    if threads is not None:
        torch.set_num_threads(threads)
    translator = Translator(
        runs, whole.decoding, checkpoint=checkpoint, device=device, dtype=dtype, engine=engine, forks=True, say=note
    )
    if alignments is not None:
        translator.check_links()
    prepared = data or folder_of(whole, runs[0])
    sides = _sides(translator, prepared, side or [], test, languages, direction) if input is None else []
    if len(sides) > 1 and (output or target or alignments):
        option = "--target holds translations of" if target else "--output and --alignments hold"
        raise MtkitError(f"{option} one side; choose with --side: {', '.join(each.name for each in sides)}")
    if input is not None:
        translator.directions(direction, 0)  # said before anything is read or learned
    if shortlist:
        translator.shorten(lexicon_for(runs[0], prepared, shortlist), say=note)
    heads = None if alignments is None else heads_for(translator, prepared)
    if input is None and target is None:
        _translate_sides(translator, sides, output, alignments, heads, joined=joined)
        return
    where = sys.stdout.buffer if output is None else output
    from mtkit.cli.progress import counted

    total = None if piece else count(input) if input is not None else len(sides[0].sources)
    with counted(None, "lines", total) as advance:
        if target is not None:
            lines, ways = (sides[0].sources, sides[0].directions) if input is None else (text(input), direction)
            force_file(translator, lines, text(str(target)), where, directions=ways, say=note, on_progress=advance)
            return
        notes = translate_file(
            translator,
            text(str(input)),
            where,
            direction=direction,
            documents=joined,
            document_ids=None if document_ids is None else text(str(document_ids)),
            scores=scores,
            alignments=alignments,
            heads=heads,
            live=is_live(str(input)),
            part=piece,
            say=note,
            on_progress=advance,
        )
    for message in notes.messages():
        note(message)


def _translate_sides(
    translator: "Translator",
    sides: "Sequence[HeldOut]",
    output: Path | None,
    alignments: Path | None,
    heads: "Heads | None",
    *,
    joined: bool,
) -> None:
    """Translate test sides into the run's folder, and show samples, where and how fast."""
    from mtkit.cli.progress import counted
    from mtkit.decoding.files import translate_side
    from mtkit.decoding.held_out import n_best_lines
    from mtkit.decoding.lines.notes import Notes
    from mtkit.decoding.word_alignment import pharaoh
    from mtkit.storage.files import write_text
    from mtkit.terminal import shortened

    for side in sides:
        if joined and side.documents is None:
            note(f"the side {side.name} has no documents, so its lines are translated one by one")
        with counted(side.name, "lines", len(side.sources)) as advance:
            found, speed, path = translate_side(translator, side, joined=joined, say=note, on_progress=advance)
        for message in Notes.of(found).messages():
            note(message)
        if output is not None:
            several = translator.settings.n_best > 1
            lines = n_best_lines(found) if several else (each.text for each, *_ in found)
            write_text(output, "".join(f"{line}\n" for line in lines))
        if alignments is not None and heads is not None:
            links = translator.links(translator.side_lines(side, joined=joined), [each for each, *_ in found], heads)
            write_text(alignments, "".join(f"{pharaoh(each)}\n" for each in links))
        for number in range(0, len(found), -(-len(found) // max(SAMPLES // len(sides), 1))):
            typer.echo(f"source       {shortened(side.sources[number])}")
            typer.echo(f"reference    {shortened(side.references[number])}")
            typer.echo(f"translation  {shortened(found[number][0].text)}\n")
        numbers = speed.numbers()
        typer.echo(
            f"{len(found):,} segments in {numbers['seconds']:.1f} s ({numbers['segments_per_second']:,.0f} "
            f"segments/s, {numbers['tokens_per_second']:,.0f} tokens/s), "
            f"checkpoint {translator.about['checkpoint']}: {path}"
        )


def _sides(
    translator: "Translator",
    folder: Path,
    names: Sequence[str],
    test: str | None,
    languages: str | None,
    direction: str | None,
) -> "list[HeldOut]":
    """The named test set, or sides of prepared data."""
    if test is not None:
        return [_named(translator, test, languages, direction)]
    return _held_out(translator.runs[0], folder, names)


def _held_out(run: "Run", folder: Path, names: Sequence[str]) -> "list[HeldOut]":
    """The sides of those names; without one, those that a bare `mtkit translate` translates."""
    from mtkit.data.prepared import open_prepared
    from mtkit.decoding.held_out import held_out

    prepared = open_prepared(folder)
    if prepared.fingerprint != run.about.get("data"):
        note(f"{folder} is not the data that {run.folder} was trained on")
    if not names and not prepared.tests:
        note(f"{folder} has no test side, so the validation side is translated")
    return [held_out(prepared, name) for name in dict.fromkeys(names or prepared.tests or ["valid"])]


def _named(translator: "Translator", name: str, languages: str | None, direction: str | None) -> "HeldOut":
    """A test set of sacrebleu as a side of the run's only direction, or the given one."""
    from mtkit.data.resolve import read_test_set
    from mtkit.decoding.held_out import HeldOut

    way = translator.directions(direction, 1).names_of_lines()[0]
    found = read_test_set(name, languages or way)
    return HeldOut(found.name, found.sources, found.references, translator.directions(way, len(found.sources)))
