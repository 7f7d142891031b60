"""Windows of a long document: the lines before a window are read again, with their translations."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from mtkit.decoding.contract import Hypotheses, SourceBatch
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.lines.segments import Source
from mtkit.decoding.lines.source import Documents, SourceLines
from mtkit.decoding.translate import translate_lines
from mtkit.decoding.word_alignment import _segments
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BREAK, EOS, Tokenizers
from tests.decoding.echo import Echo
from tests.decoding.lines.test_segments_documents import documents_of, tokenizers, trained  # noqa: F401  # fixtures

LINES = [f"{'The old bird likes the small house. ' * (1 + number % 2)}".strip() for number in range(12)]


class Recorder(ModelEngine):
    """Keeps the batches that it translates."""

    batches: list[SourceBatch]

    def translate(self, batch: SourceBatch) -> Hypotheses:
        self.batches.append(batch)
        return super().translate(batch)


def recorder(model: Echo, method: str = "greedy") -> Recorder:
    engine = Recorder(model, DecodingSettings.model_validate({"method": method, "context": 2}))
    object.__setattr__(engine, "batches", [])
    return engine


@pytest.mark.parametrize("context", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("budget", [11, 17, 30, 200])
def test_windows_hold_each_line_once_and_read_again_what_is_before(
    tokenizers: Tokenizers,  # noqa: F811
    budget: int,
    context: int,
) -> None:
    source = documents_of(["a"] * 12, [1] * 8 + [2] * 4, budget, tokenizers.source)
    source._documents = Documents([1] * 8 + [2] * 4, budget, context)
    source.encoded = [[9] * 5] * 12
    windows = source.windows()
    alone = set(range(12)) - {number for window in windows for number in window.lines}
    assert sorted(number for window in windows for number in window.lines) == sorted(set(range(12)) - alone)
    for window in windows:
        numbers = [*window.context, *window.lines]
        assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
        assert numbers[0] // 8 == numbers[-1] // 8
        assert len(source.join_lines(numbers).pieces) - 1 <= budget
        assert len(window.context) == min(context, window.lines[0] % 8, budget // 2 // 6, (budget - 6) // 6)
    if not context:
        assert {window.place for window in windows} <= {0}
    for one, other in pairwise(windows):
        assert not context or other.place in (0, one.place + 1)


@pytest.mark.parametrize("method", ["greedy", "sample"])
def test_the_context_has_the_translations_that_were_found(tokenizers: Tokenizers, method: str) -> None:  # noqa: F811
    engine = recorder(Echo(tokenizers.target.size), method)
    lines = SourceLines(LINES, documents=Documents([1] * 12, 60, context=2))
    found = [best for best, *_ in translate_lines(engine, tokenizers, lines)]
    assert [best.text for best in found] == LINES
    assert not any(best.fell_back for best in found)
    joint = [batch for batch in engine.batches if len((batch.lines or [[]])[0]) > 1]
    assert len(joint) > 2
    done = 0
    for number, batch in enumerate(joint):
        (prefix,), (count,) = batch.prefixes or [()], map(len, batch.lines or [])
        before = found[max(0, done - 2) : done] if number else []
        assert list(prefix) == [piece for best in before for piece in (*best.pieces[:-1], BREAK)]
        assert all(best.together == count for best in found[done : done + count - len(before)])
        done += count - len(before)
    assert done == 12


def test_context_begins_after_a_line_that_was_translated_by_itself(tokenizers: Tokenizers) -> None:  # noqa: F811
    """A joint translation that the model's limit cuts is not used; later windows begin without its lines."""
    model = Echo(tokenizers.target.size)
    model.longest_target = 45
    engine = recorder(model)
    lines = SourceLines(LINES, documents=Documents([1] * 12, 60, context=2))
    found = [best for best, *_ in translate_lines(engine, tokenizers, lines)]
    assert [best.text for best in found] == LINES
    assert 0 < sum(best.fell_back for best in found) < 12
    for batch in engine.batches:
        for limits, prefix in zip(batch.lines or [], batch.prefixes or [()], strict=False):
            assert prefix.count(BREAK) < len(limits)


def test_lines_of_a_translation_that_lost_its_place_are_translated_by_themselves(tokenizers: Tokenizers) -> None:  # noqa: F811
    """The limit cuts the second line; the model copies by position, and would make a break where the lines end."""
    engine = recorder(Echo(tokenizers.target.size))
    object.__setattr__(engine, "settings", DecodingSettings(method="greedy", max_pieces=9))
    lines = ["A bird.", "The old bird likes the small house. " * 2, "A cat."]
    found = [
        best for best, *_ in translate_lines(engine, tokenizers, SourceLines(lines, documents=Documents([1] * 3, 90)))
    ]
    assert all(best.fell_back for best in found)
    assert [best.cut for best in found] == [False, True, False]
    assert (found[0].text, found[2].text) == (lines[0], lines[2])


def test_words_are_aligned_in_the_windows_that_were_translated(tokenizers: Tokenizers) -> None:  # noqa: F811
    engine = recorder(Echo(tokenizers.target.size))
    lines = SourceLines(LINES, documents=Documents([1] * 12, 60, context=2))
    found = [best for best, *_ in translate_lines(engine, tokenizers, lines)]
    linked = [*_segments(Source(lines, tokenizers.source, None), found)]
    assert sorted(block.line for item in linked for block in item.blocks) == [*range(12)]
    translated = {tuple(row[row != 0].tolist()) for batch in engine.batches for row in batch.source}
    assert {tuple(item.segment.pieces) for item in linked} == translated
    for item in linked:
        assert item.target[-1] == EOS
        for block in item.blocks:
            begin, size = block.target.begin, len(block.target.pieces)
            assert item.target[begin : begin + size] == list(found[block.line].pieces[:-1])


def test_a_window_costs_nothing_per_line_of_the_document(
    tokenizers: Tokenizers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The windows of a book are translated one after the other, so that would be quadratic."""
    calls: list[SourceLines] = []
    targets = SourceLines.targets

    def counted(lines: SourceLines) -> Sequence[str | None]:
        calls.append(lines)
        return targets(lines)

    monkeypatch.setattr(SourceLines, "targets", counted)
    engine = recorder(Echo(tokenizers.target.size))
    translate_lines(engine, tokenizers, SourceLines(LINES, documents=Documents([1] * 12, 60, context=2)))
    assert len(engine.batches) > 2
    assert len(calls) == 1
