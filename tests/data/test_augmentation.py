"""Training rows in capitals and with typing errors: the share, the text, and reproducible draws."""

import random
from dataclasses import replace
from difflib import SequenceMatcher

import numpy as np
import pytest

from mtkit.data.augmentation import Augmentation, in_capitals, with_typos
from mtkit.data.columns import Tokens
from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, Side, open_prepared
from mtkit.recipe.data import DataSettings


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    prepare(
        DataSettings.model_validate(
            {"folder": folder, "builtin": {"train": 200, "valid": 8, "test": 8}, "tokenizer": {"vocabulary": 400}}
        )
    )
    return open_prepared(folder)


def augmented(
    prepared: Prepared, *, epoch: int = 0, rows: np.ndarray | None = None, copy: int = 0, **how: float
) -> Side:
    settings = {"capitals": 0.0, "typos": 0.0, "longest": 1024, "seed": 1, **how}
    rows = np.arange(len(prepared.train)) if rows is None else rows
    copies = np.full(len(rows), copy)
    return Augmentation(prepared.tokenizers, **settings).of(prepared.train, rows, copies, epoch=epoch)  # type: ignore[arg-type]


def texts(prepared: Prepared, side: Side) -> list[tuple[str, str]]:
    tokenizers = prepared.tokenizers
    return [
        (tokenizers.source.decode(side.source[row].tolist()), tokenizers.target.decode(side.target[row].tolist()))
        for row in range(len(side))
    ]


def test_a_share_of_the_pairs_is_in_capitals_and_the_others_stay(prepared: Prepared) -> None:
    plain, drawn = texts(prepared, prepared.train), texts(prepared, augmented(prepared, capitals=0.3))
    capital = [(source.upper(), target.upper()) for source, target in plain]
    changed = [one != other for one, other in zip(drawn, plain, strict=True)]
    assert all(one in both for one, *both in zip(drawn, plain, capital, strict=True))
    assert abs(np.mean(changed) - 0.3) < 4 * (0.3 * 0.7 / len(plain)) ** 0.5
    assert texts(prepared, augmented(prepared, capitals=1.0)) == capital


def test_the_capital_of_i_has_a_dot_in_turkish(prepared: Prepared) -> None:
    for language, capitals in (("tr", "KIZ İÇİN"), ("az-Latn", "KIZ İÇİN"), ("de", "KIZ IÇIN")):
        assert in_capitals("kız için", language) == capitals
    for directions, tasks in ((["tr-az"], None), (["en-de", "tr-az"], np.ones(len(prepared.train), np.int16))):
        train = replace(prepared.train, directions=directions, tasks=tasks)
        drawn = texts(prepared, augmented(replace(prepared, train=train), capitals=1.0))
        plain = texts(prepared, prepared.train)
        assert drawn == [(in_capitals(source, "tr"), in_capitals(target, "az")) for source, target in plain]
        assert all("İ" in source for (source, _), (small, _) in zip(drawn, plain, strict=True) if "i" in small)


def test_only_sources_get_typing_errors(prepared: Prepared) -> None:
    plain, drawn = texts(prepared, prepared.train), texts(prepared, augmented(prepared, typos=1.0))
    assert [target for _, target in plain] == [target for _, target in drawn]
    changed = [one for (one, _), (other, _) in zip(drawn, plain, strict=True) if one != other]
    assert len(changed) > 0.7 * len(plain)  # an error may leave the word as it was
    both = [source for source, _ in texts(prepared, augmented(prepared, capitals=1.0, typos=1.0))]
    assert both == [source.upper() for source, _ in drawn]


def test_draws_depend_on_the_row_the_copy_the_epoch_and_the_seed_only(prepared: Prepared) -> None:
    how = {"capitals": 0.4, "typos": 0.4}
    whole = texts(prepared, augmented(prepared, **how))
    some = np.array([7, 3, 90, 4])
    assert texts(prepared, augmented(prepared, rows=some, **how)) == [whole[row] for row in some]
    for other in ({"epoch": 1}, {"copy": 1}, {"seed": 2}):
        assert texts(prepared, augmented(prepared, **how, **other)) != whole  # type: ignore[arg-type]


def test_a_pair_that_would_be_too_long_stays(prepared: Prepared) -> None:
    longest = int(max(prepared.train.source.lengths.max(), prepared.train.target.lengths.max())) + 1
    side = augmented(prepared, capitals=1.0, longest=longest)
    plain, drawn = texts(prepared, prepared.train), texts(prepared, side)
    assert max(side.source.lengths.max(), side.target.lengths.max()) < longest
    stayed = [one for one, other in zip(drawn, plain, strict=True) if one == other]
    assert 0 < len(stayed) < len(plain)  # capitals have more pieces than any text here


def test_tags_and_breaks_stay(prepared: Prepared) -> None:
    mark = next(piece for piece in range(3, 20) if prepared.tokenizers.source.processor.is_control(piece))
    first, second = prepared.train.source[0].tolist(), prepared.train.source[1].tolist()
    row = [mark, *first, mark, *second]
    source = Tokens(np.array([*row, 0], dtype=np.int32), np.array([0]), np.array([len(row)]))
    target = Tokens(np.array([*first, 0], dtype=np.int32), np.array([0]), np.array([len(first)]))
    side = replace(prepared.train, source=source, target=target, lines=np.array([1]), tasks=None, corpora=None)
    how = {"capitals": 1.0, "typos": 0.0, "longest": 1024, "seed": 1}
    zero = np.zeros(1, dtype=np.int64)
    drawn = Augmentation(prepared.tokenizers, **how).of(side, zero, zero, epoch=0).source[0].tolist()  # type: ignore[arg-type]
    encode, decode = prepared.tokenizers.source.encode_lines, prepared.tokenizers.source.decode
    capitals = encode([decode(first).upper(), decode(second).upper()])
    assert drawn == [mark, *capitals[0], mark, *capitals[1]]


def test_a_line_of_ten_words_gets_one_error_in_a_word_of_four_letters() -> None:
    draw = random.Random(1)
    for words, errors in ((1, 1), (10, 1), (11, 2), (25, 3)):
        line = " ".join(["letters"] * words)
        for _ in range(50):
            wrong = with_typos(line, draw).split(" ")
            assert len(wrong) == words
            assert sum(word != "letters" for word in wrong) <= errors
            assert all(SequenceMatcher(None, word, "letters").ratio() > 0.7 for word in wrong)
    assert {with_typos("ab cde f 12345 ...", draw) for _ in range(20)} == {"ab cde f 12345 ..."}
    assert with_typos("", draw) == ""
    for word in ("Straße,", "l'été", "你好世界"):
        assert len({with_typos(word, draw) for _ in range(60)}) > 3


@pytest.mark.parametrize("word", ["letters", "aaaab", "bbbb", "12abcd34", "été\u0301t", "नमस्कार"])
def test_each_error_changes_letters_and_nothing_else(word: str) -> None:
    draw = random.Random(1)
    others = [char for char in word if not char.isalpha()]
    for _ in range(300):
        wrong = with_typos(word, draw)
        assert wrong != word
        assert [char for char in wrong if not char.isalpha()] == others


@pytest.mark.parametrize("word", ["a1b2c3d4", "a-b-c-d", "1234abc"])
def test_words_without_enough_letters_in_a_row_stay(word: str) -> None:
    draw = random.Random(1)
    assert {with_typos(word, draw) for _ in range(50)} == {word}


@pytest.mark.parametrize("name", ["capitals", "typos"])
def test_nothing_is_drawn_without_a_probability(prepared: Prepared, name: str) -> None:
    side = augmented(prepared, **{name: 0.0})
    assert texts(prepared, side) == texts(prepared, prepared.train)
