"""`mtkit prepare`: text to a tokenizer and prepared data."""

from pathlib import Path
from typing import Annotated, Any

import typer

from mtkit.errors import RecipeError

_Files = tuple[Path, Path] | None
_PAIR = "SRC TGT"


def prepare(
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file, or a name of `mtkit recipes`, whose data to prepare.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder to write; mtkit-data if left out.")] = None,
    train: Annotated[_Files, typer.Option(metavar=_PAIR, help="Text to train on: source file, target file.")] = None,
    valid: Annotated[_Files, typer.Option(metavar=_PAIR, help="Text to validate on while training.")] = None,
    test: Annotated[_Files, typer.Option(metavar=_PAIR, help="Text that `mtkit translate` translates.")] = None,
    source_language: Annotated[str | None, typer.Option(help="Language of the source, as in en.")] = None,
    target_language: Annotated[str | None, typer.Option(help="Language of the target, as in de.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Pieces at most; 8,000 if left out.")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="bpe|unigram", help="How pieces are found.")] = None,
    normalization: Annotated[
        str | None,
        typer.Option(metavar="nfkc|nmt_nfkc|identity", help="How the source is folded; the target stays as it is."),
    ] = None,
    separate: Annotated[bool, typer.Option("--separate", help="A vocabulary for each side, not a joint one.")] = False,
    sentences: Annotated[int | None, typer.Option(help="Built-in corpus: sentences a document.")] = None,
    seed: Annotated[int | None, typer.Option(help="Built-in corpus: seed of the draw.")] = None,
    keep_misaligned: Annotated[
        bool, typer.Option("--keep-misaligned", help="Take sides whose lines seem not to go together.")
    ] = False,
    keep_overlap: Annotated[
        bool, typer.Option("--keep-overlap", help="Train on what is in the validation or a test side too.")
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Processes that encode; one for each core if left out.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace data prepared with other settings.")] = False,
) -> None:
    """Prepare text for training; bare, the built-in corpus, into mtkit-data.

    Text files are plain UTF-8, one segment a line, or gzipped (.gz). A recipe's data settings take more: tables, data
    sets, several corpora, directions and test sides, documents, cleaning. The same command again does nothing; other
    settings or other text need --overwrite or a --data folder of their own.

    Examples:

      mtkit prepare

      mtkit prepare --sentences 8 --data documents

      mtkit prepare --train train.en train.de --valid val.en val.de --test test.en test.de
    """
    if train and not (sentences is None and seed is None):
        raise RecipeError("--sentences and --seed belong to the built-in corpus; leave them out, or leave --train out")
    if workers is not None and not 1 <= workers <= 1024:
        raise RecipeError(f"--workers {workers}: give 1 to 1,024 processes")
    given: dict[str, Any] = {
        "folder": data,
        **{name: pair and [{"source": pair[0], "target": pair[1]}] for name, pair in _named(train, valid, test)},
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
    from tqdm import tqdm

    from mtkit.data.encode import usable_cores
    from mtkit.data.prepare import prepare as prepare_data
    from mtkit.data.report import summary
    from mtkit.recipe import load_recipe

    settings = load_recipe(recipe, {"data": _present(given)})

    report = prepare_data(
        settings.data,
        overwrite=overwrite,
        workers=workers or usable_cores(),
        progress=lambda items, what, total: tqdm(items, what, total, delay=2, unit_scale=True, leave=False),
    )
    typer.echo(summary(report, settings.model.max_length))
    options = f" --recipe {recipe}" * (recipe is not None) + f" --data {data}" * (data is not None)
    example = (
        f" --name {recipe.stem}" if recipe is not None else " --preset small" if train else " --attention longformer"
    )
    typer.echo(f"\nNext: mtkit train{options}{example}")


def _named(*pairs: _Files) -> list[tuple[str, _Files]]:
    return list(zip(("train", "valid", "test"), pairs, strict=True))


def _present(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}
