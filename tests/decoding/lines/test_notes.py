"""Notes on lines: gathered chunk by chunk, kept as JSON, said in a few words."""

import json
from dataclasses import replace

import pytest

from mtkit.decoding.lines.notes import Listed, Notes
from mtkit.decoding.translation import Translation

PLAIN = Translation("a", -1.0, -1.0, (5, 3))
LINES = [
    [PLAIN],
    [replace(PLAIN, parts=2, cut=True), replace(PLAIN, cut=True)],
    [replace(PLAIN, score=float("-inf"))],
    [replace(PLAIN, together=3)],
    [replace(PLAIN, together=2, fell_back=True)],
] * 12


def test_the_notes_on_all_are_those_on_each_part() -> None:
    whole = Notes.of(LINES)
    assert whole.in_parts == whole.cut == Listed(12, tuple(range(2, 52, 5)))
    assert whole.joined.count == 24
    for border in (0, 7, 60):
        assert Notes.of(LINES[:border]) + Notes.of(LINES[border:], first=border) == whole


def test_they_come_back_from_json() -> None:
    whole = Notes.of(LINES)
    assert Notes.restored(json.loads(json.dumps(whole.state()))) == whole
    for damaged in (None, [], [[1, [1]]] * 5, [[1, None]] * 6, [["x", []]] * 6):
        with pytest.raises((TypeError, ValueError)):
            Notes.restored(damaged)


def test_only_what_is_unusual_is_said() -> None:
    assert list(Notes.of([[PLAIN]] * 9).messages()) == []
    in_parts, cut, failed, fell_back = Notes.of(LINES).messages()
    assert in_parts.startswith("12 lines were split at sentence ends")
    assert in_parts.endswith(": lines 2, 7, 12, 17, 22, 27, 32, 37, 42, 47 and 2 more")
    assert "may be incomplete" in cut
    assert "no finite probabilities" in failed
    assert fell_back.startswith("of 24 lines that were joined with others of their document, 12 were translated one by")


def test_lines_with_invisible_characters_are_counted() -> None:
    (cleaned,) = Notes.of([[PLAIN], [replace(PLAIN, cleaned=True)], [replace(PLAIN, cleaned=True)]], first=4).messages()
    assert cleaned.startswith("control or invisible characters of 2 source lines")
    assert cleaned.endswith(": lines 6, 7")
