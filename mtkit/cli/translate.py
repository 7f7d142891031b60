"""`mtkit translate`: translate the test sides, a file or standard input with a trained run, or with several as one."""

from pathlib import Path
from typing import Annotated

from typer import Option

from mtkit.cli.options import (
    Arithmetic,
    Checkpoint,
    Device,
    EnsembleFolders,
    EnsembleNames,
    Threads,
    nonempty,
    use_threads,
)
from mtkit.cli.progress import note, through
from mtkit.cli.translation import (
    choose_sides,
    has_unread_input,
    join_parts,
    load_translator,
    part_and_device,
    recipe_of,
    score_target,
    translate_input,
    translate_sides,
)
from mtkit.cli.translation_checks import check_options, check_standard_output
from mtkit.errors import MtkitError


def translate(
    input: Annotated[
        str | None, Option(metavar="FILE", help="Text file, one segment per line (.gz too); - is standard input.")
    ] = None,
    output: Annotated[
        Path | None,
        Option(metavar="FILE", help="Output file (.gz too); - is standard output, the default with --input."),
    ] = None,
    run: EnsembleFolders = None,
    name: EnsembleNames = None,
    side: Annotated[
        list[str] | None, Option(metavar="NAME", help="Test side, or valid; repeatable.  [default: all test sides]")
    ] = None,
    test: Annotated[
        str | None, Option(metavar="NAME", help="Test text of sacrebleu instead, downloaded, e.g. wmt14.")
    ] = None,
    languages: Annotated[
        str | None, Option(metavar="EN-DE", help="Language pair of --test.  [default: the run's direction]")
    ] = None,
    direction: Annotated[
        str | None, Option(metavar="EN-FR", help="Direction of --input or --test; required for runs with several.")
    ] = None,
    documents: Annotated[
        bool | None,
        Option(
            "--documents/--sentences",
            help="Translate lines of a document together (blank lines separate documents), or each by itself.  "
            "[default: as trained]",
        ),
    ] = None,
    document_ids: Annotated[
        Path | None, Option(metavar="FILE", help="Document ids for the lines of --input, one per line.")
    ] = None,
    prefix: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Text with which each translation of --input must begin, one per line; lines may be empty.",
        ),
    ] = None,
    part: Annotated[
        str | None, Option(metavar="I/N", help="Translate part I of N of --input only, into a file of that part.")
    ] = None,
    join: Annotated[bool, Option("--join", help="Check and join the translated parts of --input.")] = False,
    recipe: Annotated[Path | None, Option(help="Recipe with decoding settings.  [default: the run's]")] = None,
    data: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Prepared data with test sides and text for the lexicon.  [default: the run's]"),
    ] = None,
    checkpoint: Checkpoint = "best",
    target: Annotated[
        Path | None, Option(metavar="FILE", help="Print the log-probabilities of these translations instead.")
    ] = None,
    word_scores: Annotated[
        bool,
        Option("--word-scores", help="Print log-probabilities of the words and pieces of --target, as JSON Lines."),
    ] = False,
    alignments: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Write the links of words, e.g. 0-0 1-2: source word, then target word, counted from 0.",
        ),
    ] = None,
    method: Annotated[str | None, Option(help="Search: greedy, beam or sample.")] = None,
    beam: Annotated[int | None, Option(help="Beam size; without --method it selects beam search.")] = None,
    length_penalty: Annotated[float | None, Option(help="Exponent of length normalisation; 0 disables it.")] = None,
    coverage_penalty: Annotated[
        float | None, Option(help="Weight of the penalty for unattended source pieces.")
    ] = None,
    max_pieces: Annotated[
        int | None, Option(help="Maximum pieces per translation.  [default: by source length, from training data]")
    ] = None,
    document_pieces: Annotated[
        int | None,
        Option(help="Maximum source pieces of document lines to translate together.  [default: as trained]"),
    ] = None,
    context: Annotated[
        int | None, Option(help="Previous lines of a long document to read again before the next ones.  [default: 0]")
    ] = None,
    no_repeat_ngram: Annotated[int | None, Option(help="Forbid repeated n-grams of this many pieces.")] = None,
    n_best: Annotated[int | None, Option(help="Translations per line, printed as line number, score, text.")] = None,
    temperature: Annotated[float | None, Option(help="Sampling temperature.")] = None,
    top_k: Annotated[int | None, Option(help="Sample from the k likeliest pieces; 0: from all.")] = None,
    top_p: Annotated[float | None, Option(help="Sample from the likeliest pieces with this total probability.")] = None,
    epsilon: Annotated[float | None, Option(help="Sample from the pieces with at least this probability.")] = None,
    seed: Annotated[int | None, Option(help="Random seed of sampling.")] = None,
    mbr: Annotated[
        str | None,
        Option(metavar="METRIC", help="Choose the hypothesis or sample most similar to the others: chrf or bleu."),
    ] = None,
    samples: Annotated[int | None, Option(help="Samples among which --mbr chooses.  [default: 64]")] = None,
    shortlist: Annotated[
        int | None,
        Option(
            metavar="N", min=1, max=100, help="Restrict output to the N likeliest translations of each source piece."
        ),
    ] = None,
    glossary: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Terms that translations must contain: source term, tab, target term on each line."
        ),
    ] = None,
    markup: Annotated[
        bool, Option("--markup", help="Carry inline tags and placeholders over to the translation by word alignments.")
    ] = False,
    scores: Annotated[bool, Option("--scores", help="Print score, tab, translation.")] = False,
    batch_tokens: Annotated[
        int | None, Option(help="Maximum padded source pieces per batch, counted per hypothesis.")
    ] = None,
    device: Device = "auto",
    dtype: Arithmetic = "auto",
    engine: Annotated[
        str,
        Option(help="Decoder: mtkit, ctranslate2, or auto (on CPUs ctranslate2, if installed and able to)."),
    ] = "auto",
    threads: Threads = None,
) -> None:
    """Translate test sides, a file or standard input.

    Without --input, the prepared test sides are translated by the latest run. N lines in give N lines out. Decoding
    settings default to the run's recipe. The same command resumes a killed translation of --input to --output.
    Several runs form an ensemble, which averages their probabilities. --shortlist also allows the pieces of the source
    and frequent pieces; its lexicon is learned from the prepared data at first use and kept with the run.

    --alignments links each word of a translation with the source word that gets the most attention, by the heads that
    agree best with a lexicon on the validation side; they are chosen at first use. Words are separated by white space;
    in Chinese, Japanese, Thai, Lao, Khmer and Burmese text each character is a word.

    --glossary names terms that translations must contain; beam search writes them. A term matches whole words, also at
    the start of a sentence and in capitals. A line of the file with one column names a term that stays as it is. A note
    counts the terms that translations contain and lack.

    --markup translates the text of lines with tags (<b>, <x id="1"/>) and puts each tag around the words that belong
    to its words. Placeholders ({name}, %s) and text with translate="no" stay as they are.

    --target prints the log-probability of each given translation. A run trained on documents also reads as many
    preceding lines of the document as fit, on both sides, but the log-probability is of the line only.

    --part divides --input by bytes, so that any machines can translate the parts of a large file; each line is in one
    part. Processes of torchrun take a part each. --join checks that all lines are there and writes --output.

    \b
    Examples:
      mtkit translate --side test
      mtkit translate --test wmt14 && mtkit score
      mtkit translate --input - < text.en > text.de
      mtkit translate --input text.en --output text.fr --direction en-fr
      mtkit translate --name one --name two --beam 5
      mtkit translate --method sample --epsilon 0.02 --mbr chrf
      mtkit translate --dtype int8 --shortlist 20
      mtkit translate --input text.en --output text.de --prefix beginnings.de
      mtkit translate --input text.en --output text.de --alignments text.en-de
      mtkit translate --input text.en --output text.de --glossary terms.tsv
      mtkit translate --input page.en --output page.de --markup
      mtkit translate --input text.en --target text.de --word-scores > scores.jsonl
      mtkit translate --input text.en --output text.de --part 2/8
      mtkit translate --input text.en --output text.de --join
    """
    output = None if output == Path("-") and (input or target) else output
    options = dict(locals())  # all parameters, by name
    from mtkit.decoding.lexicon import lexicon_for
    from mtkit.decoding.lines.documents import joins_documents
    from mtkit.recipe import DecodingSettings
    from mtkit.recipe.settings import with_method
    from mtkit.runs import find_runs
    from mtkit.storage.outputs import check_outputs

    decoding = nonempty(**{name: value for name, value in options.items() if name in DecodingSettings.model_fields})
    check_options(options, decoding)
    input_file = None if input in (None, "-") else Path(str(input))
    outputs = [path for path in (output, alignments) if path is not None]
    read = (input_file, target, document_ids, prefix, recipe, glossary)
    check_outputs(outputs, [path for path in read if path is not None])
    check_standard_output(output, {"--input": input_file, "--target": target}, prints=bool(input or target))
    if join and input_file is not None:
        join_parts(input_file, outputs)
        return
    this_part, device = part_and_device(part, input, output, target, device)
    runs = find_runs(run, name)
    chosen = recipe_of(runs[0], recipe, with_method(decoding))
    ids = document_ids is not None
    requested = True if ids and documents is None else documents
    single = {"scores": scores, "prefixes": prefix is not None, "glossary": glossary is not None}
    joined = joins_documents(runs, requested, chosen.decoding, ids=ids, **single, forced=bool(target), say=note)
    use_threads(threads)
    translator = load_translator(runs, chosen.decoding, {**options, "device": device})
    recipe_data = chosen.data if "data" in chosen.model_fields_set else runs[0].recipe.data
    prepared = data or recipe_data.folder
    sides = choose_sides(translator, prepared, side or [], test, languages, direction) if input is None else []
    if len(sides) > 1 and (outputs or target):
        option = "--target holds translations of" if target else "--output and --alignments hold"
        raise MtkitError(f"{option} one side; choose with --side: {', '.join(named.name for named in sides)}")
    if input is None and not (side or test or target) and has_unread_input():
        note("standard input is not read, the test sides are translated; add --input - to translate standard input")
    if input is not None:
        translator.directions(direction, 0)  # raises an error before anything is read or learned
    if shortlist:
        lexicon = lexicon_for(runs[0], prepared, say=note, progress=through)
        translator.shorten(lexicon.cut(shortlist), say=note)
    heads = None
    if alignments is not None or markup:
        heads = translator.word_heads(prepared, say=note, progress=through)
    if target is not None:
        score_target(translator, sides, options, joined=joined)
    elif input is not None:
        translate_input(translator, options, heads, this_part, joined=joined)
    else:
        translate_sides(translator, sides, output, alignments, heads, joined=joined)
