"""Source segments: tags of directions before them, and as long as the model takes."""

from pathlib import Path

import pytest

from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.forced import force_lines
from mtkit.decoding.lines.segments import Source
from mtkit.decoding.lines.source import Directions, SourceLines
from mtkit.decoding.translate import translate_lines
from mtkit.errors import MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.tokenizer import EOS, Tokenizers
from tests.decoding.echo import Echo
from tests.decoding.trained import LONGEST, make_run, sentences

NAMES = ["en-de", "en-fr"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two directions, whose encoder is conditioned on them."""
    return make_run(tmp_path_factory.mktemp("run"), directions=("en-de", "en-fr"), attention="camtl").run


@pytest.fixture(scope="module")
def tokenizers(run: Run) -> Tokenizers:
    return run.tokenizers


def test_a_direction_must_be_chosen_among_several() -> None:
    assert Directions.alike(NAMES, "en-fr", 3).tasks == [1, 1, 1]
    assert Directions.alike(["en-de"], None, 2).names_of_lines() == ["en-de"] * 2
    with pytest.raises(MtkitError, match="--direction: en-de, en-fr"):
        Directions.alike(NAMES, None, 1)
    with pytest.raises(MtkitError, match="did you mean 'en-fr'"):
        Directions.alike(NAMES, "en-fi", 1)
    with pytest.raises(MtkitError, match="it supports: en-de"):
        Directions.alike(["en-de"], "de-en", 1)


def test_directions_of_other_data_are_found_by_name() -> None:
    there = Directions(["en-fr", "en-es", "en-de"], [2, 0, 0])
    assert there.among(NAMES).tasks == [0, 1, 1]
    assert Directions(["fr-en"], [0]).among(["en-de"]).names == ["en-de"]  # nobody has said which language it is
    with pytest.raises(MtkitError, match="direction en-es, and the run supports: en-de, en-fr"):
        Directions(there.names, [1]).among(NAMES)
    with pytest.raises(MtkitError, match="en-fr"):
        there.among(["en-de"])


def test_the_tag_comes_first_and_the_task_beside(tokenizers: Tokenizers) -> None:
    model = Echo(tokenizers.target.size, tags=1)
    lines = ["The dog.", "", "A cat.", "The dog."]
    directions = Directions(NAMES, [0, 0, 1, 1])
    found = translate_lines(
        ModelEngine(model, DecodingSettings()), tokenizers, SourceLines(lines, directions=directions)
    )
    assert [each[0].text for each in found] == lines
    tags = [tokenizers.source.tag(name) for name in NAMES]
    dog, cat = (tokenizers.source.encode(line) for line in ("The dog.", "A cat."))
    assert sorted(model.seen) == sorted(
        [([tags[0], *dog, EOS], 0), ([tags[1], *cat, EOS], 1), ([tags[1], *dog, EOS], 1)]
    )


def test_one_direction_of_which_the_tokenizer_has_no_tag_needs_none(tokenizers: Tokenizers) -> None:
    model = Echo(tokenizers.target.size)
    for directions in (None, Directions(["en-it"], [0])):
        translate_lines(
            ModelEngine(model, DecodingSettings()), tokenizers, SourceLines(["A cat."], directions=directions)
        )
    assert model.seen == [([*tokenizers.source.encode("A cat."), EOS], None)] * 2


def test_tag_and_end_fit_the_model(tokenizers: Tokenizers) -> None:
    for directions, room in ((None, 11), (Directions(NAMES, [1, 1]), 10)):
        lines = ["The old dog sees a small house near the tree, and one bird. " * 3, ""]
        source = Source(SourceLines(lines, directions), tokenizers.source, 12)
        assert source.longest == room
        assert len(source.segment(0, [9] * 30).pieces) == 12
        parts = list(source.segments(range(2)))
        assert len(parts) > 1
        assert [segment.part for segment in parts] == list(range(len(parts)))
        assert max(len(segment.pieces) for segment in parts) <= 12


def test_directions_change_what_a_trained_model_gives_and_scores(run: Run) -> None:
    model, lines = run.load_model(), sentences(8, seed=6)
    ways = [Directions(run.directions, [task] * 8) for task in (0, 1)]
    mixed = Directions(run.directions, [0, 1] * 4)
    german, french, both = (
        translate_lines(ModelEngine(model, DecodingSettings()), run.tokenizers, SourceLines(lines, directions=each))
        for each in (*ways, mixed)
    )
    assert german != french
    for number, (best, *_) in enumerate(both):
        assert best.pieces == (german, french)[number % 2][number][0].pieces
    engine = ModelEngine(model, DecodingSettings(batch_tokens=200))
    forced, other = (
        [line.log_prob for line in force_lines(engine, run.tokenizers, SourceLines(lines, each), sentences(8, 7))]
        for each in (mixed, ways[0])
    )
    assert forced[::2] == pytest.approx(other[::2], abs=1e-4)
    assert all(abs(a - b) > 1e-3 for a, b in zip(forced[1::2], other[1::2], strict=True))


def test_the_longest_source_leaves_room(run: Run, tmp_path: Path) -> None:
    found = translate_lines(
        ModelEngine(run.load_model(), DecodingSettings(method="greedy")),
        run.tokenizers,
        SourceLines(["The house near the tree. " * 20], directions=Directions(run.directions, [1])),
    )
    assert found[0][0].parts > 20 * 6 // LONGEST


@pytest.mark.parametrize(("direction", "space"), [("en-zh", ""), ("en-ja-JP", ""), ("zh-it", " "), (None, " ")])
def test_parts_are_joined_as_the_target_language_is_written(
    tokenizers: Tokenizers, direction: str | None, space: str
) -> None:
    sentences = ["The old dog sees a house.", "A bird likes the tree."]
    directions = None if direction is None else Directions([direction], [0])
    model = Echo(tokenizers.target.size, longest=max(len(tokenizers.source.encode(each)) for each in sentences) + 1)
    settings = DecodingSettings(method="greedy")
    ((found,),) = translate_lines(
        ModelEngine(model, settings), tokenizers, SourceLines([" ".join(sentences)], directions=directions)
    )
    assert found.parts == 2
    assert found.text == space.join(sentences)


def test_each_line_has_its_own_target_language() -> None:
    assert Directions(["en-de", "en-zh"], [1, 0, 1]).targets_of_lines() == ["zh", "de", "zh"]
