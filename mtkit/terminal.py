"""The terminal that people watch, where there is one."""

import sys


def watched() -> bool:
    """Whether standard error is a terminal: not where it is closed, or an object that stands in for a file."""
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # None, as where the shell has closed it; no such method; a closed file
        return False
