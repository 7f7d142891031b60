"""Heads that align words, chosen by weights made by hand."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtkit.decoding import forced
from mtkit.decoding.alignment_heads import FILE, Heads, best_heads, heads_for
from mtkit.decoding.held_out import held_out
from mtkit.decoding.ibm_model_1 import Probabilities, learn_probabilities
from mtkit.errors import RunError
from mtkit.runs import Run
from mtkit.storage.files import digest
from mtkit.text.tokenizer import EOS
from tests.decoding.trained import Trained, make_run


@pytest.fixture(scope="module")
def sentence_run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("run"))


def likeliest(lexicon: Probabilities, source: Sequence[int], target: Sequence[int]) -> torch.Tensor:
    """(T, S) one where the source piece, tags and the end mark too, is the likeliest."""
    found = lexicon.of(source, target)
    return torch.from_numpy(found == found.max(1, keepdims=True)).float()


@pytest.mark.parametrize("late", [False, True])
def test_the_head_that_follows_the_lexicon_is_found(
    sentence_run: Trained, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    lexicon = learn_probabilities(sentence_run.prepared)

    def weights(
        network: Any, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], *others: Any
    ) -> dict[str, list[torch.Tensor | None]]:
        shape = (len(sources), 3, max(map(len, targets)) + 1, max(map(len, sources)))
        noise = [torch.rand(shape, generator=torch.Generator().manual_seed(layer)) * 0.9 for layer in range(2)]
        for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
            noise[1][row, 2, late : len(target) + late, : len(source)] = likeliest(lexicon, source, target)
        return {"cross": [noise[0], None, noise[1]]}

    monkeypatch.setattr(forced, "forced_weights", weights)
    side = held_out(sentence_run.prepared, "valid")
    found = best_heads(sentence_run.run.load_model("best"), sentence_run.run.tokenizers, side, lexicon)
    assert found.members == ((2, 2),)
    assert found.shifted == late
    assert found.agreement is not None
    assert found.agreement > 0.9
    assert str(found) == "layer 3 head 3"


def test_they_are_kept_for_these_weights(sentence_run: Trained, tmp_path: Path) -> None:
    run, said = sentence_run.run, list[str]()
    network, weights = run.load_model("best"), digest(run.weights("best"))
    none = heads_for(run, network, weights, tmp_path / "nothing", say=said.append)
    assert none == Heads()
    assert "mean of the last layer's heads" in said[0]
    assert not (run.folder / FILE).exists()
    chosen = heads_for(run, network, weights, sentence_run.prepared.folder, say=said.append)
    assert chosen.members
    assert "follow the lexicon" in said[1]
    assert heads_for(run, network, weights, tmp_path / "nothing", say=said.append) == chosen
    assert len(said) == 2
    (run.folder / FILE).write_text("[]")
    with pytest.raises(RunError, match="delete it"):
        heads_for(run, network, weights, sentence_run.prepared.folder)
    (run.folder / FILE).unlink()


def test_they_are_chosen_after_a_training_removed_the_checkpoint(sentence_run: Trained, tmp_path: Path) -> None:
    shutil.copytree(sentence_run.run.folder, tmp_path / "run")
    run = Run(tmp_path / "run")
    network, weights = run.load_model("best"), digest(run.weights("best"))
    shutil.rmtree(run.folder / "checkpoints")
    assert heads_for(run, network, weights, sentence_run.prepared.folder).weights == weights


def test_a_removed_run_is_not_made_again_by_its_heads(sentence_run: Trained, tmp_path: Path) -> None:
    """A server may still translate by it, and a folder of heads alone would be in the way of a new training."""
    shutil.copytree(sentence_run.run.folder, tmp_path / "run")
    run, said = Run(tmp_path / "run"), list[str]()
    network, weights, _ = run.load_model("best"), digest(run.weights("best")), run.tokenizers
    shutil.rmtree(run.folder)
    assert heads_for(run, network, weights, sentence_run.prepared.folder, say=said.append).members
    assert said[0].endswith("run was removed")
    assert not run.folder.exists()


def test_heads_are_not_chosen_by_the_pieces_of_a_run_that_replaced_it(sentence_run: Trained, tmp_path: Path) -> None:
    shutil.copytree(sentence_run.run.folder, tmp_path / "run")
    run, said = Run(tmp_path / "run"), list[str]()
    network, weights, _ = run.load_model("best"), digest(run.weights("best")), run.tokenizers
    other = make_run(tmp_path / "other", vocabulary=350)
    shutil.rmtree(run.folder)
    shutil.copytree(other.run.folder, run.folder)
    assert heads_for(run, network, weights, other.prepared.folder, say=said.append) == Heads()
    assert "has other pieces than" in said[0]


def test_probabilities_are_those_of_the_pairs() -> None:
    lexicon = Probabilities(np.array([2 * 10 + 3, 4 * 10 + 5]), np.array([0.25, 0.75]), 10)
    assert lexicon.of([4, 2, EOS], [3, 5]).tolist() == [[0, 0.25, 0], [0.75, 0, 0]]


def test_a_shifted_head_aligns_a_piece_by_the_step_after_it_and_the_end_by_its_own() -> None:
    weights = torch.rand(2, 4, 3)
    rows = Heads(((0, 1),), shifted=True).rows([weights])
    assert torch.equal(rows, weights[1, [1, 2, 3, 3]])
