"""The steps of `mtkit translate`: checks of its options, its input, its settings, and its parts."""

import os
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from mtkit.cli.progress import note
from mtkit.errors import MtkitError
from mtkit.terminal import stderr_is_terminal

if TYPE_CHECKING:
    from mtkit.decoding.held_out import HeldOut
    from mtkit.decoding.translator import Translator
    from mtkit.recipe import DecodingSettings, Recipe
    from mtkit.runs import Run
    from mtkit.storage.jobs import Part


def check_options(options: Mapping[str, Any], decoding: Mapping[str, Any]) -> None:
    """Check that the options of `mtkit translate`, by their names in Python, go together.

    `decoding` are the decoding settings among them. Raises: MtkitError for the first problem.
    """
    present = {name for name, value in options.items() if value or name in decoding}
    input, in_parts = options["input"], {"part", "join"} & present
    test_direction = {"direction"} if "test" in present else set()
    prepared_data = {"side", "test"} | (set() if {"shortlist", "alignments", "markup"} & present else {"data"})
    searching = {"alignments", "glossary", "markup", "scores", "shortlist", "prefix", *decoding} - {"batch_tokens"}
    lacks_files = input in (None, "-") or options["output"] is None

    def refuse(names: Iterable[str], message: str) -> None:
        for name in options:
            if name in present and name in names:
                raise MtkitError(message.format(option=f"--{name.replace('_', '-')}"))

    if input is None:
        refuse(
            {"scores", "markup", "direction", "document_ids", "prefix"} - test_direction,
            "{option} applies to --input only; give --input FILE too",
        )
    else:
        refuse(prepared_data, "{option} applies to prepared data only; leave it out, or leave out --input")
    if input == "-":
        refuse(
            [name for name in ("document_ids", "prefix", "target") if str(options[name]) == "-"],
            "--input and {option} cannot both be standard input; give one of them as a file",
        )
    if "target" in present:
        refuse(searching, "{option} is for translations that the run finds; leave it out with --target")
    else:
        refuse(["word_scores"], "{option} scores given translations; give --target FILE too")
    if options["documents"] is False:
        refuse(["document_ids"], "{option} selects lines to translate together; leave it out with --sentences")
    without = ["shortlist"] if "glossary" in present else []
    refuse(without, "{option} leaves out pieces that terms of the glossary need; leave one out")
    if "side" in present:
        refuse(["test"], "{option} and --side do not combine; leave one out")
    if "test" not in present:
        refuse(["languages"], "{option} applies to --test only; leave it out")
    if len(in_parts) == 2:
        raise MtkitError("--part translates and --join joins what is translated; leave one out")
    if in_parts:
        refuse(["prefix"], "{option} has a line per line of --input, and parts are divided by bytes; leave one out")
    if lacks_files:
        refuse(in_parts, "{option} needs --input FILE and --output FILE, the same for all parts")
    if "target" in present:
        refuse(in_parts, "{option} is for translations that the run finds; leave --target out")


def check_standard_output(output: Path | None, read: Mapping[str, Path | None], *, prints: bool) -> None:
    """Check standard output if there is no `output`; with `prints` it then gets the lines.

    Raises: MtkitError if it is closed and gets them, and if the shell appends it to a file that is read, which would
    never end.
    """
    if sys.stdout is None and output is None and prints:
        raise MtkitError("standard output is closed; give --output FILE")
    try:
        stdout = os.fstat(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # it is closed, or no file
        return
    if output is not None or not stat.S_ISREG(stdout.st_mode):
        return
    for option, file in read.items():
        if file is not None and file.exists() and os.path.samestat(file.stat(), stdout):
            raise MtkitError(f"standard output is {file}, the file of {option}; redirect it to another file")


def open_text(name: str) -> Path | Iterable[str]:
    """Return the file with that name; the lines of standard input if it is -."""
    from mtkit.text.text_files import decode_lines, read_lines

    if name != "-":
        return Path(name)
    if sys.stdin is None:
        raise MtkitError("standard input is closed; give --input a file, or text to standard input")
    try:
        # a copy, because a thread may wait for input, and Python cannot exit while a thread holds `sys.stdin`
        stdin: BinaryIO = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except OSError:  # it is no file, but an object of a program that calls this one
        stdin = sys.stdin.buffer
    return decode_lines(read_lines(stdin), "standard input")


def open_optional(path: Path | None) -> Path | Iterable[str] | None:
    """Open the text of an option as `open_text`; None if the option is not given."""
    return None if path is None else open_text(str(path))


def count_lines(name: str) -> int | None:
    """Return the number of lines if a progress bar shows it and they can be read twice; otherwise None."""
    from mtkit.text.text_files import Lines

    countable = name != "-" and Path(name).is_file() and stderr_is_terminal()
    return sum(1 for _ in Lines(Path(name))) if countable else None


def is_live(name: str) -> bool:
    """Return whether somebody may wait for answers: the input comes through a pipe or from a terminal."""
    try:
        return name == "-" and sys.stdin is not None and not stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
    except OSError:
        return False


def recipe_of(run: "Run", path: Path | None, decoding: dict[str, Any]) -> "Recipe":
    """Return the recipe at `path`, or else the run's, with decoding settings of the command line."""
    from mtkit.recipe import load_recipe

    recipe = load_recipe(path, {"decoding": decoding}) if path else run.recipe.with_decoding(decoding)
    if ignored := recipe.decoding.without_effect(decoding):
        option, method = ignored[0].replace("_", "-"), ignored[1]
        raise MtkitError(f"--{option} has no effect with --method {recipe.decoding.method}; add --method {method}")
    return recipe


def choose_sides(
    translator: "Translator",
    folder: Path,
    names: Sequence[str],
    test: str | None,
    languages: str | None,
    direction: str | None,
) -> "list[HeldOut]":
    """Return the test set of sacrebleu, or the named sides of prepared data; all test sides if nothing is named.

    Raises: DataError for an unknown name; MtkitError as `Translator.directions`.
    """
    from mtkit.data.prepared import open_prepared
    from mtkit.data.resolve import read_test_set
    from mtkit.decoding.held_out import HeldOut, held_out

    run = translator.runs[0]
    if test is not None:
        (direction,) = translator.directions(direction, 1).names_of_lines()
        texts = read_test_set(test, languages or direction)
        directions = translator.directions(direction, len(texts.sources))
        return [HeldOut(texts.name, texts.sources, texts.references, directions)]
    prepared = open_prepared(folder)
    if prepared.fingerprint != run.about.get("data"):
        note(f"{folder} is not the data that {run.folder} was trained on")
    if not names and not prepared.tests:
        note(f"{folder} has no test side, so the validation side is translated")
    return [held_out(prepared, name) for name in dict.fromkeys(names or prepared.tests or ["valid"])]


def load_translator(runs: "Sequence[Run]", settings: "DecodingSettings", options: Mapping[str, Any]) -> "Translator":
    """Return the translator of `mtkit translate`, whose options are given by their names in Python.

    Raises: as `Translator`; DataError for a bad glossary; MtkitError if the translator does not support a glossary or
    alignments.
    """
    from mtkit.decoding.glossary import Glossary
    from mtkit.decoding.translator import Translator

    path, engine = options["glossary"], options["engine"]
    glossary = None if path is None else Glossary.read(path, runs[0].tokenizers.target)
    translator = Translator(
        runs,
        settings,
        checkpoint=options["checkpoint"],
        device=options["device"],
        dtype=options["dtype"],
        engine="mtkit" if glossary is not None and engine == "auto" else engine,
        forks=True,
        say=note,
    )
    if glossary is not None:
        translator.require(glossary)
    if options["alignments"] is not None or options["markup"]:
        translator.check_links()
    return translator


def part_and_device(
    part: str | None, input: str | None, output: Path | None, target: Path | None, device: str
) -> "tuple[Part | None, str]":
    """Return this process's part of --input and its device; each process of torchrun has a part and a GPU of its own.

    Raises: MtkitError for an invalid part, and for processes of torchrun without an input and an output file.
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


def join_parts(input: Path, outputs: Sequence[Path]) -> None:
    """Join the finished parts. Raises: DataError as `mtkit.decoding.lines.parts.join_parts`."""
    from mtkit.decoding.lines import parts

    count, lines = parts.join_parts(input, outputs)
    typer.echo(f"{lines:,} lines of {count:,} parts: {' and '.join(map(str, outputs))}")
    note(f"the parts stay; remove them with rm {outputs[0]}.part-*")
