"""`mtkit compare`: train several models on the same data and budget, and compare them in a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from mtkit.cli.options import (
    AttentionOptions,
    BatchTokens,
    Device,
    PreparedData,
    RecipeFile,
    Threads,
    nonempty,
    parse_entries,
    parse_names,
    parse_options,
)
from mtkit.cli.progress import latest, note, through
from mtkit.errors import MtkitError, cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mtkit.experiments.folder import Folder
    from mtkit.experiments.place import Place
    from mtkit.experiments.study import Study

OUT = Path("mtkit-compare")
STOPPED = "stopped; the same command resumes"


def compare(
    searched: Annotated[list[str] | None, Argument(metavar="SETTING=A,B", help="More settings for --search.")] = None,
    attention: Annotated[
        str | None,
        Option(metavar="A,B", help="Entries, e.g. full,band[window_radius=16],linear@encoder; all: every one."),
    ] = None,
    study: Annotated[
        Path | None, Option(metavar="FILE", help="Study: a YAML file, or a name from `mtkit studies`.")
    ] = None,
    recipe: RecipeFile = None,
    data: PreparedData = None,
    task: Annotated[
        list[str] | None, Option(metavar="NAME", help="Built-in task instead of --data; repeatable.")
    ] = None,
    output: Annotated[Path, Option(metavar="FOLDER", help="Output folder for rows, tables, pictures and runs.")] = OUT,
    attention_option: AttentionOptions = None,
    seeds: Annotated[
        str | None, Option(metavar="N", help="Number of seeds, or a list: 1,2,7.  [default: the recipe's seed]")
    ] = None,
    search: Annotated[
        list[str] | None, Option(metavar="SETTING=A,B", help="Values of a setting to search, or a range A..B.")
    ] = None,
    search_method: Annotated[str | None, Option(help="Search: grid, random or bayesian.")] = None,
    search_trials: Annotated[int | None, Option(help="Trials per entry of random and Bayesian search.")] = None,
    search_share: Annotated[
        float | None, Option(help="Share of the budget for a trial of the search.  [default: 1]")
    ] = None,
    pruner: Annotated[str | None, Option(help="Stop bad trials of the search early: none, median or halving.")] = None,
    match: Annotated[
        str | None, Option(help="Equal parameters or flops, by the feed-forward width of each entry.")
    ] = None,
    max_updates: Annotated[int | None, Option(help="Updates per trial.")] = None,
    max_minutes: Annotated[float | None, Option(help="Training minutes per trial.")] = None,
    max_tokens: Annotated[int | None, Option(help="Target tokens per trial.")] = None,
    max_flops: Annotated[float | None, Option(help="Training FLOPs per trial.")] = None,
    batch_tokens: BatchTokens = None,
    columns: Annotated[
        str | None, Option(metavar="A,B", help="Columns of the table, e.g. BLEU,chrF,loss,parameters.")
    ] = None,
    jobs: Annotated[int, Option(min=1, max=1024, help="Trials to run at the same time.")] = 1,
    ray: Annotated[
        str | None, Option(metavar="ADDRESS", help="Run the trials on a Ray cluster: auto, or its address.")
    ] = None,
    join: Annotated[
        list[Path] | None,
        Option(metavar="FOLDER", help="Add the results of another folder or results.jsonl (.gz too); repeatable."),
    ] = None,
    reproduce: Annotated[
        Path | None, Option(metavar="FILE", help="Compute a row of this results.jsonl again (--row).")
    ] = None,
    row: Annotated[int | None, Option(min=1, help="Row of --reproduce, from 1.")] = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train several models under one budget and compare them.

    An entry is NAME[OPTION=VALUE]@ROLE+SETTING=VALUE: a mechanism in the roles of its paper, or in the given roles
    (encoder, decoder, cross), with other settings of the recipe if given. Data and budget are the same for all. With
    several seeds, the table shows means, standard deviations, and intervals over seeds and test segments; each entry
    is tested against the first. A search tries the same number of trials for every entry, and keeps the point with the
    best validation score.

    The output folder holds results.jsonl (a row per trial), compare.md, compare.csv, compare.tex and pictures. The
    same command resumes; more entries, seeds or values are added. Several commands may work on one folder. Without
    entries, the results of the folder so far are written and printed. If a trial fails, its line has the reason and the
    exit code is 1.

    \b
    Examples:
      mtkit compare --attention full,longformer,em-routing --max-minutes 2
      mtkit compare --attention 'full,band[window_radius=16],linear@encoder' --seeds 3 --match parameters
      mtkit compare --attention full,linear --task copy --task mqar --search peak_rate=1e-3,3e-3 --max-updates 500
      mtkit compare --columns chrF,loss,parameters
      mtkit compare --study study.yaml --output /shared/study --ray auto
      mtkit compare --reproduce mtkit-compare/results.jsonl --row 3
    """
    options = dict(locals())  # all parameters, by name
    from mtkit.experiments.folder import Folder

    folder = Folder(output)
    is_new = study is not None or attention is not None or not (folder.exists() or join)
    _check_options(options, is_new=is_new)
    if reproduce is not None or row is not None:
        _reproduce(reproduce, row, output, device, threads)
        return
    study_settings: dict[str, Any] = {
        "attention": attention,
        "study": study,
        "recipe": recipe,
        "settings": nonempty(
            training=nonempty(
                max_updates=max_updates,
                max_minutes=max_minutes,
                max_tokens=max_tokens,
                max_flops=max_flops,
                batch_tokens=batch_tokens,
            ),
            data=nonempty(folder=None if data is None else str(data)),
        ),
        "tasks": task or [],
        "seeds": None if seeds is None else _seeds(seeds),
        "search": nonempty(
            settings=_searched([*(search or []), *(searched or [])]),
            method=search_method,
            trials=search_trials,
            share=search_share,
            pruner=pruner,
        ),
        "match": match,
        "columns": parse_names("--columns", columns),
    }
    files = [path for path in join or [] if path.is_file()]
    folders = [Folder(path) for path in join or [] if not path.is_file()]
    if not is_new:
        if folders:
            _join(folder, folders)
        if files:
            _join(folder, files)
        _print(folder, study_settings["columns"])
        return
    from mtkit.experiments.place import Place

    chosen = _study(study_settings, parse_options(attention_option))
    if chosen.settings.tasks and data is not None:
        raise MtkitError("the study's tasks have their own data, in --output; leave --data out")
    if folders:
        _join(folder, folders, chosen)
    _run(chosen, folder, Place(device, threads, jobs, ray), files)


def _check_options(options: dict[str, Any], *, is_new: bool) -> None:
    """Raises: MtkitError for an option, by its name in Python, that would have no effect.

    `is_new`: trials run; otherwise the results so far are printed.
    """
    if options["searched"] and not options["search"]:
        text = cut(options["searched"][0])
        option = "--study" if text.endswith((".yaml", ".yml")) else "--search"
        raise MtkitError(f"{text} belongs to {option}, as in {option} {text}; or give --attention")
    if options["task"] and options["data"] is not None:
        raise MtkitError("--task prepares its own data in --output; leave --data out, or --task")
    if options["reproduce"] is not None or options["row"] is not None:
        effective = {"reproduce", "row", "output", "device", "threads"}
        why = "does not go with --reproduce; leave it out"
    elif not is_new:
        effective = {"output", "join", "columns"}
        why = "is for trials, and without --attention or --study the results so far are printed; give one of these too"
    else:
        return
    defaults = {"output": OUT, "jobs": 1, "device": "auto"}
    for name, value in options.items():
        if name not in effective and value not in (None, [], defaults.get(name)):
            raise MtkitError(f"--{name.replace('_', '-')} {why}")


def _study(given: dict[str, Any], options: dict[str, Any]) -> "Study":
    """Return the study of a file and options, which override the file's settings."""
    from collections.abc import Mapping

    from mtkit.experiments.study import make_study, read_study
    from mtkit.recipe import merged

    settings, origin = ({}, None) if given["study"] is None else read_study(given["study"])
    if given["attention"] is not None:
        settings["entries"] = parse_entries("--attention", given["attention"])
    elif origin is None:
        raise MtkitError("nothing to compare; give --attention, as in --attention full,longformer, or --study FILE")
    if given["recipe"] is not None:
        settings["recipe"] = str(given["recipe"])
    for key in ("tasks", "seeds", "match", "columns"):
        if given[key] not in (None, []):
            settings[key] = given[key]
    if given["search"] and not (given["search"].get("settings") or settings.get("search")):
        raise MtkitError("there is no setting to search; give --search, as in --search peak_rate=1e-3,3e-3")
    for key in ("settings", "search"):
        written = settings.get(key) or {}
        if given[key] and isinstance(written, Mapping):  # of another type: make_study raises
            settings[key] = merged(written, given[key])
    return make_study(settings, options=options, origin=origin)


def _run(study: "Study", folder: "Folder", place: "Place", files: list[Path]) -> None:
    """Run the study's trials, after the rows of `files` are joined to the folder; print the results."""
    from tqdm import tqdm

    from mtkit.experiments.compare import compare as run
    from mtkit.experiments.compare import outcome_of
    from mtkit.experiments.outputs import write_outputs
    from mtkit.experiments.pruning import Pruning
    from mtkit.experiments.setup import set_up

    plan, data = set_up(study, folder, progress=through, say=lambda line: typer.echo(line, err=True))
    folder.open(study)
    if files:
        _join(folder, files)
    with latest() as show, place.runner(folder, plan) as runner:

        def done(name: str) -> None:
            folder.write_rows()
            tqdm.write(outcome_of(folder, name))

        signal = run(folder, plan, data, runner, show=show, done=done, pruning=Pruning(study, folder))
    if signal is not None:
        write_outputs(folder, progress=through)
        typer.echo(STOPPED, err=True)
        raise typer.Exit(128 + signal)
    _print(folder, study.settings.columns)
    names = {entry.name for entry in study.entries}
    if any("failed" in row for row in folder.rows() if row["entry"] in names):
        raise typer.Exit(1)


def _print(folder: "Folder", columns: "list[str] | tuple[str, ...]") -> None:
    from mtkit.experiments.outputs import write_outputs
    from mtkit.experiments.report import text
    from mtkit.terminal import stdout_width, wrapped

    for message in folder.damaged():
        note(message)
    table, written = write_outputs(folder, columns, progress=through)
    names = ", ".join(path.name for path in written if path.parent == folder.path)
    of_tasks = dict.fromkeys(path.parent.relative_to(folder.path) for path in written if path.parent != folder.path)
    pictures = f"pictures in {', '.join(map(str, of_tasks))}; " if of_tasks else ""
    files = wrapped(f"in {folder.path}: {names}; {pictures}logs in {folder.logs.name}", stdout_width())
    typer.echo(f"\n{text(folder.study(), table, folder.rows())}\n\n{files}")


def _join(folder: "Folder", others: "Sequence[Folder | Path]", study: "Study | None" = None) -> None:
    from mtkit.experiments.folder import Folder
    from mtkit.experiments.join import join

    for other in others:
        for message in other.damaged() if isinstance(other, Folder) else ():
            note(message)
    copied, known = join(folder, others, study)
    typer.echo(f"{copied} rows added to {folder.path}; {known} were there already", err=True)
    compared = {entry.name for entry in folder.study().entries}
    if left := list(dict.fromkeys(row["entry"] for row in folder.rows() if row["entry"] not in compared)):
        note(f"the tables leave out rows of entries that are not in the study: {', '.join(left)}")


def _reproduce(rows: Path | None, number: int | None, out: Path, device: str, threads: int | None) -> None:
    if rows is None or number is None:
        raise MtkitError("--reproduce FILE and --row N go together: the row N of a results.jsonl is computed again")
    import torch

    from mtkit.device import find_device
    from mtkit.experiments.folder import Folder
    from mtkit.experiments.join import reproduce

    out = out if out.name else out.resolve()
    if not out.name:
        raise MtkitError(f"--output {out} has no name, to which the row's number could be added; choose another")
    place = Folder(out.with_name(f"{out.name}-row-{number}"))
    with latest() as show:
        result = reproduce(
            rows,
            number,
            place,
            device=str(find_device(device)),
            threads=threads or torch.get_num_threads(),
            show=show,
        )
    if isinstance(result, int):
        typer.echo(STOPPED, err=True)
        raise typer.Exit(128 + result)
    for side, scores in result.before["scores"].items():
        for metric, score in scores.items():
            again = result.after["scores"][side][metric]["value"]
            typer.echo(f"{side} {metric}: {score['value']:.4f}, computed again: {again:.4f}")
    if result.earlier:
        typer.echo(f"note: an earlier command computed it; delete {place.path} to compute it again")
    for line in result.circumstances:
        typer.echo(f"note: {line}")
    typer.echo("the row came back" if not result.differences else f"differs: {'; '.join(result.differences)}")
    if result.differences:
        raise typer.Exit(1)


def _seeds(text: str) -> int | list[int]:
    """Parse --seeds: "3" is 3 (their number), "1,2,7" is a list, and "7," a list of one."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdigit() and len(word) <= 18 for word in words):
        raise MtkitError(f"--seeds {cut(text)}: write a number of seeds, or a list such as 1,2,7")
    return list(map(int, words)) if "," in text else int(words[0])


def _searched(texts: list[str]) -> dict[str, Any]:
    """Parse --search: ["peak_rate=1e-3,3e-3", "dropout=0..0.3"]."""
    from mtkit.experiments.entries import split

    settings: dict[str, Any] = {}
    for text in (word for words in texts for word in words.split()):
        key, equals, values = text.partition("=")
        low, dots, high = values.partition("..")
        if not equals or not key or not values:
            raise MtkitError(f"--search {cut(text)}: write SETTING=A,B or SETTING=LOW..HIGH, as in peak_rate=1e-3,3e-3")
        if key in settings:
            raise MtkitError(f"--search {cut(text)}: {cut(key)} is given twice; write all its values after one =")
        if not dots:
            settings |= parse_options([f"{key}=[{', '.join(split(values))}]"], "--search")
        else:
            ends = parse_options([f"low={low}", f"high={high}"], "--search")
            settings[key] = {**ends, "log": isinstance(ends["low"], int | float) and ends["low"] > 0}
    return settings
