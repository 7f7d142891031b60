"""Lines of text from Python: of a list, an open file, or what else gives one after the other."""

from collections.abc import Iterable

from mtkit.errors import MtkitError


def lines_in(given: Iterable[str], of: str = "") -> list[str]:
    """The lines, each without the line end that an open file leaves at it; `of` follows the number in a message.

    Raises: MtkitError for a line that is no text.
    """
    lines = []
    for number, line in enumerate(given, start=1):
        if not isinstance(line, str):
            raise MtkitError(f"line {number}{of} is no text but {type(line).__name__}; give str")
        try:
            line.encode()
        except UnicodeEncodeError as error:
            raise MtkitError(f"line {number}{of} holds half of a surrogate pair, which is no character") from error
        lines.append(line.removesuffix("\n").removesuffix("\r"))
    return lines
