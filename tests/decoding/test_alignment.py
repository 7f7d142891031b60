"""Alignments are the attention of a forced translation."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtkit.attention.contract import ROLES
from mtkit.decoding.alignment import align
from mtkit.decoding.forced import forced_weights
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError, MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.tokenizer import BOS, EOS
from tests.decoding.trained import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "transformer": make_run(folder).run,
        "rnn": make_run(folder, name="two", attention="additive", architecture="rnn").run,
        "linear": make_run(folder, name="three", attention="linear", architecture="rnn").run,
    }


@pytest.mark.parametrize("name", ["transformer", "rnn"])
@torch.no_grad()
def test_rows_are_the_weights_of_the_pieces_before(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    model, tokenizers = run.load_model(), run.tokenizers
    found = align(model, tokenizers, "the boy sleeps", "der Junge")
    words = tokenizers.source.encode("the boy sleeps")
    pieces = [*tokenizers.target.encode("der Junge"), EOS]
    assert found.source == [*map(tokenizers.source.piece, words), "</s>"]
    assert found.target == [*map(tokenizers.target.piece, pieces[:-1]), "</s>"]
    state = model.eval().start(model.encode(torch.tensor([[*words, EOS]])))
    for row, piece in enumerate([BOS, *pieces[:-1]]):
        _, state, weights = model.step(torch.tensor([[piece]]), state, need_weights=True)
        assert weights is not None
        torch.testing.assert_close(found.weights[row], weights[0, 0], atol=1e-6, rtol=0)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(len(pieces)))


@pytest.mark.parametrize("name", ["transformer", "rnn"])
@torch.no_grad()
def test_every_layer_and_head_has_its_weights(runs: dict[str, Run], name: str) -> None:
    """Each adds up to one, in its shape; a batch with padding against each of its rows alone."""
    run = runs[name]
    model, tokenizers = run.load_model(), run.tokenizers
    found = align(model, tokenizers, "the boy sleeps", "der Junge")
    settings = run.recipe.model
    roles = {"encoder": settings.encoder_layers, "decoder": settings.decoder_layers, "cross": settings.decoder_layers}
    roles = roles if name == "transformer" else {"cross": 1}
    assert {role: len(stack) for role, stack in found.layers.items()} == roles
    source = [[*tokenizers.source.encode(each), EOS] for each in ("the boy sleeps", "the old dog sees a cat")]
    target = [[*tokenizers.target.encode(each), EOS] for each in ("der Junge", "der alte Hund")]
    together = forced_weights(model, source, target, [None, None], torch.device("cpu"), ROLES)
    for role, stack in found.layers.items():
        for layer, whole in zip(stack, together[role], strict=True):
            assert layer is not None
            assert whole is not None
            rows = len(source[0]) if role == "encoder" else len(target[0])
            columns = len(target[0]) if role == "decoder" else len(source[0])
            assert layer.shape == (2, rows, columns)
            torch.testing.assert_close(layer.sum(2), torch.ones(layer.shape[:2]))
            torch.testing.assert_close(layer, whole[0, :, :rows, :columns], atol=1e-5, rtol=0)
    (only,) = align(model, tokenizers, "the boy sleeps", "der Junge", roles=["cross"]).layers.items()
    assert only[0] == "cross"
    if name == "transformer":
        assert found.read == ["<s>", *found.target[:-1]]
        first = found.layers["decoder"][0]
        assert first is not None
        assert not first.triu(1).any()


def test_what_has_no_alignment_is_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    model, tokenizers = runs["rnn"].load_model(), runs["rnn"].tokenizers
    with pytest.raises(DataError, match="blank"):
        align(model, tokenizers, " \t", "der Junge")
    with pytest.raises(DataError, match=r"the source has [\d,]+ pieces"):
        align(model, tokenizers, "boy " * 500, "der Junge")
    with pytest.raises(DataError, match=r"the target has [\d,]+ pieces"):
        align(model, tokenizers, "boy", "Junge " * 500)
    with pytest.raises(MtkitError, match="no weights"):
        align(runs["linear"].load_model(), tokenizers, "boy", "Junge")


def test_the_runs_own_translation_keeps_its_pieces(runs: dict[str, Run]) -> None:
    run = runs["transformer"]
    translator = Translator([run], DecodingSettings(method="greedy", max_pieces=5))
    ((translation,),) = translator.translate(["the boy sleeps"])
    assert list(translation.pieces) != [*run.tokenizers.target.encode(translation.text), EOS]
    names = [*map(run.tokenizers.target.piece, translation.pieces[:-1]), "</s>"]
    for target in (None, translation):
        assert translator.align("the boy sleeps", target).target == names
    assert [step.piece for step in translator.output_steps("the boy sleeps")] == names
    several = replace(translation, text="der Junge", parts=2)
    assert translator.align("the boy sleeps", several).target == translator.align("the boy sleeps", "der Junge").target


def test_lines_as_long_as_the_model_takes_are_aligned(runs: dict[str, Run]) -> None:
    model, tokenizers = runs["transformer"].load_model(), runs["transformer"].tokenizers
    texts = [" ".join(["a"] * words) for words in range(1, model.longest_source)]
    longest = {len(tokenizers.source.encode(text)): text for text in texts}[model.longest_source - 1]
    assert align(model, tokenizers, longest, longest).weights.shape == (model.longest_target, model.longest_source)
    for pair in ((f"{longest} a", "a"), ("a", f"{longest} a")):
        with pytest.raises(DataError, match="shorten it"):
            align(model, tokenizers, *pair)
