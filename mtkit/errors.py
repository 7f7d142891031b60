"""The errors that a user can cause; `mtkit.cli.app` prints each as one line and exits with code 2."""

import errno
import os
import re
import sys
from contextlib import suppress


class MtkitError(Exception):
    """A user's mistake: the message names the place, the value, the rule and the remedy, in one line."""


class RecipeError(MtkitError):
    """A setting that does not exist, or an invalid value."""


class DataError(MtkitError):
    """Text or prepared data that cannot be used; the message names the file and, if there is one, the line."""


class RunError(MtkitError):
    """A run folder or checkpoint that is missing, damaged or of another version."""


class DiffersError(DataError, RunError):
    """A folder with content that was made with other settings."""

    def __init__(self, what: str, advice: str) -> None:
        """`what` describes the difference; `advice` names the remedy for the command that makes such a folder."""
        super().__init__(f"{what}; {advice}")
        self.what = what


def check_utf8(name: str) -> None:
    """Raises: MtkitError for a file name that is not UTF-8, which records and messages could not contain."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        printed = name.encode(errors="replace").decode()
        with suppress(UnicodeDecodeError):
            os.fsencode(name).decode()
            encoding = sys.getfilesystemencoding()
            raise MtkitError(f"{printed} is UTF-8, and Python reads names as {encoding}; set LC_ALL=C.UTF-8") from error
        raise MtkitError(f"{printed} is not UTF-8; rename that file, or give a link to it") from error


LONGEST = 80
"""Maximum characters of a value in a message."""


def shown(value: object) -> str:
    """Quote a value in Python's notation for a message, at most `LONGEST` characters of it."""
    if isinstance(value, str):
        return repr(value) if len(value) <= LONGEST else f"{value[:LONGEST]!r}..."
    try:
        return cut(repr(value))
    except ValueError:  # an integer of thousands of digits
        return "a number of thousands of digits"


def cut(text: str) -> str:
    """Cut a text, for messages that do not quote it, to its first `LONGEST` characters."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def cut_words(message: str) -> str:
    """Return another library's message in one line, with long words and quotations cut to `LONGEST` characters."""
    long = rf"'[^']{{{LONGEST + 1},}}'|\S{{{LONGEST + 1},}}"
    return re.sub(long, lambda match: shown(match[0].strip("'")), " ".join(message.split()))


def first_line(error: Exception) -> str:
    """Return the first line of another library's message, or the name of the error if it has no message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


REMEDIES = {
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EISDIR: "give a file",
    errno.ENOTDIR: "a part of this path is a file; check the name",
    errno.ELOOP: "its links lead in a circle; give the file itself",
    errno.EACCES: "change its permissions, or give another file",
    errno.ENOSPC: "free some space or choose another place",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f) or choose another place",
}
"""Remedies for system errors, by error number."""


def reason(error: OSError) -> str:
    """Return the system's message of an error, with a remedy if one is known: "File name too long; give ..."."""
    message = str(error.strerror or error)
    return f"{message}; {REMEDIES[error.errno]}" if error.errno in REMEDIES else message


def did_you_mean(word: str, known: "list[str]") -> str:
    """Return `" (did you mean 'longformer'?)"` if a known word is similar, else the empty string."""
    from difflib import get_close_matches

    near = get_close_matches(str(word), known, n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else ""
