from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtkit.data.tokenizer import BOS, EOS
from mtkit.decoding.lexicon import Lexicon
from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.model.transformer import Transformer
from mtkit.recipe import Recipe, make_recipe

pytestmark = pytest.mark.peer
ctranslate2 = pytest.importorskip("ctranslate2")

V = 40


def model_and_run(**changes: Any) -> tuple[Transformer, Any]:
    sizes = {"d_model": 16, "heads": 2, "feed_forward": 32, "encoder_layers": 1, "decoder_layers": 2, "max_length": 32}
    recipe = make_recipe({"model": sizes | changes})
    model = build_model(recipe, source_vocabulary=V, target_vocabulary=V).eval()
    with torch.no_grad():
        for value in model.parameters():  # norms and biases that a conversion could forget
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel())) * 0.2)
    return model, SimpleNamespace(recipe=recipe, tokenizers=SimpleNamespace(**dict.fromkeys(SIDES, TOKENIZER)))


SIDES, TOKENIZER = ("source", "target"), SimpleNamespace(size=V)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "post"},
        {"activation": "gelu"},
        {"activation": "swiglu"},
        {"positions": "none"},
        {"positions": "learned"},
        {"tie": "none"},
    ],
    ids=str,
)
def test_it_gives_the_same_probabilities(changes: dict[str, Any], tmp_path: Path) -> None:
    from mtkit.benchmark.peers.ctranslate2 import SPECIALS, convert

    model, run = model_and_run(**changes)
    convert(run, model, tmp_path / "model")
    source, target = [5, 9, 30, 7, EOS], [8, 21, 6, 33]
    translator = ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", intra_threads=1)
    (scored,) = translator.score_batch([[*map(str, source[:-1]), SPECIALS[EOS]]], [list(map(str, target))])
    with torch.no_grad():
        hidden = model(torch.tensor([source]), torch.tensor([[BOS, *target]])).hidden[0]
        log_probs = (hidden @ model.output_weight.T).log_softmax(-1)
    expected = log_probs[range(5), [*target, EOS]]
    torch.testing.assert_close(torch.tensor(scored.log_probs), expected, atol=1e-4, rtol=1e-4)


def test_other_attentions_are_refused() -> None:
    from mtkit.benchmark.peers.weights import check_plain

    recipes: list[Recipe] = [
        make_recipe({"attention": {"name": "linear"}}),
        make_recipe({"attention": {"options": {"positions": "rotary"}}}),
    ]
    for recipe in recipes:
        with pytest.raises(MtkitError, match="full attention"):
            check_plain(recipe, "ctranslate2")
    check_plain(make_recipe({}), "ctranslate2")


def test_its_vocabulary_map_lets_come_what_a_shortlist_does(tmp_path: Path) -> None:
    from mtkit.benchmark.peers.ctranslate2 import SPECIALS, convert, write_map

    model, run = model_and_run()
    convert(run, model, tmp_path / "model")
    translations = torch.zeros(V, 3, dtype=torch.int32)
    translations[5], translations[9] = torch.tensor([5, 20, 21]), torch.tensor([9, 22, 0])
    lexicon = Lexicon(translations, torch.tensor([30, 31], dtype=torch.int32))
    write_map(lexicon.cut(1), tmp_path / "model" / "vmap.txt")
    translator = ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", intra_threads=1)
    source = [["5", "9", SPECIALS[EOS]]]
    free, short = (
        translator.translate_batch(
            source, sampling_topk=0, num_hypotheses=30, max_decoding_length=20, use_vmap=each, beam_size=1
        )[0].hypotheses
        for each in (False, True)
    )
    may = {str(piece) for piece in lexicon.cut(1).shortlist(torch.tensor([[5, 9, EOS]])).tolist()}
    assert {piece for each in short for piece in each} <= may | set(SPECIALS)
    assert not {piece for each in free for piece in each} <= may | set(SPECIALS)
    assert {"20", "22", "30"} <= {piece for each in short for piece in each}
