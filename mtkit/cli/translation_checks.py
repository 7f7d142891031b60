"""Check the options of `mtkit translate` before anything is read."""

import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtkit.errors import MtkitError


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
