"""What a command says on standard error beside its work.

Options of `mtkit translate` that do not go together.

Where the lines to translate come from: a file, or standard input.

What is learned from prepared data at first use: the lexicon of `--shortlist`, the heads of `--alignments`.

A file in parts: which part this process translates, on which device, and the joining of all.

The settings that `mtkit translate` decodes by, from its options and the run's recipe.
"""

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from mtkit.cli.progress import note
from mtkit.errors import MtkitError
from mtkit.terminal import watched


def check_options(input: str | None, with_input: dict[str, Any], without: dict[str, Any]) -> None:
    """Raises: MtkitError for an option that says nothing about lines of --input, or only about them."""
    for option, value in with_input.items():
        if value and input is None:
            raise MtkitError(f"{option} applies to --input only; give --input FILE too")
    for option, value in without.items():
        if value and input is not None:
            raise MtkitError(f"{option} applies to prepared data only; leave it out, or leave out --input")


def check_alone(others: Mapping[str, Any], shortlist: int | None, search: Mapping[str, Any]) -> None:
    """Raises: MtkitError for an option, or a setting of a search, that says nothing about given translations."""
    settings = {f"--{key.replace('_', '-')}": True for key in search if key != "batch_tokens"}
    for option, value in {**others, "--shortlist": shortlist, **settings}.items():
        if value:
            raise MtkitError(f"{option} is for translations that the run finds; leave it out with --target")


def check_documents(documents: bool | None, document_ids: Path | None) -> None:
    """Raises: MtkitError for ids of documents where lines are to be translated one by one."""
    if documents is False and document_ids is not None:
        raise MtkitError("--document-ids says which lines are translated together; leave it out with --sentences")


def check_set(test: str | None, languages: str | None, side: list[str] | None) -> None:
    """Raises: MtkitError for options that do not go with a named test set."""
    if test and side:
        raise MtkitError("--test and --side do not combine; leave one out")
    if languages and not test:
        raise MtkitError("--languages applies to --test only; leave it out")


def check_standard_input(input: str | None, others: Mapping[str, Path | None]) -> None:
    """Raises: MtkitError where two options read standard input."""
    for option, file in others.items():
        if input == "-" and str(file) == "-":
            raise MtkitError(f"--input and {option} cannot both be standard input; give one of them as a file")


def check_standard_output(output: Path | None, read: Mapping[str, Path | None]) -> None:
    """Raises: MtkitError if the shell appends standard output to a file that is read: its end would never come."""
    try:
        stdout = os.fstat(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # it is closed, or no file
        return
    if output is not None or not stat.S_ISREG(stdout.st_mode):
        return
    for option, file in read.items():
        if file is not None and file.exists() and os.path.samestat(file.stat(), stdout):
            raise MtkitError(f"standard output goes to {file}, the file of {option}; send it to another file")


def text(name: str) -> Path | Iterable[str]:
    """The file of that name; of -, the lines of standard input."""
    from mtkit.text.text_files import decoded, lines_of

    return decoded(lines_of(_standard_input()), "standard input") if name == "-" else Path(name)


def count(name: str) -> int | None:
    """How many lines there are, where a bar will show it and it can be known."""
    from mtkit.text.text_files import Lines

    known = name != "-" and Path(name).is_file() and watched()  # a pipe can be read but once
    return sum(1 for _ in Lines(Path(name))) if known else None


def is_live(name: str) -> bool:
    """Whether somebody may be waiting for an answer to what is read: it comes through a pipe or from a terminal."""
    try:
        return name == "-" and sys.stdin is not None and not stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
    except OSError:
        return False


def _standard_input() -> BinaryIO:
    """Standard input, opened anew: a thread may wait for it, and Python cannot end while one holds `sys.stdin`."""
    if sys.stdin is None:
        raise MtkitError("standard input is closed; give --input a file, or text to standard input")
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except OSError:  # it is no file, as in a program that stands in for one
        return sys.stdin.buffer


if TYPE_CHECKING:
    from mtkit.decoding.lexicon import Lexicon
    from mtkit.decoding.translator import Translator
    from mtkit.decoding.word_alignment import Heads
    from mtkit.runs import Run


def lexicon_for(run: "Run", data: Path, each: int) -> "Lexicon":
    """The run's lexicon with `each` translations of a source piece; learned from prepared data where it has none.

    Raises: MtkitError as `learn_lexicon`; RunError for a damaged lexicon.
    """
    from mtkit.cli.progress import through
    from mtkit.decoding.lexicon import FILE, learn_lexicon, load_lexicon, save_lexicon

    lexicon = load_lexicon(run)
    if lexicon is None:
        lexicon = learn_lexicon(run, data, through)
        try:
            save_lexicon(run, lexicon)
            note(f"learned the lexicon from {data}; it is kept in {run.folder / FILE}")
        except MtkitError as error:
            note(f"{error}; the lexicon will be learned again next time")
    return lexicon.cut(each)


def heads_for(translator: "Translator", data: Path) -> "Heads":
    """The attention heads that align words for the translator's run. Raises: RunError for a damaged file of them."""
    from mtkit.cli.progress import through
    from mtkit.decoding import word_alignment

    (run,), checkpoint = translator.runs, translator.about["checkpoint"]
    return word_alignment.heads_for(run, translator.network, checkpoint, data, say=note, progress=through)


if TYPE_CHECKING:
    from mtkit.storage.jobs import Part


def check_parts(part: str | None, join: bool, input: str | None, output: Path | None, target: Path | None) -> None:
    """Raises: MtkitError for options that do not go with --part and --join."""
    given = "--join" if join else "--part"
    if part is not None and join:
        raise MtkitError("--part translates and --join joins what is translated; leave one out")
    if (part is not None or join) and (input in (None, "-") or output is None):
        raise MtkitError(f"{given} needs --input FILE and --output FILE, the same for all parts")
    if (part is not None or join) and target is not None:
        raise MtkitError(f"{given} is of translations that the run finds; leave --target out")


def own_part(
    part: str | None, input: str | None, output: Path | None, target: Path | None, device: str
) -> "tuple[Part | None, str]":
    """The part of --input for this process, and its device; each process of torchrun has a part and a GPU of its own.

    Raises: MtkitError for a name that is no part, and for processes of torchrun without a file of which to take parts.
    """
    from mtkit.storage.jobs import Part
    from mtkit.training.world import World

    world = World(device)
    if world.size == 1:
        return None if part is None else Part.named(part), device
    if part is not None:
        raise MtkitError(
            "each process of torchrun translates a part; leave --part out, or start mtkit without torchrun"
        )
    if input in (None, "-") or output is None or target is not None:
        raise MtkitError("torchrun translates parts of a file; give --input FILE and --output FILE, and no --target")
    return Part(world.rank + 1, world.size), str(world.device)


def join(input: Path, output: Path, alignments: Path | None) -> None:
    """Join the finished parts. Raises: DataError as `mtkit.decoding.lines.parts.join_parts`."""
    from mtkit.decoding.lines.parts import join_parts

    outputs = [output] if alignments is None else [output, alignments]
    parts, lines = join_parts(input, outputs)
    typer.echo(f"{lines:,} lines of {parts:,} parts: {' and '.join(map(str, outputs))}")
    note(f"the parts stay; remove them with rm {output}.part-*")


if TYPE_CHECKING:
    from mtkit.recipe import Recipe
    from mtkit.runs import Run


def given_settings(**settings: Any) -> dict[str, Any]:
    """Those decoding settings that the command line has; --beam without --method selects beam search."""
    from mtkit.recipe.settings import with_method

    return with_method({key: value for key, value in settings.items() if value is not None})


def folder_of(recipe: "Recipe", run: "Run") -> Path:
    """The prepared data of a recipe, or the run's where the recipe says nothing of data."""
    return recipe.data.folder if "data" in recipe.model_fields_set else run.recipe.data.folder


def recipe_of(run: "Run", path: Path | None, given: dict[str, Any]) -> "Recipe":
    """The recipe at `path`, or else the run's, with the decoding settings given on the command line."""
    from mtkit.recipe import load_recipe, make_recipe, merged

    overrides = {"decoding": given}
    recipe = load_recipe(path, overrides) if path else make_recipe(merged(run.recipe.model_dump(), overrides))
    if idle := recipe.decoding.without_effect(given):
        option, method = idle[0].replace("_", "-"), idle[1]
        raise MtkitError(f"--{option} has no effect with --method {recipe.decoding.method}; add --method {method}")
    return recipe
