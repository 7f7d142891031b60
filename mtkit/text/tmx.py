"""Translation memories: two languages of a TMX file (https://www.gala-global.org/oscarStandards/tmx/tmx14b.html).

The file is read as a stream. It may name its DTD, which is never fetched. A file that declares entities is refused:
they can include other files, or grow without limit.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.parsers import expat

from mtkit.errors import DataError
from mtkit.text.tables import Rows, flatten
from mtkit.text.text_files import Repairs, open_file

_BUFFER = 1 << 16

_CODES = frozenset({"bpt", "ept", "ph", "it", "ut"})
"""Elements of a segment with codes of other formats, such as HTML tags, not text."""


def tmx_rows(path: Path, languages: Sequence[str], repairs: Repairs) -> Rows:
    """Yield the text in each of `languages` of each translation unit that has all of them, with the unit's line.

    A language matches its regions and scripts: de matches de-AT. A unit's first text in a language counts, exact
    matches first. Codes of other formats within a segment are dropped.

    Raises: DataError naming the file and the line if it is not XML, has no translation units, or declares or uses
    entities of its own; naming the languages of its units if none has all of `languages`.
    """
    reader = _Reader(path)
    any_unit, known = False, dict[str, None]()
    with open_file(path) as file:
        ended = False
        while not ended:
            block = file.read(_BUFFER)
            ended = not block
            for line, texts in reader.units(block, last=ended):
                known |= dict.fromkeys(texts)
                cells = [_text_in(language, texts) for language in languages]
                if None not in cells:
                    any_unit = True
                    yield line, [flatten(cell or "", repairs, f"{path}, line {line}") for cell in cells]
    if not any_unit:
        there = f"the languages {', '.join(list(known)[:20])}" if known else "no translation units"
        raise DataError(f"{path} has no unit with {' and '.join(languages)}; it has {there}")


def _text_in(language: str, texts: dict[str, str]) -> str | None:
    """Return the text in a language, by its code in lower case."""
    wanted = language.lower().replace("_", "-")
    regions = (text for code, text in texts.items() if code.startswith(f"{wanted}-"))
    return texts[wanted] if wanted in texts else next(regions, None)


class _Reader:
    """The parser of a file, and the unit that it is in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._units: list[tuple[int, dict[str, str]]] = []
        self._line, self._language = 0, ""
        self._texts: dict[str, str] = {}
        self._segment: list[str] | None = None
        self._codes = 0
        """Depth of elements with codes."""
        self._parser = parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler = self._add
        parser.EntityDeclHandler = self._refuse
        parser.SkippedEntityHandler = self._refuse

    def units(self, block: bytes, *, last: bool) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield the line and the texts by language of the units that end in this block of the file."""
        try:
            self._parser.Parse(block, last)
        except expat.ExpatError as error:
            raise DataError(
                f"{self._path}, line {error.lineno}: not XML ({expat.ErrorString(error.code)}); correct the file, or "
                "export it again"
            ) from error
        except (LookupError, ValueError) as error:  # expat reads UTF-8, UTF-16 and encodings of one byte
            raise DataError(
                f"{self._path} is in an encoding that cannot be read ({error}); convert it to UTF-8, as with "
                "`iconv -f gb18030 -t utf-8`, and change the encoding in its first line"
            ) from error
        yield from self._units
        self._units.clear()

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tu":
            self._line, self._texts = self._parser.CurrentLineNumber, {}
        elif name == "tuv":
            language = attributes.get("xml:lang") or attributes.get("lang") or ""  # TMX 1.1 has lang
            self._language = language.lower().replace("_", "-")
        elif name == "seg":
            self._segment, self._codes = [], 0
        elif name in _CODES:
            self._codes += 1

    def _end(self, name: str) -> None:
        if name == "tu" and self._texts:
            self._units.append((self._line, self._texts))
        elif name == "seg" and self._segment is not None:
            self._texts.setdefault(self._language, "".join(self._segment))
            self._segment = None
        elif name in _CODES:
            self._codes -= 1

    def _add(self, text: str) -> None:
        if self._segment is not None and not self._codes:
            self._segment.append(text)

    def _refuse(self, name: str, *_: object) -> None:
        raise DataError(
            f"{self._path}, line {self._parser.CurrentLineNumber}: the entity {name} is not one of XML's five; "
            "write its text instead"
        )
