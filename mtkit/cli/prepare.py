"""`mtkit prepare`: train a tokenizer and encode corpora."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from mtkit.cli.options import RecipeFile, nonempty, parse_options
from mtkit.cli.progress import note, through
from mtkit.errors import RecipeError

_Files = tuple[Path, Path] | None
_PAIR = "SRC TGT"


def prepare(
    recipe: RecipeFile = None,
    data: Annotated[Path | None, Option(help="Output folder.  [default: mtkit-data]")] = None,
    train: Annotated[_Files, Option(metavar=_PAIR, help="Training text: source file, target file.")] = None,
    valid: Annotated[_Files, Option(metavar=_PAIR, help="Validation text, scored during training.")] = None,
    test: Annotated[_Files, Option(metavar=_PAIR, help="Test text, translated by `mtkit translate`.")] = None,
    source_language: Annotated[str | None, Option(help="Source language.  [default: by file names, or script]")] = None,
    target_language: Annotated[
        str | None, Option(help="Target language, e.g. ja.  [default: by file names, or script]")
    ] = None,
    vocabulary: Annotated[int | None, Option(help="Maximum vocabulary size.  [default: 8,000]")] = None,
    tokenizer: Annotated[
        str | None, Option(metavar="bpe|unigram|words", help="Segmentation algorithm.  [default: bpe; words for tasks]")
    ] = None,
    normalization: Annotated[
        str | None, Option(metavar="nfkc|nmt_nfkc|identity", help="Normalisation of source text.  [default: nfkc]")
    ] = None,
    separate: Annotated[bool, Option("--separate", help="One vocabulary per side instead of a joint one.")] = False,
    tokenizer_from: Annotated[
        Path | None, Option(metavar="RUN", help="Use the tokenizer of this run (name or folder) or prepared data.")
    ] = None,
    sentences: Annotated[int | None, Option(help="Built-in corpus: sentences per document.  [default: 1]")] = None,
    task: Annotated[
        str | None, Option(metavar="NAME", help="Built-in task, from `mtkit tasks`, instead of text.")
    ] = None,
    task_option: Annotated[
        list[str] | None,
        Option(metavar="KEY=VALUE", help="Setting of the task, e.g. longest=40, train=50000; repeatable."),
    ] = None,
    seed: Annotated[int | None, Option(help="Built-in corpus and tasks: random seed.  [default: 1]")] = None,
    keep_misaligned: Annotated[
        bool, Option("--keep-misaligned", help="Accept sides whose lines seem misaligned.")
    ] = False,
    keep_overlap: Annotated[
        bool, Option("--keep-overlap", help="Keep training pairs that are also in a held-out side.")
    ] = False,
    workers: Annotated[int | None, Option(help="Encoding processes.  [default: one per core]")] = None,
    part: Annotated[
        str | None, Option(metavar="I/N", help="Encode the I-th of N parts of the training text, into its own folder.")
    ] = None,
    join: Annotated[bool, Option("--join", help="Join the parts of --part, instead of encoding.")] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace data that was prepared with other settings.")
    ] = False,
) -> None:
    """Prepare text for training: tokenizer and encoded corpora.

    Text files are UTF-8 with one segment per line, plain or gzipped (.gz). Without --train and --recipe, a built-in
    task (--task) or the built-in corpus is used. The `data` section of a recipe has more options: tables, data sets,
    several corpora, directions and test sides, documents, cleaning, translations by a run. If the data exists, the
    command does nothing; other settings or text need --overwrite or another --data folder. After a kill, the same
    command starts again; with more than a million training pairs, it resumes.

    \b
    Examples:
      mtkit prepare
      mtkit prepare --sentences 8 --data documents
      mtkit prepare --task copy --task-option longest=40 --data copy
      mtkit prepare --train a.en a.de --valid b.en b.de --test c.en c.de
      mtkit prepare --train a.en a.de --valid b.en b.de --part 2/8      # on any machine; then the same with --join
      mtkit prepare --tokenizer-from opus --train a.en a.de --valid b.en b.de    # for mtkit train --init-from opus
    """
    if workers is not None and not 1 <= workers <= 1024:
        raise RecipeError(f"--workers {workers}: give 1 to 1,024 processes")
    if task_option and task is None and recipe is None:
        raise RecipeError("--task-option applies to a built-in task; give --task NAME (`mtkit tasks` lists them)")
    if part is not None and join:
        raise RecipeError("--part prepares a part and --join joins the parts; leave one out")
    overrides = nonempty(
        folder=data,
        train=_corpus(train),
        valid=_corpus(valid),
        test=_corpus(test),
        tokenizer_from=tokenizer_from,
        source_language=source_language,
        target_language=target_language,
        builtin=nonempty(sentences=sentences),
        task=_task(task, task_option),
        cleaning=nonempty(misaligned=keep_misaligned or None, overlap=False if keep_overlap else None),
        tokenizer=nonempty(
            vocabulary=vocabulary,
            kind=tokenizer,
            normalization=normalization,
            joint=False if separate else None,
        ),
    )
    from mtkit.data.encode import usable_cores
    from mtkit.data.prepare import prepare as prepare_data
    from mtkit.data.report import summary
    from mtkit.data.training_side import prepare_part
    from mtkit.recipe import load_recipe
    from mtkit.recipe.settings import run_folder_of
    from mtkit.storage.jobs import Part

    settings = load_recipe(recipe, {"data": overrides})
    if seed is not None:
        drawn = "builtin" if settings.data.task is None else "task"
        overrides[drawn] = {**overrides.get(drawn, {}), "seed": seed}
        settings = load_recipe(recipe, {"data": overrides})
    text = settings.data
    if text.train and not (sentences is None and seed is None):
        other = "leave --train out" if train else f"use a recipe without training text; {recipe} has some"
        raise RecipeError(f"--sentences and --seed apply to built-in text only; leave them out, or {other}")
    if any(corpus.translated_by for corpus in text.train):
        from mtkit.decoding.translated_text import with_translations

        text = with_translations(text, say=typer.echo, progress=through)
    processes = workers or usable_cores()
    if part is not None:
        place, pairs = prepare_part(text, Part.named(part), workers=processes, progress=through)
        typer.echo(f"{pairs:,} pairs encoded: {place}\n\nNext, when all parts exist: the same command with --join")
        return
    report = prepare_data(text, overwrite=overwrite, workers=processes, progress=through, join=join)
    typer.echo(summary(report, settings.model.max_length))
    if join:
        note(f"the parts are kept; remove them with rm -r {shlex.quote(str(text.folder))}.part-*")
    options = {"--recipe": recipe, "--data": data}
    if tokenizer_from is not None and (run_folder_of(tokenizer_from) / "run.json").is_file():
        options["--init-from"] = tokenizer_from
        options["--name"] = Path(f"{run_folder_of(tokenizer_from).resolve().name}-tuned")  # not the first run's
    if recipe is not None:
        options["--name"] = Path(recipe.stem)
    typed = "".join(f" {option} {shlex.quote(str(value))}" for option, value in options.items() if value is not None)
    if not options.keys() & {"--init-from", "--name"}:
        builtin = "" if text.task is not None else " --attention longformer"
        typed += " --preset small --max-minutes 60" if train else builtin
    typer.echo(f"\nNext: mtkit train{typed}")


def _task(name: str | None, options: list[str] | None) -> dict[str, Any]:
    """Return the settings of `data.task`; options that are no settings of every task are the task's own."""
    from mtkit.recipe.task import TaskSettings

    settings = parse_options(options, "--task-option", "longest=40")
    common = {key: value for key, value in settings.items() if key in TaskSettings.model_fields}
    others = {key: value for key, value in settings.items() if key not in common}
    return nonempty(**{"name": name, **common}, options=others)


def _corpus(files: _Files) -> list[dict[str, Path]] | None:
    return None if files is None else [{"source": files[0], "target": files[1]}]
