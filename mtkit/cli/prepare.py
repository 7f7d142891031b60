"""`mtkit prepare`: text to a tokenizer and prepared data."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from mtkit.cli.progress import note
from mtkit.errors import RecipeError

_Files = tuple[Path, Path] | None
_PAIR = "SRC TGT"


def prepare(
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe: a YAML file or a name from `mtkit recipes`. Options override it.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Output folder.  [default: mtkit-data]")] = None,
    train: Annotated[_Files, typer.Option(metavar=_PAIR, help="Training text: source file, target file.")] = None,
    valid: Annotated[_Files, typer.Option(metavar=_PAIR, help="Validation text, scored during training.")] = None,
    test: Annotated[_Files, typer.Option(metavar=_PAIR, help="Test text, translated by `mtkit translate`.")] = None,
    source_language: Annotated[
        str | None, typer.Option(help="Source language.  [default: by file names, or script]")
    ] = None,
    target_language: Annotated[
        str | None, typer.Option(help="Target language, e.g. ja.  [default: by file names, or script]")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Maximum vocabulary size.  [default: 8,000]")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="bpe|unigram", help="Segmentation algorithm.  [default: bpe]")
    ] = None,
    normalization: Annotated[
        str | None,
        typer.Option(metavar="nfkc|nmt_nfkc|identity", help="Normalisation of source text.  [default: nfkc]"),
    ] = None,
    separate: Annotated[
        bool, typer.Option("--separate", help="One vocabulary per side instead of a joint one.")
    ] = False,
    tokenizer_from: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Take the tokenizer of this run (name or folder) or of this prepared data."),
    ] = None,
    sentences: Annotated[
        int | None, typer.Option(help="Built-in corpus: sentences per document.  [default: 1]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Built-in corpus: random seed.  [default: 1]")] = None,
    keep_misaligned: Annotated[
        bool, typer.Option("--keep-misaligned", help="Accept sides whose lines seem misaligned.")
    ] = False,
    keep_overlap: Annotated[
        bool, typer.Option("--keep-overlap", help="Keep training pairs that are also in a held-out side.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Encoding processes.  [default: one per core]")] = None,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Encode the I-th of N parts of the training text, into its own folder."),
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Join the parts of --part, instead of encoding.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace data that was prepared with other settings.")
    ] = False,
) -> None:
    """Prepare text for training: tokenizer and encoded corpora.

    Text files are UTF-8 with one segment per line, plain or gzipped (.gz). Without --train and --recipe, the built-in
    corpus is used. The `data` section of a recipe accepts more: tables, data sets, several corpora, directions and test
    sides, documents, cleaning, translations by a run. The same command does nothing the second time. Other settings or
    text need --overwrite or another --data folder. A command that was killed goes on when it is typed again; of more
    than a million training pairs it keeps what it has encoded.

    \b
    Examples:
      mtkit prepare
      mtkit prepare --sentences 8 --data documents
      mtkit prepare --train a.en a.de --valid b.en b.de --test c.en c.de
      mtkit prepare --train a.en a.de --valid b.en b.de --part 2/8      # on any machine; then the same with --join
      mtkit prepare --tokenizer-from opus --train a.en a.de --valid b.en b.de    # for mtkit train --init-from opus
    """
    if workers is not None and not 1 <= workers <= 1024:
        raise RecipeError(f"--workers {workers}: give 1 to 1,024 processes")
    if part is not None and join:
        raise RecipeError("--part prepares and --join joins what is prepared; leave one out")
    given: dict[str, Any] = {
        "folder": data,
        **{name: pair and [{"source": pair[0], "target": pair[1]}] for name, pair in _named(train, valid, test)},
        "tokenizer_from": tokenizer_from,
        "source_language": source_language,
        "target_language": target_language,
        "builtin": _present({"sentences": sentences, "seed": seed}),
        "cleaning": _present({"misaligned": keep_misaligned or None, "overlap": False if keep_overlap else None}),
        "tokenizer": _present(
            {
                "vocabulary": vocabulary,
                "kind": tokenizer,
                "normalization": normalization,
                "joint": False if separate else None,
            }
        ),
    }
    from mtkit.cli.progress import through
    from mtkit.data.encode import usable_cores
    from mtkit.data.prepare import prepare as prepare_data
    from mtkit.data.prepare import prepare_part
    from mtkit.data.report import summary
    from mtkit.recipe import load_recipe
    from mtkit.recipe.settings import run_folder_of
    from mtkit.storage.jobs import Part

    settings = load_recipe(recipe, {"data": _present(given)})
    text = settings.data
    if text.train and not (sentences is None and seed is None):
        other = "leave --train out" if train else f"take another recipe than {recipe}, which has training text"
        raise RecipeError(f"--sentences and --seed belong to the built-in corpus; leave them out, or {other}")
    if any(corpus.translated_by for corpus in text.train):
        from mtkit.decoding.translated_text import with_translations

        text = with_translations(text, say=typer.echo, progress=through)
    processes = workers or usable_cores()
    if part is not None:
        place, pairs = prepare_part(text, Part.named(part), workers=processes, progress=through)
        typer.echo(f"{pairs:,} pairs encoded: {place}\n\nNext, when all parts are there: the same command with --join")
        return
    report = prepare_data(text, overwrite=overwrite, workers=processes, progress=through, join=join)
    typer.echo(summary(report, settings.model.max_length))
    options = _typed("--recipe", recipe) + _typed("--data", data)
    example = " --preset small" if train else " --attention longformer"
    if recipe is not None:
        example = _typed("--name", recipe.stem)
    if tokenizer_from is not None and (run_folder_of(tokenizer_from) / "run.json").is_file():
        example = _typed("--init-from", tokenizer_from) + (example if recipe is not None else "")
    if join:
        note(f"the parts stay; remove them with rm -r {shlex.quote(str(text.folder))}.part-*")
    typer.echo(f"\nNext: mtkit train{options}{example}")


def _typed(option: str, value: Path | str | None) -> str:
    """An option as it is typed, a space before it; nothing without a value."""
    return "" if value is None else f" {option} {shlex.quote(str(value))}"


def _named(*pairs: _Files) -> list[tuple[str, _Files]]:
    return list(zip(("train", "valid", "test"), pairs, strict=True))


def _present(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}
