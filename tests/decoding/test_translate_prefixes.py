"""Translations that begin with given text."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.data.lengths import lengths_of
from mtkit.decoding.files import translate_file
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.lines.source import SourceLines, TrainedOn, Usual
from mtkit.decoding.translation import Translation
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError, MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.storage.jobs import Part
from mtkit.text.tokenizer import EOS
from tests.decoding.trained import LONGEST, Trained, make_run, sentences

LINES = [*sentences(6, seed=8), ""]
PREFIXES = ["The old", "", "Near one", "X\u00e4 ", "  ", "Green", "ignored"]
SEARCHES: list[dict[str, Any]] = [{"method": "greedy"}, {"beam": 3}, {"method": "sample", "n_best": 2}]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("run"))


def translator(trained: Trained, **settings: Any) -> Translator:
    return Translator([trained.run], DecodingSettings.model_validate(settings))


def begun(translator: Translator, lines: list[str], prefixes: list[str]) -> list[list[Translation]]:
    return translator.translate(translator.source(lines, prefixes=prefixes))


@pytest.mark.parametrize("search", SEARCHES, ids=["greedy", "beam", "sample"])
def test_translations_begin_with_the_text_and_have_the_models_probability(
    trained: Trained, search: dict[str, Any]
) -> None:
    decoder = translator(trained, **search)
    found, free = begun(decoder, LINES, PREFIXES), decoder.translate(LINES)
    for line, prefix, translations, usual in zip(LINES, PREFIXES, found, free, strict=True):
        for translation in translations:
            if not line or not prefix.strip():
                assert translations == usual
                continue
            given = decoder.tokenizers.target.encode(prefix)
            assert list(translation.pieces[: len(given)]) == list(given)
            assert translation.text.startswith(prefix.strip())
            forced = decoder.engine.log_probs(
                torch.tensor([[*decoder.tokenizers.source.encode(line), EOS]]), torch.tensor([translation.pieces])
            )
            assert translation.log_prob == pytest.approx(forced.sum().item(), abs=1e-3)


def test_a_shortlist_has_the_given_pieces(trained: Trained) -> None:
    decoder = translator(trained, method="greedy")
    size = trained.prepared.tokenizers.source.size
    decoder.shorten(Lexicon(torch.full((size, 2), EOS, dtype=torch.int32), torch.tensor([9], dtype=torch.int32)))
    found = begun(decoder, LINES, PREFIXES)
    assert found[0][0].text.startswith("The old")
    assert found[5][0].text.startswith("Green")


def test_a_line_of_several_sentences_is_not_split_behind_its_beginning(trained: Trained) -> None:
    decoder = translator(trained, method="greedy")
    line = "The dog. One cat. A dog."
    known = TrainedOn([[*lengths_of(trained.prepared, LONGEST).values()]])
    assert known.usual(None) == Usual(1, known.models[0][0].pieces_at_once)
    lines = replace(decoder.source([line, line], prefixes=["A", ""]), trained_on=known)
    (first,), (usual,) = decoder.translate(lines)
    assert (first.parts, usual.parts) == (1, 3)
    long = " ".join(sentences(12, seed=3))
    ((whole,),) = begun(decoder, [long], ["One tree"])
    assert whole.parts > 1
    assert whole.of_parts[0].text.startswith("One tree")
    assert not any(part.text.startswith("One tree") for part in whole.of_parts[1:])


def test_the_maximum_length_counts_from_the_beginning(trained: Trained) -> None:
    decoder = translator(trained, method="greedy", max_pieces=3)
    prefix = "The old green dog"
    ((found,),) = begun(decoder, LINES[:1], [prefix])
    assert found.text.startswith(prefix)
    assert len(decoder.tokenizers.target.encode(prefix)) + 1 <= len(found.pieces)
    assert len(found.pieces) <= len(decoder.tokenizers.target.encode(prefix)) + 3


def test_what_cannot_begin_a_translation_is_an_error(trained: Trained) -> None:
    decoder = translator(trained, method="greedy")
    with pytest.raises(
        DataError, match=rf"prefix of line 2 has \d+ pieces, and a translation has at most {LONGEST - 1}"
    ):
        begun(decoder, LINES[:2], ["", "one green tree " * 20])
    with pytest.raises(MtkitError, match="no_repeat_ngram = 2"):
        begun(translator(trained, method="greedy", no_repeat_ngram=2), LINES[:1], ["a"])


def test_a_file_has_a_beginning_per_line_and_resumes(trained: Trained, tmp_path: Path) -> None:
    decoder, stream = translator(trained, method="greedy"), io.BytesIO()
    source, prefixes = tmp_path / "source", tmp_path / "prefixes"
    source.write_text("".join(f"{line}\n" for line in LINES))
    prefixes.write_text("".join(f"{line}\n" for line in PREFIXES))
    translate_file(decoder, source, stream, prefixes=prefixes)
    expected = [translation.text for (translation,) in begun(decoder, LINES, PREFIXES)]
    assert stream.getvalue().decode().splitlines() == expected
    for lines in (PREFIXES[:5], [*PREFIXES, ""]):
        with pytest.raises(DataError, match="the prefixes must have as many lines as the input"):
            translate_file(decoder, source, io.BytesIO(), prefixes=lines)


def test_a_part_of_a_file_has_no_prefixes(trained: Trained, tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    source.write_text("".join(f"{line}\n" for line in LINES))
    with pytest.raises(MtkitError, match="its parts are divided by bytes; leave --prefix out"):
        translate_file(translator(trained), source, output, prefixes=PREFIXES, part=Part(1, 2))
    assert list(tmp_path.glob("output*")) == []


def test_lines_of_documents_are_translated_one_by_one_then(tmp_path: Path) -> None:
    decoder, said = translator(make_run(tmp_path, documents=20), method="greedy"), list[str]()
    stream = io.BytesIO()
    translate_file(decoder, LINES[:2], stream, prefixes=["The", "The"], say=said.append)
    assert said == ["with --prefix, lines are translated one by one, not by documents"]
    assert all(line.startswith("The") for line in stream.getvalue().decode().splitlines())
    with pytest.raises(MtkitError, match="--prefix needs lines that are translated one by one"):
        translate_file(decoder, LINES[:2], io.BytesIO(), prefixes=["The", "The"], documents=True)
    lines = decoder.source(LINES[:2], documents=[1, 1], prefixes=["a", "b"])
    assert isinstance(lines, SourceLines)
    with pytest.raises(MtkitError, match="--sentences"):
        decoder.translate(lines)
