"""Alignments are the attention of a forced translation."""

from pathlib import Path

import pytest
import torch

from mtkit.data.tokenizer import BOS, EOS
from mtkit.decoding.alignment import align
from mtkit.errors import DataError, MtkitError
from mtkit.runs import Run
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
