"""Marian's configuration as a recipe, and its vocabulary in mtkit's order."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from mtkit.errors import DataError
from mtkit.interchange.marian import Generation, decoding_settings, model_settings
from mtkit.interchange.marian_vocabulary import FIRST, NEVER, number, ordinary, renumbered
from mtkit.text.model_file import ModelFile
from mtkit.text.tokenizer import BOS, BREAK, EOS, PAD, UNK, Tokenizer

CONFIGURATION: dict[str, Any] = {
    "model_type": "marian",
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "activation_function": "swish",
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("shared", "tied", "tie"),
    [(True, True, "all"), (False, True, "decoder"), (True, False, "none"), (False, False, "none"), (None, None, "all")],
)
def test_embeddings_are_tied_as_the_configuration_says(shared: bool | None, tied: bool | None, tie: str) -> None:
    said = {"share_encoder_decoder_embeddings": shared, "tie_word_embeddings": tied}
    found = model_settings({**CONFIGURATION, **{name: value for name, value in said.items() if value is not None}})  # type: ignore[typeddict-item]
    assert found["tie"] == tie


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {"method": "greedy", "length_penalty": 1.0, "no_repeat_ngram": 0, "max_pieces": 31}),
        (
            {"num_beams": 4, "length_penalty": 0.0, "no_repeat_ngram_size": 3, "max_length": 20},
            {"method": "beam", "beam": 4, "length_penalty": 0.0, "no_repeat_ngram": 3, "max_pieces": 19},
        ),
        (
            {"max_length": 20, "max_new_tokens": 12},
            {"method": "greedy", "length_penalty": 1.0, "no_repeat_ngram": 0, "max_pieces": 12},
        ),
        (
            {"num_beams": None, "length_penalty": None, "max_length": 1},
            {"method": "greedy", "length_penalty": 1.0, "no_repeat_ngram": 0, "max_pieces": 1},
        ),
    ],
)
def test_the_search_is_theirs(theirs: Generation, ours: dict[str, Any]) -> None:
    assert decoding_settings(theirs, 32) == ours


VOCABULARY = {"</s>": 0, "<unk>": 1, "▁a": 2, "b": 3, "<pad>": 4}


@pytest.mark.parametrize("start", [4, 0, 1])
def test_of_special_pieces_in_one_row_the_first_keeps_its_bias(start: int) -> None:
    """Marian begins with the row of <pad>, or of </s>: a model that could not predict </s> would not end."""
    found = number(VOCABULARY, [], size=5, pad=4, eos=0, start=start)
    assert found.rows[:FIRST] == (4, 1, start, 0, None)
    assert found.added == {BOS, BREAK}
    bias = torch.arange(5) / 10
    biases = found.biases(bias)
    assert biases[[PAD, UNK, EOS]].tolist() == bias[[4, 1, 0]].tolist()
    assert biases[[BOS, BREAK]].tolist() == [NEVER] * 2
    assert biases[FIRST:].tolist() == bias[[2, 3]].tolist()
    table = torch.eye(5)
    rows = found.embeddings(table)
    assert torch.equal(rows[BOS], table[start])
    assert not rows[BREAK].any()


def test_rows_without_a_name_get_one_and_wrong_ids_are_refused() -> None:
    found = number(VOCABULARY, [], size=7, pad=4, eos=0, start=4)
    assert found.pieces == ("▁a", "b", "< 5>", "< 6>")
    assert found.marks == ["< 5>", "< 6>"]
    for wrong, message in (
        ({**VOCABULARY, "c": 3}, "two of its pieces have one id"),
        ({**VOCABULARY, "c": 9}, "outside the 5 rows"),
        ({**VOCABULARY, "</s>": 3, "b": 0}, "</s> has the id 3, but eos_token_id is 0"),
        ({piece: row for piece, row in VOCABULARY.items() if piece != "<unk>"}, "has no piece <unk>"),
    ):
        with pytest.raises(DataError, match=message):
            number(wrong, [], size=5, pad=4, eos=0, start=4)


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
