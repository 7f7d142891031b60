"""Links of lines, against weights made by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.decoding import forced, word_alignment
from mtkit.decoding import translator as module
from mtkit.decoding.alignment_heads import Heads
from mtkit.decoding.files import translate_file
from mtkit.decoding.lines import chunks
from mtkit.decoding.lines.segments import Source
from mtkit.decoding.lines.source import Documents, SourceLines
from mtkit.decoding.translation import BLANK, Translation
from mtkit.decoding.translator import Translator
from mtkit.decoding.word_alignment import link_lines, pharaoh
from mtkit.errors import MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import EOS, Tokenizers
from mtkit.text.words import word_starts, words
from tests.decoding.trained import Trained, make_run, sentences

GREEDY = DecodingSettings(method="greedy")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("run"), documents=20)


@pytest.fixture
def equal_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of every target piece to all source pieces that are the same."""

    def weights(
        network: Any, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], *others: Any
    ) -> dict[str, list[torch.Tensor | None]]:
        found = torch.zeros(len(sources), 1, max(map(len, targets)), max(map(len, sources)))
        for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
            found[row, 0, : len(target), : len(source)] = torch.tensor(target)[:, None] == torch.tensor(source)
        return {"cross": [None, found]}

    monkeypatch.setattr(forced, "forced_weights", weights)


def expected(line: str, other: str) -> str:
    return " ".join(
        f"{place}-{number}"
        for place, word in enumerate(words(line))
        for number, their in enumerate(words(other))
        if word == their
    )


def by_hand(tokenizers: Tokenizers, text: str, **others: Any) -> Translation:
    pieces = (*tokenizers.target.encode(text), EOS)
    return Translation(text, 0.0, 0.0, pieces, **{"parts": 1, **others})


@pytest.mark.parametrize("together", [False, True])
def test_words_that_are_the_same_are_linked(trained: Trained, equal_pieces: None, together: bool) -> None:
    own = trained.run.tokenizers.source
    tokenizers = Tokenizers(own, own)
    pairs = [
        ("the small dog", "dog the small"),
        ("", ""),
        ("犬が 好き", "好き 犬が"),
        ("a  cat sees ", "sees  a cat"),
        (" red bird", "bird blue red"),
    ]
    size = 2 if together else 1
    translations = [by_hand(tokenizers, other, together=size) if line else BLANK for line, other in pairs]
    lines = [line for line, _ in pairs]
    found = link_lines(
        trained.run.load_model("best"),
        tokenizers,
        Heads(),
        SourceLines(lines, documents=Documents([1, 1, 1, 2, 2], 100) if together else None),
        translations,
    )
    assert [pharaoh(each) for each in found] == [expected(*pair) for pair in pairs]
    assert pharaoh(found[0]) == "0-1 1-2 2-0"


def test_parts_of_a_line_count_on(trained: Trained, equal_pieces: None) -> None:
    """A line that is too long for the model is translated in parts; words are numbered in the whole."""
    own = trained.run.tokenizers.source
    tokenizers, network = Tokenizers(own, own), trained.run.load_model("best")
    line = "The old tree and the house. A red bird sees one friend. The small dog likes a cat near the river."
    texts = [text for text, _ in Source([line], own, network.longest_source).parts(0)]
    assert len(texts) > 1
    parts = tuple(by_hand(tokenizers, text) for text in texts)
    whole = Translation(" ".join(texts), 0.0, 0.0, (), parts=len(parts), of_parts=parts)
    (found,) = link_lines(network, tokenizers, Heads(), [line], [whole])
    assert {(place, place) for place in range(len(words(line)))} <= set(found)


def test_the_work_on_words_grows_with_the_line_not_with_its_square(
    trained: Trained, equal_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, network = trained.run.tokenizers.source, trained.run.load_model("best")
    read: list[int] = []

    def counted(text: str) -> list[int]:
        read.append(len(text))
        return word_starts(text)

    monkeypatch.setattr(word_alignment, "word_starts", counted)
    line = "The small dog likes a cat near the river. " * 40
    parts = tuple(
        by_hand(Tokenizers(own, own), text) for text, _ in Source([line], own, network.longest_source).parts(0)
    )
    whole = Translation(" ".join(part.text for part in parts), 0.0, 0.0, (), parts=len(parts), of_parts=parts)
    (found,) = link_lines(network, Tokenizers(own, own), Heads(), [line], [whole])
    assert len(found) >= len(words(line))
    assert sum(read) <= 4 * len(line)  # once in the line and once in its parts, on both sides


@pytest.mark.parametrize("settings", [GREEDY, DecodingSettings(beam=3)], ids=["greedy", "beam"])
def test_files_with_lines_of_all_kinds(trained: Trained, tmp_path: Path, settings: DecodingSettings) -> None:
    """N lines in, N lines out, links within the words, by documents and one by one; translations stay the same."""
    lines = [*sentences(4, 1), "", "The tree and the house. " * 9, "\u2028 the dog", " ", "犬が 走る。"]
    translator = Translator([trained.run], settings)
    plain, output, aligned = tmp_path / "plain", tmp_path / "out", tmp_path / "aligned"
    for documents in (True, False):
        translate_file(translator, lines, plain, documents=documents)
        notes = translate_file(translator, lines, output, documents=documents, alignments=aligned)
        assert 6 in notes.in_parts.first
        assert output.read_bytes() == plain.read_bytes()
        translations, found = (path.read_text().split("\n")[:-1] for path in (output, aligned))
        assert len(found) == len(lines) == len(translations)
        assert not found[4]
        assert not found[7]
        for line, translation, pairs in zip(lines, translations, found, strict=True):
            assert bool(pairs) == bool(line.strip() and translation.strip())
            for one, other in (map(int, pair.split("-")) for pair in pairs.split()):
                assert one < len(words(line))
                assert other < len(words(translation))


def test_a_kill_and_the_same_again(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, output, aligned = sentences(9, 2), tmp_path / "out", tmp_path / "aligned"
    monkeypatch.setattr(chunks, "CHUNK", 3)
    translator = Translator([trained.run], GREEDY)

    def translate() -> tuple[str, str]:
        translate_file(translator, lines, output, documents=False, alignments=aligned)
        return output.read_text(), aligned.read_text()

    whole = translate()
    output.unlink()
    aligned.unlink()
    original, firsts = module.translate_lines, list[int]()

    def dying(engine: Any, tokenizers: Any, lines: SourceLines, **rest: Any) -> Any:
        assert lines.numbers
        firsts.append(lines.numbers[0])
        if firsts == [0, 3, 6]:
            raise KeyboardInterrupt
        return original(engine, tokenizers, lines, **rest)

    monkeypatch.setattr(module, "translate_lines", dying)
    with pytest.raises(KeyboardInterrupt):
        translate()
    assert not output.exists()
    assert not aligned.exists()
    assert translate() == whole
    assert firsts == [0, 3, 6, 6]
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".partial", ".json"))]


def test_no_weights_are_computed_unless_asked(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()
    monkeypatch.setattr(forced, "forced_weights", lambda *arguments: asked.append(arguments))
    translate_file(Translator([trained.run], GREEDY), ["the dog"], tmp_path / "out")
    assert not asked


def test_what_has_no_links_is_refused(trained: Trained, tmp_path: Path) -> None:
    aligned = tmp_path / "aligned"
    with pytest.raises(MtkitError, match="ensemble"):
        translate_file(Translator([trained.run] * 2, GREEDY), ["the dog"], tmp_path / "out", alignments=aligned)
    several = Translator([trained.run], DecodingSettings(beam=3, n_best=2))
    with pytest.raises(MtkitError, match="n_best"):
        translate_file(several, ["the dog"], tmp_path / "out", alignments=aligned)
    with pytest.raises(MtkitError, match="two outputs"):
        translate_file(Translator([trained.run], GREEDY), ["the dog"], aligned, alignments=aligned)
    assert not list(tmp_path.iterdir())
