"""The converted model computes what mtkit's does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.decoding.lexicon import Lexicon
from mtkit.text.tokenizer import BOS, BREAK, EOS
from tests.decoding.engines.plain import V, recipe_of, shifted_model

pytestmark = pytest.mark.peer
ctranslate2 = pytest.importorskip("ctranslate2")


@pytest.mark.parametrize(
    ("attention", "options", "changes"),
    [
        ("full", {}, {}),
        ("full", {}, {"norm": "post"}),
        ("full", {}, {"activation": "gelu"}),
        ("full", {}, {"activation": "swiglu"}),
        ("full", {}, {"positions": "none"}),
        ("full", {}, {"positions": "learned"}),
        ("full", {}, {"positions": "sinusoidal-cat"}),
        ("full", {}, {"tie": "none"}),
        ("full", {}, {"tie": "decoder"}),
        ("multi-query", {}, {}),
        ("grouped-query", {}, {}),
        ("full", {"encoder.projection": "grouped-query", "decoder.projection": "multi-query"}, {}),
        ("grouped-query", {"cross.kv_heads": 1}, {}),
        ("full", {"positions": "rotary"}, {"positions": "none"}),
        ("full", {"positions": {"name": "rotary", "half": True}}, {"positions": "none"}),
        ("full", {"decoder.positions": "rotary"}, {"positions": "none"}),
        ("multi-query", {"positions": "rotary"}, {"positions": "none"}),
        ("multi-query", {"positions": "rotary"}, {"positions": "none", "d_model": 20}),
    ],
    ids=str,
)
def test_it_gives_the_same_probabilities(
    attention: str, options: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    from mtkit.decoding.engines.ctranslate2_conversion import convert, token

    model = shifted_model(recipe_of(attention, options, **changes))
    convert(model, tmp_path / "model")
    source, target = [5, 9, 30, 7, EOS], [8, 21, 6, 33]
    translator = ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", intra_threads=1)
    (scored,) = translator.score_batch([list(map(token, source))], [list(map(token, target))])
    with torch.no_grad():
        hidden = model(torch.tensor([source]), torch.tensor([[BOS, *target]])).hidden[0]
        log_probs = (hidden @ model.output_weight.T).log_softmax(-1)
    expected = log_probs[range(5), [*target, EOS]]
    torch.testing.assert_close(torch.tensor(scored.log_probs), expected, atol=1e-4, rtol=1e-4)


def test_its_names_of_pieces_go_both_ways() -> None:
    from mtkit.decoding.engines.ctranslate2_conversion import piece, token

    assert [piece(token(each)) for each in range(V)] == list(range(V))
    assert len({token(each) for each in range(V)}) == V


def test_its_vocabulary_map_lets_come_what_a_shortlist_does(tmp_path: Path) -> None:
    from mtkit.decoding.engines.ctranslate2_conversion import convert, piece, token, vocabulary_map

    convert(shifted_model(recipe_of()), tmp_path / "model")
    translations = torch.zeros(V, 3, dtype=torch.int32)
    translations[5], translations[9] = torch.tensor([5, 20, 21]), torch.tensor([9, 22, 0])
    lexicon = Lexicon(translations, torch.tensor([30, 31], dtype=torch.int32))
    (tmp_path / "model" / "vmap.txt").write_text(vocabulary_map(lexicon.cut(1)))
    translator = ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", intra_threads=1)
    source = [[token(each) for each in (5, 9, EOS)]]
    # At this temperature every piece that may come is about as likely as another, so that 40 hypotheses hold them all.
    drawing = {"sampling_topk": 0, "sampling_temperature": 100, "num_hypotheses": 40, "max_decoding_length": 20}
    free, short = (
        translator.translate_batch(source, beam_size=1, use_vmap=each, **drawing)[0].hypotheses
        for each in (False, True)
    )
    may = set(lexicon.cut(1).shortlist(torch.tensor([[5, 9, EOS]])).tolist())
    assert set(range(BREAK + 1)) <= may
    assert {piece(name) for each in short for name in each} == may - {EOS}
    assert not {piece(name) for each in free for name in each} <= may
