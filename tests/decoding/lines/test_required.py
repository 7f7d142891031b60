"""Terms are required of the search only if translations lack them without it."""

from collections.abc import Iterator, Mapping, Sequence

import pytest

from mtkit.decoding.contract import Term
from mtkit.decoding.glossary import Glossary
from mtkit.decoding.lines.required import translate_with_terms
from mtkit.decoding.lines.segments import Segment
from mtkit.decoding.translation import Translation
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.tokenizer_training import train_tokenizer

Texts = Mapping[tuple[str, ...], Sequence[str]]
"""The texts of a line's translations, by the terms that are required."""


@pytest.fixture(scope="module")
def glossary(tmp_path_factory: pytest.TempPathFactory) -> Glossary:
    folder, settings = tmp_path_factory.mktemp("tokenizer"), TokenizerSettings(vocabulary=320)
    tokenizer = train_tokenizer(folder / "joint.model", ["東京で私は本を買いました。"] * 5, settings)
    return Glossary([("Tokyo", "東京", "1"), ("book", "本", "2")], tokenizer)


def translated(
    glossary: Glossary, lines: Sequence[str], texts: Sequence[Texts]
) -> tuple[dict[int, list[str]], list[list[tuple[str, ...]]]]:
    """The translations of each line, and the terms that each pass requires of the lines."""
    names, passes = {glossary.terms("Tokyo")[0]: "東京", glossary.terms("book")[0]: "本"}, list[list[tuple[str, ...]]]()

    def translate(segments: Sequence[Segment]) -> Iterator[list[tuple[int, list[Translation]]]]:
        passes.append([tuple(names[Term(term.forms)] for term in segment.terms) for segment in segments])
        for place, (segment, terms) in reversed([*enumerate(zip(segments, passes[-1], strict=True))]):
            of_line = enumerate(texts[segment.line][terms])
            yield [(place, [Translation(text, -rank, -rank, tuple(map(ord, text))) for rank, text in of_line])]

    segments = [Segment(number, 0, [], terms=glossary.terms(line)) for number, line in enumerate(lines)]
    found = [one for batch in translate_with_terms(translate, glossary, segments) for one in batch]
    assert sorted(index for index, _ in found) == list(range(len(lines)))
    return {index: [one.text for one in translations] for index, translations in found}, passes


def test_a_translation_that_has_its_terms_stays(glossary: Glossary) -> None:
    texts = {(): ["東京で私は本を買いました。"]}
    assert translated(glossary, ["A book, Tokyo", "x"], [texts, {(): ["y"]}]) == (
        {0: texts[()], 1: ["y"]},
        [[(), ()]],
    )


def test_only_what_translations_lack_is_required(glossary: Glossary) -> None:
    one: Texts = {(): ["東京で買った。"], ("本",): ["東京で本。"]}
    two: Texts = {(): ["東京で買った。"], ("本",): ["本を。"], ("東京", "本"): ["東京の本。"]}
    found, passes = translated(glossary, ["A book, Tokyo", "Tokyo, a book"], [one, two])
    assert found == {0: ["東京で本。"], 1: ["東京の本。"]}
    assert passes == [[(), ()], [("本",), ("本",)], [("東京", "本")]]


def test_the_translations_that_lack_the_fewest_terms_are_kept(glossary: Glossary) -> None:
    texts: Texts = {(): ["本を買う。", "買う。"], ("本",): ["本を買う。", "買う。本。"]}
    assert translated(glossary, ["a book"], [texts])[0] == {0: ["本を買う。", "買う。本。"]}
    without_room: Texts = {(): ["買った"], ("本",): ["買"]}
    assert translated(glossary, ["a book"], [without_room])[0] == {0: ["買った"]}
