from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from mtkit.errors import DataError, RecipeError
from mtkit.model import initial_embeddings
from mtkit.model.build import build_model
from mtkit.model.initial_embeddings import InitialEmbeddings, load_embeddings
from mtkit.model.network import Network
from mtkit.recipe import make_recipe
from mtkit.recipe.data import TokenizerSettings
from mtkit.text.tokenizer import BREAK, Tokenizer, Tokenizers
from mtkit.text.tokenizer_training import train_tokenizer

WIDTH = 8
_DRAW = Random(1)
_WORDS = [
    "the",
    "cats",
    "sat",
    "on",
    "mats",
    "and",
    "12",
    "rats",
    "ran",
    "strands",
    "bands",
    "sands",
    "Berlin",
    "Bern",
    "in",
    "big",
    "small",
    "house",
    "mouse",
]
_CHINESE = ["我们", "今天", "去", "北京", "。", "天气", "很好", "，", "公园", "の", "は", "とても", "よい"]
TEXT = [" ".join(_DRAW.choices(_WORDS, k=9)) + _DRAW.choice(".,") for _ in range(300)]
CHINESE = ["".join(_DRAW.choices(_CHINESE, k=8)) for _ in range(200)]


def tokenizer_of(folder: Path, kind: str, lines: Sequence[str] = tuple(TEXT + CHINESE)) -> Tokenizer:
    settings = TokenizerSettings.model_validate({"kind": kind, "vocabulary": 384})
    return train_tokenizer(folder / "joint.model", lines, settings)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), request.param)


def write_vectors(path: Path, words: Sequence[str], seed: int = 1) -> dict[str, np.ndarray]:
    """Write random vectors of these words; return them."""
    rows = np.random.default_rng(seed).normal(size=(len(words), WIDTH)).astype(np.float32) * 7
    lines = [" ".join([word, *map(str, row.tolist())]) for word, row in zip(words, rows, strict=True)]
    path.write_text("\n".join(lines), "utf-8")
    return dict(zip(words, rows, strict=True))


def embedded(
    tokenizers: Tokenizers, files: Mapping[str, Path], **model: Any
) -> tuple[Network, Network, list[tuple[InitialEmbeddings, list[str]]]]:
    """A new model, the same with initial embeddings, and their records."""
    sizes = {"d_model": WIDTH, "heads": 2, "feed_forward": 8, "encoder_layers": 1, "decoder_layers": 1}
    given = {name: str(path) for name, path in files.items()}
    joint = {"tokenizer": {"joint": tokenizers.joint}}
    recipe = make_recipe({"data": joint, "model": {**sizes, "embeddings": given, **model}})
    vocabularies = {"source_vocabulary": tokenizers.source.size, "target_vocabulary": tokenizers.target.size}
    before, after = build_model(recipe, **vocabularies), build_model(recipe, **vocabularies)
    return before, after, load_embeddings(after, recipe.model, tokenizers)


def row(network: Network, piece: str, tokenizer: Tokenizer, side: str = "source") -> np.ndarray:
    index = tokenizer.processor.piece_to_id(piece)
    assert tokenizer.piece(index) == piece, f"no piece {piece}"
    table: np.ndarray = getattr(network, f"{side}_embedding").tokens.weight.detach().numpy()[index]
    return table


def test_pieces_get_the_vectors_of_their_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pieces = {tokenizer.piece(index) for index in range(tokenizer.size)}
    words = ["the", "and", "Berlin", "北京", "。", ",", "an", "ats", "s", "の"]
    vectors = write_vectors(tmp_path / "v.vec", words)
    before, after, [(record, notes)] = embedded(Tokenizers(tokenizer, tokenizer), {"source": tmp_path / "v.vec"})
    assert {"▁the", "▁and", "。", ",", "s", "北京", "の"} <= pieces
    for piece in pieces:
        text = piece.removeprefix("▁")
        if text in vectors and (piece != text or not text.isascii() or text == ","):
            assert np.allclose(row(after, piece, tokenizer), vectors[text] * record.scale, atol=1e-6), piece
    # a piece inside words is not the word of this spelling
    assert not np.allclose(row(after, "s", tokenizer), vectors["s"] * record.scale)
    for piece in (*range(BREAK + 1), *np.flatnonzero(tokenizer.is_byte)):
        assert torch.equal(after.source_embedding.tokens.weight[piece], before.source_embedding.tokens.weight[piece])
    assert notes == []
    assert record.words >= 5
    assert record.vectors == len(words)


def test_other_pieces_get_the_mean_of_the_words_that_contain_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    words = [*_WORDS, "stands", "cat", "hats", "天气", "公园は", "とて"]
    vectors = write_vectors(tmp_path / "v.vec", words)
    before, after, [(record, _)] = embedded(Tokenizers(tokenizer, tokenizer), {"source": tmp_path / "v.vec"})
    checked = 0
    for index in range(tokenizer.size):
        piece, new = tokenizer.piece(index), after.source_embedding.tokens.weight[index].detach().numpy()
        containing = [vectors[word] for word in words if index in tokenizer.encode(word)]
        is_word = piece.removeprefix("▁").strip(",.") in words and (
            piece.startswith("▁") or not piece.isascii() or piece == "12"
        )
        if is_word or piece == "▁" or tokenizer.is_byte[index]:
            continue
        if containing:
            mean = np.mean(np.array(containing, dtype=np.float64), axis=0)
            assert np.allclose(new, mean / np.linalg.norm(mean), atol=1e-6), piece
            checked += 1
        else:
            assert np.array_equal(new, before.source_embedding.tokens.weight[index].detach().numpy()), piece
    assert record.parts == checked > 3


def test_inputs_of_the_first_layer_have_the_usual_size(tmp_path: Path, tokenizer: Tokenizer) -> None:
    vectors = write_vectors(tmp_path / "v.vec", ["the", "and", "on", "ran", "北京", "sands", "hats", "strand"])
    _, after, [(record, _)] = embedded(Tokenizers(tokenizer, tokenizer), {"source": tmp_path / "v.vec"})
    found = np.array([row(after, f"▁{word}", tokenizer) for word in ("the", "and")])
    squares = after.source_embedding.tokens.weight.detach().square().sum(1)
    assert np.allclose(found[0] / found[1], vectors["the"] / vectors["and"], rtol=1e-4)  # one factor for all words
    names = {"北京", *(f"▁{word}{mark}" for word in vectors for mark in ("", ",", "."))}
    whole = [index for index in range(tokenizer.size) if tokenizer.piece(index) in names]
    assert float(squares[whole].mean()) == pytest.approx(1.0, rel=1e-4)
    assert record.words == len(whole)


def test_words_of_a_vocabulary_of_words_are_found_without_punctuation(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "words", TEXT)
    vectors = write_vectors(tmp_path / "v.vec", ["the", "berlin", "house", "house."])
    _, after, [(record, _)] = embedded(Tokenizers(tokenizer, tokenizer), {"source": tmp_path / "v.vec"})
    for piece, word in [("the,", "the"), ("Berlin", "berlin"), ("Berlin.", "berlin"), ("house,", "house")]:
        assert np.allclose(row(after, f"▁{piece}", tokenizer), vectors[word] * record.scale, atol=1e-6)
    assert np.allclose(row(after, "▁house.", tokenizer), vectors["house."] * record.scale, atol=1e-6)


def test_lower_cased_words_are_found_and_the_first_of_two_equal_words_holds(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    vectors = write_vectors(tmp_path / "v.vec", ["the", "berlin", "and", "rats"])
    lines = (tmp_path / "v.vec").read_text("utf-8")
    zeros = " ".join(["0"] * WIDTH)
    (tmp_path / "v.vec").write_text(f"7 8\n{lines}\nthe {'1 ' * WIDTH}\nthe {'2 ' * WIDTH}\non {zeros}\n", "utf-8")
    before, after, [(record, notes)] = embedded(Tokenizers(tokenizer, tokenizer), {"source": tmp_path / "v.vec"})
    assert notes == ["2 lines repeat a word, the first is line 6; each word has its first vector"]
    assert np.allclose(row(after, "▁the", tokenizer), vectors["the"] * record.scale, atol=1e-6)
    assert np.allclose(row(after, "▁Berlin", tokenizer), vectors["berlin"] * record.scale, atol=1e-6)
    assert np.array_equal(row(after, "▁on", tokenizer), row(before, "▁on", tokenizer))  # a zero vector is none


def test_only_the_first_words_are_cut_into_pieces(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_embeddings, "FREQUENT", 2)
    monkeypatch.setattr(initial_embeddings, "_BATCH", 1)
    words = ["the", "xs", "zs", "and"]
    vectors = write_vectors(tmp_path / "v.vec", words)
    _, after, [(record, _)] = embedded(Tokenizers(tokenizer, tokenizer), {"source": tmp_path / "v.vec"})
    expected = vectors["xs"] / np.linalg.norm(vectors["xs"])
    assert np.allclose(row(after, "s", tokenizer), expected, atol=1e-6)
    assert np.allclose(row(after, "▁and", tokenizer), vectors["and"] * record.scale, atol=1e-6)


@pytest.mark.parametrize("architecture", ["transformer", "rnn"])
def test_sides_with_tables_of_their_own_get_their_files(tmp_path: Path, architecture: str) -> None:
    source = tokenizer_of(tmp_path, "words", TEXT)
    (tmp_path / "target").mkdir()
    target = tokenizer_of(tmp_path / "target", "unigram", CHINESE)
    english = write_vectors(tmp_path / "en.vec", ["the", "and", "of"])
    chinese = write_vectors(tmp_path / "zh.vec", ["今天", "我们", "。"], seed=2)
    files = {"source": tmp_path / "en.vec", "target": tmp_path / "zh.vec"}
    before, after, records = embedded(Tokenizers(source, target), files, tie="decoder", architecture=architecture)
    assert [(record.side, record.file) for record, _ in records] == [("source", "en.vec"), ("target", "zh.vec")]
    assert np.allclose(row(after, "▁the", source), english["the"] * records[0][0].scale, atol=1e-6)
    assert np.allclose(row(after, "。", target, "target"), chinese["。"] * records[1][0].scale, atol=1e-6)
    assert torch.equal(after.output_weight, after.target_embedding.tokens.weight)
    _, alone, records = embedded(Tokenizers(source, target), {"target": tmp_path / "zh.vec"}, tie="none")
    assert np.allclose(row(alone, "。", target, "target"), row(after, "。", target, "target"))
    assert alone.output is not None
    assert [record.side for record, _ in records] == ["target"]
    assert records[0][0].describe().startswith("target embeddings: ")
    kept = {name for name, value in before.state_dict().items() if torch.equal(value, after.state_dict()[name])}
    assert set(before.state_dict()) - kept == {f"{side}_embedding.tokens.weight" for side in ("source", "target")}


def test_a_shared_table_takes_one_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    vectors = write_vectors(tmp_path / "v.vec", ["the", "北京"])
    write_vectors(tmp_path / "other.vec", ["the"])
    both = Tokenizers(tokenizer, tokenizer)
    for names in (["source"], ["target"], ["source", "target"]):
        _, after, [(record, _)] = embedded(both, dict.fromkeys(names, tmp_path / "v.vec"), tie="all")
        assert record.side == "both"
        assert np.allclose(row(after, "▁the", tokenizer, "target"), vectors["the"] * record.scale, atol=1e-6)
        assert record.describe().startswith("source and target embeddings: ")
    files = {"source": tmp_path / "v.vec", "target": tmp_path / "other.vec"}
    with pytest.raises(RecipeError, match=r"one table for both sides.*set model\.tie: decoder"):
        embedded(both, files, tie="all")


def test_one_file_for_two_tables_is_read_once(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_vectors(tmp_path / "v.vec", ["the", "北京"])
    opened: list[Path] = []
    files = initial_embeddings.WordVectors
    monkeypatch.setattr(
        initial_embeddings, "WordVectors", lambda path, *rest: opened.append(path) or files(path, *rest)
    )
    both = dict.fromkeys(("source", "target"), tmp_path / "v.vec")
    _, after, records = embedded(Tokenizers(tokenizer, tokenizer), both, tie="decoder")
    assert opened == [tmp_path / "v.vec"]
    assert [record.side for record, _ in records] == ["source", "target"]
    assert np.array_equal(row(after, "▁the", tokenizer), row(after, "▁the", tokenizer, "target"))


def test_a_file_of_another_language_or_width_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_vectors(tmp_path / "v.vec", ["όχι", "да"])
    tokenizers = Tokenizers(tokenizer, tokenizer)
    with pytest.raises(DataError, match=r"v\.vec has no vector for any of the [0-9,]+ pieces of both sides"):
        embedded(tokenizers, {"source": tmp_path / "v.vec"})
    with pytest.raises(DataError, match=r"v\.vec, line 1: vectors of width 8, but the embeddings have width 16"):
        embedded(tokenizers, {"source": tmp_path / "v.vec"}, d_model=16)
