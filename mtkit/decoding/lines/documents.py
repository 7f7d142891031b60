"""Joint translation of several lines of a document: joined by break pieces, and separated at these again."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import ne

from mtkit.data.prepared import Prepared
from mtkit.decoding.lines.segments import Segment, Source
from mtkit.text.tokenizer import BREAK, EOS, Tokenizer


@dataclass(frozen=True)
class Documents:
    """The lines that belong together, and the amount of them that is translated at once."""

    ids: Sequence[int] | Sequence[str]
    """For each line, the id of its document; a new document begins where the id changes."""
    pieces: int
    """Source pieces that joined lines may have at most, breaks counted."""

    def groups(self, source: Source, encoded: Sequence[list[int]]) -> Iterator[list[int]]:
        """The numbers of the lines to translate together: groups of at least two neighbours in a document.

        Lines without pieces, blank or split (`Source.whole`), are in no group. A group stays within the limits of the
        documents and of the model.
        """
        budget = self.pieces if source.longest is None else min(self.pieces, source.longest)
        real = (number for number, pieces in enumerate(encoded) if pieces)
        # a document ends where the id changes, be it on a blank line alone
        documents = list(accumulate(map(ne, self.ids, self.ids[1:]), initial=0))
        for _, document in groupby(real, key=lambda number: (documents[number], source.task(number))):
            group: list[int] = []
            size = 0
            for number in document:
                size += 1 + len(source.tag(number)) + len(encoded[number])
                if group and size > budget:
                    yield from _several(group)
                    group = []
                if not group:
                    size = len(encoded[number])
                group.append(number)
            yield from _several(group)


def joined(source: Source, encoded: Sequence[list[int]], group: Sequence[int]) -> Segment:
    """The lines of a group as one segment, each with its tag, separated by breaks."""
    pieces = list(encoded[group[0]])
    for number in group[1:]:
        pieces += [BREAK, *source.tag(number), *encoded[number]]
    return source.segment(group[0], pieces)


def apart(tokenizer: Tokenizer, pieces: Sequence[int], lines: int) -> list[tuple[str, tuple[int, ...]]] | None:
    """The text and the pieces, with EOS, of each line of a joint translation.

    None where the translation does not separate into as many lines, or one of them is empty.
    """
    parts: list[list[int]] = [[]]
    for piece in pieces:
        if piece == BREAK:
            parts.append([])
        elif piece != EOS:
            parts[-1].append(piece)
    found = [(tokenizer.decode(part), (*part, EOS)) for part in parts]
    return found if len(found) == lines and all(text.strip() for text, _ in found) else None


def source_budget(prepared: Prepared) -> int | None:
    """The maximum number of source pieces of joined lines; None: no lines are joined.

    Training rows keep to the budget on both sides. In translation only the source is known, so the maximum is lower
    where targets are longer on average, to keep translations about as long as in training. Of several directions the
    one with the longest targets decides.
    """
    if prepared.settings.documents is None:
        return None
    pieces: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for corpus in prepared.record["sides"]["train"]["corpora"]:
        pieces[corpus["direction"]].update(corpus["pieces"])
    ratio = min((each["source"] / each["target"] for each in pieces.values() if each["target"]), default=1.0)
    return max(1, int(prepared.settings.documents.pieces * min(1.0, ratio)))


def parted_by_blank_lines(lines: Sequence[str]) -> list[int]:
    """The document id of each line, where blank lines separate documents."""
    ids, document = [], 0
    for line in lines:
        document += not line.strip()
        ids.append(document)
    return ids


def _several(group: list[int]) -> Iterator[list[int]]:
    if len(group) > 1:
        yield group
