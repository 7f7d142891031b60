import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece

from mtkit.errors import DataError
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.characters import Folding
from mtkit.text.tokenizer import BOS, BREAK, EOS, PAD, UNK, Tokenizer, Tokenizers
from mtkit.text.tokenizer_training import train_tokenizer

LINES = ["The old dog sees a red house.", "Der alte Hund sieht ein rotes Haus.", "Wir haben <s> zwei Hunde.", ""] * 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer") / "joint.model", LINES, TokenizerSettings())


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_vocabulary_too_large_for_the_text_is_lowered_to_a_multiple_of_8(tmp_path: Path, kind: str) -> None:
    made = train_tokenizer(tmp_path / "m", LINES, TokenizerSettings.model_validate({"kind": kind, "vocabulary": 5001}))
    assert 256 < made.size < 600
    assert made.size % 8 == 0


def test_a_lowered_bpe_vocabulary_still_holds_whole_words(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("Der alte Hund sieht ein rotes Haus")) == 7


def test_an_asked_vocabulary_is_kept_where_the_text_supports_it(tmp_path: Path) -> None:
    assert train_tokenizer(tmp_path / "m", LINES, TokenizerSettings(vocabulary=303)).size == 296


def test_a_vocabulary_too_small_for_the_characters_is_refused_with_one_that_works(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"choose \d+ or more") as caught:
        train_tokenizer(tmp_path / "m", LINES, TokenizerSettings(vocabulary=64))
    least = int(str(caught.value).split("choose ")[1].split()[0])
    assert train_tokenizer(tmp_path / "m", LINES, TokenizerSettings(vocabulary=least)).size == least


def test_text_too_small_for_any_vocabulary_is_refused(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(30)]
    with pytest.raises(DataError, match="too small for a unigram vocabulary"):
        train_tokenizer(tmp_path / "m", lines, TokenizerSettings(kind="unigram"))


def test_text_without_any_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        train_tokenizer(tmp_path / "m", ["", " "], TokenizerSettings())
    assert list(tmp_path.iterdir()) == []


def test_names_of_specials_and_tags_are_as_usual(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path / "m", LINES, TokenizerSettings(vocabulary=320), ["de"])
    pieces = [PAD, UNK, BOS, EOS, BREAK, tokenizer.tag("en-de"), *tokenizer.encode("The dog")]
    names = ["<pad>", "<unk>", "<s>", "</s>", "<break>", "<2de>", *map(tokenizer.piece, pieces[6:])]
    assert [*map(tokenizer.name, pieces)] == names


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_same_text_gives_the_same_file(tmp_path: Path, kind: str) -> None:
    settings = TokenizerSettings.model_validate({"kind": kind, "vocabulary": 320})
    for name in ("one", "two"):
        train_tokenizer(tmp_path / name, dict(enumerate(LINES)).values(), settings)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The dog",
        "a\u2028b",
        "a\x85b\x0bc\x0cd",
        "\x00\x01",
        "😀 日本語",
        "<s> </s> <pad> <unk> <0x41>",
        "< s>",
        "< break> < 2de>",
        "a\tb",
    ],
)
def test_any_text_comes_back_and_holds_no_special(tokenizer: Tokenizer, text: str) -> None:
    pieces = tokenizer.encode(text)
    assert not {PAD, UNK, BOS, EOS, BREAK} & set(pieces)
    assert tokenizer.decode(pieces) == text


def test_lines_are_encoded_as_each_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_lines(LINES[:4]) == [tokenizer.encode(line) for line in LINES[:4]]
    assert tokenizer.encode_lines([]) == []


def test_decoding_drops_specials_and_gives_one_line(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([BOS, *tokenizer.encode("a red dog"), EOS, PAD, PAD]) == "a red dog"
    for text in ("a\nb", "a\rb", "a\r\nb\r"):
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\n", " ").replace("\r", " ")


def test_tags_and_breaks_are_pieces_that_no_text_is_cut_into(tmp_path: Path) -> None:
    made = train_tokenizer(tmp_path / "m", LINES, TokenizerSettings(), ["de", "fr"])
    tags = [made.tag("en-de"), made.tag("en-fr")]
    assert made.tag("es-de") == tags[0]
    assert len({PAD, UNK, BOS, EOS, BREAK, *tags}) == 7
    for text in ("< 2de>", "<2fr> a", "< break>"):
        assert not {BREAK, *tags} & set(made.encode(text))
    dog, house = made.encode("a red dog"), made.encode("a house")
    assert made.decode([tags[0], *dog, BREAK, *house]) == "a red dog a house"
    with pytest.raises(DataError, match="no direction en-es"):
        made.tag("en-es")


@pytest.mark.parametrize(
    "text", ["，（）？！：…²½™", "他说：“好！”（笑）…", "ﬁne", "10\u00a0000 €", "e\u0301", "Ｗｉｄｅ　ｓｐａｃｅ"]
)
def test_text_comes_back_as_it_was_whatever_it_looks_like(tokenizer: Tokenizer, text: str) -> None:
    pieces = tokenizer.encode(text)
    assert tokenizer.decode(pieces) == text
    assert tokenizer.altered([text], [pieces]) == [False]


def test_text_that_does_not_come_back_is_told_from_text_with_other_spaces(tokenizer: Tokenizer) -> None:
    lines = ["a  red   dog ", "a red dog", "a\u2581dog", ""]
    assert tokenizer.altered(lines, tokenizer.encode_lines(lines)) == [False, False, True, False]


@pytest.mark.parametrize("bytes_too", [True, False])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_what_is_told_without_decoding_is_what_decoding_tells(tmp_path: Path, kind: str, bytes_too: bool) -> None:
    settings = TokenizerSettings.model_validate({"kind": kind, "byte_fallback": bytes_too})
    made = train_tokenizer(tmp_path / "m", [*LINES, "他说：好！（笑）"], settings)
    characters = [
        *"ab好é ﬁＡ\u2581\u3000\u2028\u0301\t\x00\x85\xa0\ufeff\U0001f600<>",
        " ",
        "<0x41>",
        "< s>",
        "</s>",
        "the ",
    ]
    draw = random.Random(5)
    lines = ["".join(draw.choices(characters, k=draw.randrange(9))) for _ in range(2000)]
    pieces = made.encode_lines(lines)
    back = [made.processor.decode(each) for each in pieces]
    expected = [one.split(" ") != other.split(" ") for one, other in zip(map(single_spaced, lines), back, strict=True)]
    assert made.altered(lines, pieces) == expected
    assert 100 < sum(expected) < 1900


def single_spaced(line: str) -> str:
    return re.sub(" +", " ", line).strip(" ")


def test_source_text_is_folded_before_it_is_cut(tokenizer: Tokenizer) -> None:
    folded = Tokenizer(tokenizer.processor, Folding(Folding("nfkc").model))
    for text, plain in (("ﬁne", "fine"), ("Ｔｈｅ　ｄｏｇ！", "The dog!"), ("², ½ (…) ", "2, 1⁄2 (...)")):
        assert folded.encode(text) == folded.encode_lines([text])[0] == tokenizer.encode(plain)
        assert tokenizer.encode(text) != tokenizer.encode(plain)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_punctuation_of_training_text_has_pieces_of_its_own(tmp_path: Path, kind: str) -> None:
    lines = [line + "他说：好！（笑），对？…" for line in LINES]
    made = train_tokenizer(tmp_path / "m", lines, TokenizerSettings.model_validate({"kind": kind}))
    assert not made.is_byte[made.encode("：！（），？…")].any()


def test_without_byte_fallback_a_strange_character_is_unknown(tmp_path: Path) -> None:
    made = train_tokenizer(tmp_path / "m", LINES, TokenizerSettings(byte_fallback=False))
    assert UNK in made.encode("日")
    assert not made.is_byte.any()


def test_missing_and_damaged_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"joint\.model|source\.model"):
        Tokenizers.load(tmp_path)
    (tmp_path / "folding.model").write_bytes(b"\x80\x04 no model")
    with pytest.raises(DataError, match=r"folding\.model"):
        Tokenizers.load(tmp_path)
    (tmp_path / "folding.model").unlink()
    (tmp_path / "joint.model").write_bytes(b"\x80\x04 no model")
    with pytest.raises(DataError, match=r"joint\.model"):
        Tokenizers.load(tmp_path)
    train_tokenizer(tmp_path / "joint.model", LINES, TokenizerSettings())
    whole = (tmp_path / "joint.model").read_bytes()
    (tmp_path / "joint.model").write_bytes(whole.replace("\u2581".encode(), b"\x8a\x8a\x8a"))
    with pytest.raises(DataError, match=r"joint\.model is not a readable sentencepiece model"):
        Tokenizers.load(tmp_path)
    (tmp_path / "joint.model").write_bytes(b"")
    with pytest.raises(DataError, match=r"joint\.model is empty"):
        Tokenizers.load(tmp_path)
    (tmp_path / "joint.model").write_bytes(whole)
    Tokenizers.load(tmp_path)
    (tmp_path / "folding.model").symlink_to("nothing")
    with pytest.raises(DataError, match=r"cannot read .*folding\.model: No such file"):
        Tokenizers.load(tmp_path)


def test_a_word_too_long_for_unigram_is_named(tmp_path: Path) -> None:
    word = "".join(random.Random(1).choices("abcdefghijklmnop", k=300_000))
    with pytest.raises(DataError, match=rf"a word of 300,000 letters, '{word[:20]}'\.\.\., .*\(--tokenizer bpe\)"):
        train_tokenizer(tmp_path / "joint.model", [word], TokenizerSettings(kind="unigram"))


def test_no_text_is_told_and_other_reasons_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"training text: no usable text$"):
        train_tokenizer(tmp_path / "joint.model", [" "], TokenizerSettings())

    def fail(**given: object) -> None:
        raise RuntimeError("INTERNAL: src/trainer.cc(7) [good()] ")

    monkeypatch.setattr(sentencepiece.SentencePieceTrainer, "train", fail)
    with pytest.raises(DataError, match=r"training text: INTERNAL: src/trainer\.cc\(7\) \[good\(\)\]$"):
        train_tokenizer(tmp_path / "joint.model", LINES, TokenizerSettings())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DataError("train.en, line 3: not UTF-8")])
def test_what_stops_the_reading_is_what_is_raised(tmp_path: Path, error: BaseException) -> None:
    def lines() -> Iterator[str]:
        yield "two dogs"
        raise error

    with pytest.raises(type(error), match=str(error) or None):
        train_tokenizer(tmp_path / "joint.model", lines(), TokenizerSettings())
    assert not (tmp_path / "joint.model").exists()
