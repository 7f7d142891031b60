"""Options of `mtkit translate` that do not go together."""

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtkit.errors import MtkitError


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
