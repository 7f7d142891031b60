"""The steps of `mtkit translate`: its input, its settings, its parts, and the translation or scoring."""

import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from mtkit.cli.progress import counted, note
from mtkit.errors import MtkitError
from mtkit.terminal import stderr_is_terminal, stdout_width

if TYPE_CHECKING:
    from mtkit.decoding.alignment_heads import Heads
    from mtkit.decoding.held_out import HeldOut
    from mtkit.decoding.lines.rows import Text
    from mtkit.decoding.lines.source import Directions
    from mtkit.decoding.translator import Translator
    from mtkit.recipe import DecodingSettings, Recipe
    from mtkit.runs import Run
    from mtkit.storage.jobs import Part

SAMPLES = 3
"""Translations that are printed, of all sides together."""


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


def has_unread_input() -> bool:
    """Return whether standard input is a file or a pipe that holds text; it is not read, and nothing waits for it."""
    try:
        stdin = sys.stdin.fileno()
        kind = os.fstat(stdin).st_mode
        if stat.S_ISREG(kind):
            return os.fstat(stdin).st_size > os.lseek(stdin, 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(kind) and not stat.S_ISSOCK(kind):
            return False
        from fcntl import ioctl
        from termios import FIONREAD

        return any(ioctl(stdin, FIONREAD, bytes(4)))  # the number of bytes in the pipe
    except (OSError, ValueError, AttributeError, ImportError):  # it is closed, or no file, or the system cannot tell
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

    Raises: as `Translator`; DataError for a bad glossary; MtkitError if the translator does not support a glossary,
    prefixes or alignments.
    """
    from mtkit.decoding.glossary import Glossary
    from mtkit.decoding.translator import Translator

    path, engine = options["glossary"], options["engine"]
    if engine == "auto" and (path is not None or options["prefix"] is not None):
        engine = "mtkit"
    glossary = None if path is None else Glossary.read(path, runs[0].tokenizers.target)
    translator = Translator(
        runs,
        settings,
        checkpoint=options["checkpoint"],
        device=options["device"],
        dtype=options["dtype"],
        engine=engine,
        forks=True,
        say=note,
    )
    if glossary is not None:
        translator.require(glossary)
    if options["prefix"] is not None:
        translator.check_prefixes()
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
    note(f"the parts stay; remove them with rm {shlex.quote(str(outputs[0]))}.part-*")


def _bar_of_lines(total: int | None, output: Path | None) -> AbstractContextManager[Callable[[int], object]]:
    """Return a progress bar of lines, which is not shown among lines that are printed on the terminal."""
    return counted(None, "lines", total, show=output is not None or stdout_width() is None)


def score_target(
    translator: "Translator", sides: "Sequence[HeldOut]", options: Mapping[str, Any], *, joined: bool
) -> None:
    """Write the log-probabilities of --target given --input, or given the side if there is one."""
    from mtkit.decoding.files import force_file

    sources: Text
    ids: Text | None
    directions: Directions | str | None
    total: int | None
    if sides:
        (side,) = sides
        if joined and side.documents is None:
            note(f"the side {side.name} has no documents, so its lines are scored one by one")
        joined = joined and side.documents is not None
        sources, directions, total = side.sources, side.directions, len(side.sources)
        ids = None if side.documents is None else list(map(str, side.documents.ids))
    else:
        sources, directions, total = open_text(options["input"]), options["direction"], count_lines(options["input"])
        ids = open_optional(options["document_ids"])
    output = options["output"]
    with _bar_of_lines(total, output) as advance:
        force_file(
            translator,
            sources,
            open_text(str(options["target"])),
            sys.stdout.buffer if output is None else output,
            directions=directions,
            documents=joined,
            document_ids=ids,
            words=options["word_scores"],
            say=note,
            on_progress=advance,
        )


def translate_input(
    translator: "Translator", options: Mapping[str, Any], heads: "Heads | None", part: "Part | None", *, joined: bool
) -> None:
    """Translate --input, or a part of it, to --output; print notes on lines that need attention."""
    from mtkit.decoding.files import translate_file

    input, output = options["input"], options["output"]
    with _bar_of_lines(count_lines(input) if part is None else None, output) as advance:
        notes = translate_file(
            translator,
            open_text(input),
            sys.stdout.buffer if output is None else output,
            direction=options["direction"],
            documents=joined,
            document_ids=open_optional(options["document_ids"]),
            prefixes=open_optional(options["prefix"]),
            scores=options["scores"],
            alignments=options["alignments"],
            heads=heads,
            markup=options["markup"],
            live=is_live(input),
            part=part,
            say=note,
            on_progress=advance,
        )
    for message in notes.messages(glossary=translator.has_glossary and part is None):
        note(message)


def translate_sides(
    translator: "Translator",
    sides: "Sequence[HeldOut]",
    output: Path | None,
    alignments: Path | None,
    heads: "Heads | None",
    *,
    joined: bool,
) -> None:
    """Translate test sides into the run's folder; print samples, the path and the speed."""
    from mtkit.decoding.files import output_lines, translate_side
    from mtkit.decoding.lines.notes import Notes
    from mtkit.decoding.word_alignment import pharaoh
    from mtkit.storage.files import write_text
    from mtkit.terminal import shortened

    for side in sides:
        if joined and side.documents is None:
            note(f"the side {side.name} has no documents, so its lines are translated one by one")
        with counted(side.name, "lines", len(side.sources)) as advance:
            translations, speed, path = translate_side(translator, side, joined=joined, say=note, on_progress=advance)
        for message in Notes.of(translations).messages(glossary=translator.has_glossary):
            note(message)
        if output is not None:
            lines = output_lines(translations, 0, translator.settings, scores=False)
            write_text(output, "".join(f"{line}\n" for line in lines))
        best = [translation for translation, *_ in translations]
        if alignments is not None and heads is not None:
            links = translator.links(translator.side_lines(side, joined=joined), best, heads)
            write_text(alignments, "".join(f"{pharaoh(line)}\n" for line in links))
        for number in range(0, len(best), -(-len(best) // max(SAMPLES // len(sides), 1))):
            typer.echo(f"source       {shortened(side.sources[number])}")
            typer.echo(f"reference    {shortened(side.references[number])}")
            typer.echo(f"translation  {shortened(best[number].text)}\n")
        numbers = speed.numbers()
        typer.echo(
            f"{len(best):,} segments in {numbers['seconds']:.1f} s ({numbers['segments_per_second']:,.0f} "
            f"segments/s, {numbers['tokens_per_second']:,.0f} tokens/s), "
            f"checkpoint {translator.about['checkpoint']}: {path}"
        )
