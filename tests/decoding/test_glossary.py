"""Glossaries: reading, matching of source terms, spellings of target terms, counts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.glossary import Glossary, _occurrences, tokens
from mtkit.decoding.lines.source import SourceLines
from mtkit.decoding.translate import translate_lines
from mtkit.errors import DataError, MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.tokenizer import Tokenizer, Tokenizers
from mtkit.text.tokenizer_training import train_tokenizer
from tests.decoding.tiny import TinyModel

TEXT = [
    "Das Haus steht in der Neustadt, und das Hausboot liegt am Fluss.",
    "New York, the New York Times (Zeitung) and C++ by Anna.",
    "我住在东京都。东京很大。",
    "東京タワーはどこですか。東京です。",
    "NATO und die Häuser der Stadt",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    settings = TokenizerSettings(vocabulary=480)
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "joint.model", TEXT * 5, settings)


def glossary(tokenizer: Tokenizer, *pairs: tuple[str, str]) -> Glossary:
    return Glossary([(*pair, f"entry {number}") for number, pair in enumerate(pairs, start=1)], tokenizer)


def required(terms: Glossary, tokenizer: Tokenizer, text: str) -> list[tuple[set[str], int]]:
    """The spellings and the number of each term in a source text."""
    return [({tokenizer.decode(form) for form in term.forms}, term.count) for term in terms.terms(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("The houses, a houseboat", []),
        ("The house.", [({"Haus"}, 1)]),
        ("House and house-boat (house)", [({"Haus"}, 3)]),
        ("HOUSE", [({"Haus", "HAUS"}, 1)]),
        ("dog DOG", [({"hund", "Hund", "HUND"}, 2)]),
        ("X house", [({"ix", "Ix"}, 1), ({"Haus"}, 1)]),
        ("us US Us", [({"uns", "Uns"}, 2), ({"USA"}, 1)]),
        ("new york", []),
        ("York, New  York", [({"York"}, 1), ({"Neu-York"}, 1)]),
        ("I saw the New York Times in New York", [({"NYT"}, 1), ({"Neu-York"}, 1)]),
        ("我在东京都。", [({"Tokio"}, 1)]),
        ("ｈｏｕｓｅ", [({"Haus"}, 1)]),
    ],
)
def test_terms_match_whole_words_in_their_cases(
    tokenizer: Tokenizer, text: str, expected: list[tuple[set[str], int]]
) -> None:
    pairs = {"house": "Haus", "dog": "hund", "us": "uns", "US": "USA", "York": "York", "New York": "Neu-York"}
    pairs |= {"x": "ix", "New York Times": "NYT", "东京": "Tokio"}
    assert required(glossary(tokenizer, *pairs.items()), tokenizer, text) == expected


@pytest.mark.parametrize(
    ("term", "text", "expected"),
    [
        ("ភាសា", "ភាសា\u200bខ្មែរ", (1, 1)),
        ("東京", "東\u2060京だ", (1, 1)),
        ("Hausboot", "Ein Haus\u00adboot", (1, 1)),
        ("Haus", "Ein Haus\u00adboot", (0, 0)),
        ("Häuser\u200b", "\u200eHäuser\u200e", (1, 1)),
    ],
)
def test_invisible_characters_neither_hide_nor_cut_words(
    tokenizer: Tokenizer, term: str, text: str, expected: tuple[int, int]
) -> None:
    terms = glossary(tokenizer, (term, "New York"))
    assert terms.count(text, "York") == expected
    assert terms.count(text, "New\u200b Yo\u00adrk") == (expected[0], 0)


def test_terms_with_one_target_are_required_once_each(tokenizer: Tokenizer) -> None:
    terms = glossary(tokenizer, ("car", "Auto"), ("automobile", "Auto"))
    assert required(terms, tokenizer, "A car is an automobile.") == [({"Auto"}, 2)]
    assert terms.count("A car is an automobile.", "Ein Auto ist ein Wagen.") == (2, 1)


@pytest.mark.parametrize(
    ("target", "missed"),
    [("Das Haus.", 0), ("Das „Haus“", 0), ("Hausboot", 1), ("haus", 1), ("", 1), ("Ein Haus, zwei Haus", 0)],
)
def test_a_term_counts_as_a_whole_word(tokenizer: Tokenizer, target: str, missed: int) -> None:
    assert glossary(tokenizer, ("house", "Haus")).count("A house", target) == (1, missed)


@pytest.mark.parametrize("term", ["Haus", "New York", "东京", "東京タワー", "C++", "Ω🙂", "{name}"])
def test_spellings_are_pieces_at_a_word_start_and_within_text(tokenizer: Tokenizer, term: str) -> None:
    (found,) = glossary(tokenizer, ("x", term)).terms("x")
    text = tokenizer.decode([*tokenizer.encode("在"), *found.forms[-1], *tokenizer.encode("。")[-1:]])
    assert {tokenizer.decode(form) for form in found.forms} >= {term}
    assert any(tokenizer.piece(form[0]).startswith("\u2581") for form in found.forms)
    assert any(not tokenizer.piece(form[0]).startswith("\u2581") for form in found.forms)
    assert term.lower() in text.lower()


@pytest.mark.parametrize("term", ["Haus", "东京", "東京タワー", "New York", "C++"])
def test_a_search_of_any_model_writes_the_terms(tokenizer: Tokenizer, term: str) -> None:
    terms = glossary(tokenizer, ("term", term), ("Anna", "Anna"))
    lines = ["A term and Anna", "term term", "Neustadt", "", "Anna."]
    engine = ModelEngine(TinyModel(tokenizer.size, sharpness=1.0), DecodingSettings(beam=3, n_best=2))
    found = translate_lines(engine, Tokenizers(tokenizer, tokenizer), SourceLines(lines, glossary=terms))
    assert [(line[0].terms, line[0].missed) for line in found] == [(2, 0), (2, 0), (0, 0), (0, 0), (1, 0)]
    for line, (best, second) in zip(lines, found, strict=True):
        for translation in (best, second):
            spelt = " ".join(tokens(translation.text)).lower()
            assert spelt.count(" ".join(tokens(term)).lower()) >= line.count("term")
    plain = translate_lines(engine, Tokenizers(tokenizer, tokenizer), lines)
    for one, other in zip(found[2], plain[2], strict=True):  # lines without terms stay as they are
        # a product of more rows may differ in the last bit
        assert replace(one, log_prob=0.0, score=0.0) == replace(other, log_prob=0.0, score=0.0)
        assert (one.log_prob, one.score) == pytest.approx((other.log_prob, other.score), rel=1e-6)


def test_a_term_that_does_not_fit_is_missed(tokenizer: Tokenizer) -> None:
    terms = glossary(tokenizer, ("a", "Hausboot Neustadt Zeitung"), ("b", "York"))
    engine = ModelEngine(TinyModel(tokenizer.size), DecodingSettings(beam=2, max_pieces=4))
    ((best,),) = translate_lines(engine, Tokenizers(tokenizer, tokenizer), SourceLines(["a b"], glossary=terms))
    assert (best.terms, best.missed) == (2, 1)
    assert "York" in best.text


def test_minimum_bayes_risk_prefers_translations_with_the_terms(tokenizer: Tokenizer) -> None:
    terms, model = glossary(tokenizer, ("a", "Haus"), ("b", "York")), TinyModel(tokenizer.size)
    lines = SourceLines(["a b", "b a a", "a", "b b a"], glossary=terms)
    for settings in (DecodingSettings(beam=6, n_best=n_best, max_pieces=6, mbr="chrf") for n_best in (1, 6)):
        found = translate_lines(ModelEngine(model, settings), Tokenizers(tokenizer, tokenizer), lines)
        missed = [[translation.missed for translation in translations] for translations in found]
        assert [row[0] for row in missed] == [0] * 4
        assert missed == [sorted(row) for row in missed]


def test_joined_parts_with_the_fewest_missed_terms_come_first(tokenizer: Tokenizer) -> None:
    terms, model = glossary(tokenizer, ("a", "Haus"), ("b", "York")), TinyModel(tokenizer.size)
    model.longest_source = 8
    engine = ModelEngine(model, DecodingSettings(beam=6, n_best=6, max_pieces=4))
    lines = SourceLines(["a b. b a. a b."], glossary=terms)
    (found,) = translate_lines(engine, Tokenizers(tokenizer, tokenizer), lines)
    assert {translation.parts for translation in found} == {2}
    order = [(translation.missed, -translation.score) for translation in found]
    assert order == sorted(order)
    assert len({missed for missed, _ in order}) > 1


@pytest.mark.parametrize("method", ["greedy", "sample"])
def test_other_searches_are_refused(tokenizer: Tokenizer, method: str) -> None:
    engine = ModelEngine(TinyModel(tokenizer.size), DecodingSettings.model_validate({"method": method}))
    with pytest.raises(MtkitError, match=f"a glossary needs beam search, and decoding.method = {method}"):
        translate_lines(engine, Tokenizers(tokenizer, tokenizer), SourceLines(["a"], glossary=glossary(tokenizer)))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("a\tb\tc\n", "line 1: 3 columns"),
        ("# x\n\n\tb\n", "line 3: the source term is empty"),
        ("a\t \n", "line 1: the target term is empty"),
        ("a\tb\nc\td\na\te\n", "line 3: the term 'a' has another translation in .*, line 1"),
        ("a\tb\n\xff", "not UTF-8"),
    ],
)
def test_bad_lines_are_errors_with_file_and_line(
    tokenizer: Tokenizer, tmp_path: Path, content: str, error: str
) -> None:
    path = tmp_path / "terms.tsv"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=f"terms.tsv.*{error}"):
        Glossary.read(path, tokenizer)


def test_files_have_comments_repeats_and_terms_that_stay(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "terms.tsv"
    path.write_bytes(b"\xef\xbb\xbf# a comment\r\nhouse\tHaus\r\n\nAnna\nhouse\tHaus")
    terms = Glossary.read(path, tokenizer)
    assert terms.size == 2
    assert required(terms, tokenizer, "Anna's house") == [({"Anna"}, 1), ({"Haus"}, 1)]
    (tmp_path / "empty.tsv").write_text("")
    assert Glossary.read(tmp_path / "empty.tsv", tokenizer).terms("house") == ()


def test_a_target_that_the_vocabulary_cannot_spell_is_refused(tmp_path: Path) -> None:
    settings = TokenizerSettings(vocabulary=200, byte_fallback=False)
    small = train_tokenizer(tmp_path / "joint.model", TEXT * 5, settings)
    with pytest.raises(DataError, match="entry 1: the model's vocabulary cannot spell 'Ω'; remove the line"):
        glossary(small, ("omega", "Ω"))


def test_letters_and_digits_continue_words_except_in_scripts_without_spaces(tokenizer: Tokenizer) -> None:
    batch = glossary(tokenizer).of_batch([], torch.device("cpu"))
    first = {tokenizer.piece(piece)[0] for piece in batch.starts_inside.nonzero().flatten().tolist()}
    assert {"a", "H"} <= first
    assert not {"\u2581", ",", "。", "东", "京", "+"} & first


def test_occurrences_of_a_term_do_not_overlap() -> None:
    assert [_occurrences(["la"] * size, ["la", "la"]) for size in range(6)] == [0, 0, 1, 1, 2, 2]
