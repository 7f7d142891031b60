"""Lines of a document, translated together: N in, N out, whatever the model makes of the breaks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from mtkit.data.lengths import PERCENTILES, Bin, Lengths
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.held_out import held_out
from mtkit.decoding.lines.joined import separate_lines
from mtkit.decoding.lines.segments import Segment, Source, split_lines
from mtkit.decoding.lines.source import Directions, Documents, SourceLines, TrainedOn, ids_by_blank_lines, source_budget
from mtkit.decoding.translate import translate_lines
from mtkit.decoding.translation import Translation
from mtkit.decoding.word_alignment import _segments
from mtkit.errors import MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BREAK, EOS, Tokenizer, Tokenizers
from tests.decoding.echo import Echo
from tests.decoding.trained import Trained, make_run, sentences

LINES = ["The dog sees a cat.", "A bird likes the tree.", "", "One house.", "The small river.", "Old friend.", " "]
GREEDY = DecodingSettings(method="greedy")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("run"), directions=("en-de", "en-fr"), documents=20)


@pytest.fixture(scope="module")
def tokenizers(trained: Trained) -> Tokenizers:
    return trained.run.tokenizers


def translated(model: Echo, tokenizers: Tokenizers, lines: list[str], documents: Documents) -> list[Translation]:
    seen: list[int] = []
    found = translate_lines(
        ModelEngine(model, GREEDY), tokenizers, SourceLines(lines, documents=documents), on_progress=seen.append
    )
    assert sum(seen) == len(lines)
    return [best for best, *_ in found]


def documents_of(
    lines: list[str],
    ids: Sequence[int] | str,
    budget: int,
    tokenizer: Tokenizer,
    directions: Directions | None = None,
    *,
    longest: int | None = None,
) -> Source:
    return Source(SourceLines(lines, directions, Documents(ids, budget)), tokenizer, longest)


def test_blank_lines_part_documents() -> None:
    assert ids_by_blank_lines(LINES) == [0, 0, 1, 1, 1, 1, 2]
    assert ids_by_blank_lines(["a", "\u200b", "b", "\ufeff", "c"]) == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("budget", "longest", "groups"),
    [
        (100, None, [[0, 1], [3, 4, 5]]),
        (11, None, [[0, 1], [3, 4]]),
        (10, None, []),
        (100, 12, [[0, 1], [3, 4]]),
        (1, None, []),
    ],
)
def test_neighbours_are_joined_up_to_the_budget(
    tokenizers: Tokenizers, budget: int, longest: int | None, groups: list[list[int]]
) -> None:
    """Five pieces a line, a break between each two, and the end where the model's length counts."""
    source = documents_of(LINES, ids_by_blank_lines(LINES), budget, tokenizers.source, longest=longest)
    source.encoded = [[9] * 5 if line.strip() else [] for line in LINES]
    assert [window.lines for window in source.windows()] == groups
    for group in groups:
        segment = source.join_lines(group)
        assert segment.pieces.count(BREAK) == len(group) - 1
        assert len(segment.pieces) == 6 * len(group)
        assert segment.line == group[0]


def test_other_documents_and_other_directions_are_not_joined(tokenizers: Tokenizers) -> None:
    directions = Directions(["en-de", "en-fr"], [0, 0, 0, 1, 1, 1])
    source = documents_of(["a"] * 6, "aabbbc", 99, tokenizers.source, directions)
    source.encoded = [[9]] * 6
    assert [window.lines for window in source.windows()] == [[0, 1], [3, 4]]
    source = documents_of(["a"] * 6, "abaabb", 99, tokenizers.source)
    source.encoded = [[9], [], [9], [9], [9], [9]]
    assert [window.lines for window in source.windows()] == [[2, 3], [4, 5]]


def test_each_line_of_a_group_has_its_tag_as_it_has_alone(trained: Trained) -> None:
    tokenizer = trained.run.tokenizers.source
    directions = Directions(trained.run.directions, [1] * 6)
    source = documents_of(["a"] * 6, [1] * 6, 99, tokenizer, directions, longest=14)
    source.encoded = [[9] * 5] * 6
    tag = tokenizer.tag(trained.run.directions[1])
    assert source.join_lines([0, 1]).pieces == [tag, *[9] * 5, BREAK, tag, *[9] * 5, EOS]
    # 14 pieces hold two lines, their tags, the break and the end
    for longest, groups in ((14, [[0, 1], [2, 3], [4, 5]]), (13, [])):
        source = documents_of(["a"] * 6, [1] * 6, 99, tokenizer, directions, longest=longest)
        source.encoded = [[9] * 5] * 6
        assert [window.lines for window in source.windows()] == groups


def test_a_line_of_more_sentences_than_usual_is_translated_in_parts_and_not_with_others(tokenizers: Tokenizers) -> None:
    pairs = Bin(longest=40, pairs=500, mean=1.0, spread=0.0, most=1.0)
    known = Lengths(bins=(pairs,), percentiles=dict.fromkeys(PERCENTILES, 99), sentences={1: 100})
    lines = ["The dog sees.", "The house. A bird. The old tree.", "A green bird."]
    found = translate_lines(
        ModelEngine(Echo(tokenizers.target.size), GREEDY),
        tokenizers,
        SourceLines(lines, documents=Documents([1] * 3, 99), trained_on=TrainedOn([[known]])),
    )
    assert [(best.text, best.parts, best.together) for best, *_ in found] == [
        (lines[0], 1, 2),
        (lines[1], 3, 1),
        (lines[2], 1, 2),
    ]


def test_as_many_lines_come_out_as_went_in(tokenizers: Tokenizers) -> None:
    model = Echo(tokenizers.target.size)
    found = translated(model, tokenizers, LINES, Documents(ids_by_blank_lines(LINES), 100))
    assert [each.text for each in found] == [line.strip() for line in LINES]
    assert [each.together for each in found] == [2, 2, 1, 3, 3, 3, 1]
    assert not any(each.fell_back for each in found)
    assert len(model.seen) == 2  # both documents, and no line alone
    assert found[2].parts == found[6].parts == 0


def test_what_does_not_come_apart_is_translated_in_halves(tokenizers: Tokenizers) -> None:
    stubborn = set(tokenizers.source.encode("house")) - set(tokenizers.source.encode("The dog sees a cat. A bird."))
    model = Echo(tokenizers.target.size, stubborn=stubborn)
    found = translated(model, tokenizers, LINES, Documents(ids_by_blank_lines(LINES), 100))
    assert [each.text for each in found] == [line.strip() for line in LINES]
    assert [each.fell_back for each in found] == [False, False, False, True, False, False, False]
    assert [each.together for each in found] == [2, 2, 1, 3, 2, 2, 1]
    assert len(model.seen) == 2 + 1 + 1  # both documents, the last two lines, and the line that has the word
    lines = [f"{line} {other}" for line, other in zip(LINES[:2] * 4, "abcdefgh", strict=True)]
    for wrong in range(8):
        texts = [*lines[:wrong], "The house.", *lines[wrong + 1 :]]
        found = translated(Echo(tokenizers.target.size, stubborn=stubborn), tokenizers, texts, Documents([1] * 8, 200))
        assert [each.text for each in found] == texts
        assert [number for number, each in enumerate(found) if each.fell_back] == sorted((wrong, wrong ^ 1))
        assert sorted(each.together for each in found) == [2, 2, 2, 2, 4, 4, 4, 4]


def test_context_goes_on_after_a_window_that_did_not_come_apart(tokenizers: Tokenizers) -> None:
    """The line after it has no context, and is the context of the next one."""
    line, odd = "The dog sees a cat.", "The dog sees a house."
    stubborn = set(tokenizers.source.encode("house")) - set(tokenizers.source.encode(line))
    size = max(len(tokenizers.source.encode(text)) for text in (line, odd)) + 1
    for lines in ([odd, *[line] * 6], [odd, line, line, *["A cat."] * 2]):
        model = Echo(tokenizers.target.size, stubborn=stubborn)
        settings = DecodingSettings.model_validate({"method": "greedy", "context": 1})
        source = SourceLines(lines, documents=Documents([1] * len(lines), 2 * size, context=1))
        found = [best for best, *_ in translate_lines(ModelEngine(model, settings), tokenizers, source)]
        assert [each.text for each in found] == lines
        assert [each.fell_back for each in found] == [True, True, *[False] * (len(lines) - 2)]
        assert [each.together > 1 for each in found] == [True, True, False, *[True] * (len(lines) - 3)]
        linked = [
            block.line for each in _segments(Source(source, tokenizers.source, None), found) for block in each.blocks
        ]
        assert sorted(linked) == [*range(len(lines))]


def test_a_line_too_long_for_the_model_is_cut_as_ever(tokenizers: Tokenizers) -> None:
    lines = ["The dog.", "The old dog sees a cat, and one bird finds the tree. " * 3, "A cat."]
    found = translated(Echo(tokenizers.target.size, longest=24), tokenizers, lines, Documents([1, 1, 1], 100))
    assert [each.text for each in found] == [line.strip() for line in lines]
    assert found[1].parts > 1


def test_a_translation_comes_apart_at_its_breaks(tokenizers: Tokenizers) -> None:
    first, second = (tokenizers.target.encode(line) for line in LINES[:2])
    assert split_lines(tokenizers.target, [*first, BREAK, *second, 3], 2) == [
        (LINES[0], (*first, 3)),
        (LINES[1], (*second, 3)),
    ]
    assert split_lines(tokenizers.target, [*first, BREAK, *second, 3], 3) is None
    assert split_lines(tokenizers.target, [*first, BREAK, 3], 2) is None  # an empty line is not a translation
    assert split_lines(tokenizers.target, [*first, 3], 2) is None


@pytest.mark.parametrize("doubt", [{"cut": True}, {"astray": True}, {"score": -math.inf}])
def test_a_doubtful_joint_translation_is_rejected(tokenizers: Tokenizers, doubt: dict[str, Any]) -> None:
    first, second = (tokenizers.target.encode(line) for line in LINES[:2])
    segment = Segment(0, 0, [*first, BREAK, *second, EOS])
    joint = Translation("", -2.0, -2.0, (*first, BREAK, *second, EOS))
    separate = partial(separate_lines, tokenizers.target, TrainedOn(), None, segment)
    assert [line.text for line in separate(joint)] == LINES[:2]
    assert separate(replace(joint, **doubt)) == []


def test_a_trained_model_gives_every_line_something(trained: Trained) -> None:
    lines = sentences(30, seed=8)
    model = trained.run.load_model()
    ways = Directions(trained.run.directions, [number % 2 for number in range(30)])
    for method in ("greedy", "beam", "sample"):
        settings = DecodingSettings.model_validate({"method": method})
        found = translate_lines(
            ModelEngine(model, settings),
            trained.run.tokenizers,
            SourceLines(lines, directions=ways, documents=Documents([1] * 30, 20)),
        )
        assert len(found) == 30
        assert all("\n" not in best.text for best, *_ in found)


def test_longer_targets_leave_less_room(trained: Trained) -> None:
    prepared = trained.prepared

    def corpus(direction: str, source: int, target: int) -> dict[str, Any]:
        return {"direction": direction, "pieces": {"source": source, "target": target}}

    one = corpus("en-de", 60, 100)
    for corpora, budget in (
        ([corpus("en-de", 100, 100)], 20),
        ([corpus("en-de", 100, 50)], 20),
        ([corpus("en-de", 100, 125)], 16),
        ([one, corpus("en-de", 40, 25)], 16),
        ([one, corpus("de-en", 100, 60)], 12),  # the one with longer targets needs it
        ([corpus("en-de", 0, 0)], 20),
    ):
        assert source_budget(replace(prepared, record={"sides": {"train": {"corpora": corpora}}})) == budget
    alone = prepared.settings.model_copy(update={"documents": None})
    assert source_budget(replace(prepared, settings=alone)) is None


def test_several_translations_are_refused(tokenizers: Tokenizers) -> None:
    settings = DecodingSettings(beam=2, n_best=2)
    with pytest.raises(MtkitError, match="--sentences"):
        translate_lines(
            ModelEngine(Echo(tokenizers.target.size), settings),
            tokenizers,
            SourceLines(["a"], documents=Documents([1], 9)),
        )


def test_validation_and_translation_join_the_same_lines(trained: Trained) -> None:
    side = held_out(trained.prepared, "valid")
    assert side.documents is not None
    assert list(side.documents.ids) == trained.prepared.valid.documents.tolist()  # type: ignore[union-attr]
    assert side.documents.pieces == source_budget(trained.prepared)
    assert side.lines(GREEDY).documents == side.documents
    assert side.lines(DecodingSettings(beam=2, n_best=2)).documents is None
    assert side.lines(GREEDY, joined=False).documents is None
    part = side.sample(3)
    assert part.documents is not None
    assert list(part.documents.ids) == [side.documents.ids[0], side.documents.ids[1], side.documents.ids[7]]
