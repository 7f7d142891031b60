"""Options of `mtkit translate` that do not go together."""

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


def check_alone(shortlist: int | None, alignments: Path | None) -> None:
    """Raises: MtkitError for what says nothing about given translations."""
    if shortlist:
        raise MtkitError("--shortlist restricts a search; leave it out with --target")
    if alignments is not None:
        raise MtkitError("--alignments is of translations that the run finds; leave it out with --target")


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
