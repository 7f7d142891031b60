"""Models with other numbers for their pieces cut text as before, against sentencepiece itself."""

import io
import random
from pathlib import Path

import pytest
import sentencepiece

from mtkit.interchange.marian import FIRST, ordinary, renumbered
from mtkit.text.model_file import ModelFile
from mtkit.text.tokenizer import PAD, UNK, Tokenizer

WORDS = [
    "the",
    "old",
    "dogs",
    "saw",
    "a",
    "green",
    "house",
    "and",
    "猫が",
    "魚を",
    "食べた",
    "我们",
    "都",
    "喜欢",
    "狗",
    "running",
    "runner",
    "runs",
    "housing",
    "houses",
]
TEXTS = [" ".join(random.Random(seed).choices(WORDS, k=6)) + "." for seed in range(60)]
UNSEEN = [
    "",
    "  two  spaces ",
    "ｆｕｌｌ width ①",
    "Zebra 漢字 unseen!",
    "<s> </s> < pad> <unk>",
    "\u2028line",
    "a\u2581b",
]


def trained(kind: str, **options: object) -> bytes:
    """A model with sentencepiece's own special pieces, as others train it."""
    model = io.BytesIO()
    given = {"vocab_size": 90, "model_type": kind, "character_coverage": 1.0, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, minloglevel=2, **{**given, **options}
    )
    return model.getvalue()


def processor(content: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=content)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_text_is_cut_into_the_same_pieces_under_the_numbers_of_the_vocabulary(kind: str) -> None:
    model = trained(kind, byte_fallback=kind == "bpe", vocab_size=90 if kind == "unigram" else 330)
    file = ModelFile.read(model)
    assert (file.kind, file.byte_fallback) == (kind, kind == "bpe")
    strangers = ["▁the▁old", "▁dogsx", "tho", ">>fra<<", "▁h", "▁ho"]
    vocabulary = [*ordinary(file), *(each for each in strangers if each not in ordinary(file))]
    random.Random(1).shuffle(vocabulary)
    found, before = Tokenizer(processor(renumbered(file, vocabulary, [">>fra<<"]).written())), processor(model)
    assert found.size == FIRST + len(vocabulary)
    assert [found.piece(FIRST + place) for place in range(len(vocabulary))] == vocabulary
    for text in [*TEXTS, *UNSEEN, *strangers]:
        expected = [before.id_to_piece(each) for each in before.encode(text)]
        pieces = found.encode(text)
        assert ["<unk>" if each == UNK else found.piece(each) for each in pieces] == expected
        assert found.decode(pieces) == before.decode([each for each in before.encode(text) if each])
    assert found.tag("en-fra") == FIRST + vocabulary.index(">>fra<<")
    assert found.decode([FIRST + vocabulary.index(">>fra<<")]) == ""


def test_a_file_that_is_written_is_the_file_that_was_read() -> None:
    file = ModelFile.read(trained("unigram"))
    assert ModelFile.read(file.written()) == file
    assert processor(file.written()).encode("the old dogs") == processor(trained("unigram")).encode("the old dogs")
    folded = processor(file.with_charsmap(b"").written())
    assert processor(file.written()).encode("ｔｈｅ", out_type=str) == folded.encode("the", out_type=str)
    assert folded.encode("ｔｈｅ", out_type=str) != folded.encode("the", out_type=str)


def test_special_pieces_are_mtkits(tmp_path: Path) -> None:
    file = ModelFile.read(trained("unigram"))
    path = tmp_path / "source.model"
    path.write_bytes(renumbered(file, list(ordinary(file))).written())
    assert PAD not in Tokenizer.load(path).encode("< pad> the")


def test_what_cannot_be_renumbered_is_refused() -> None:
    file = ModelFile.read(trained("unigram"))
    pieces = list(ordinary(file))
    with pytest.raises(ValueError, match=r"its piece .* is not in the vocabulary"):
        renumbered(file, pieces[1:])
    with pytest.raises(ValueError, match="comes twice"):
        renumbered(file, [*pieces, pieces[0]])
    with pytest.raises(ValueError, match="algorithm word"):
        renumbered(ModelFile.read(trained("word")), pieces)


@pytest.mark.parametrize("content", [b"", b"no model at all", trained("unigram")[:-7], b"\xff" * 30])
def test_another_file_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        ModelFile.read(content)
