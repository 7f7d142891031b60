"""What training pairs say of other text: how long translations may be, and how much is usual at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.data.lengths import MOST_SENTENCES, PERCENTILES, ROOM, Bin, Lengths, lengths_of
from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.decoding.engines.model_engine import Ensemble, ModelEngine
from mtkit.decoding.lines.source import SourceLines, TrainedOn, Usual
from mtkit.decoding.translate import translate_lines
from mtkit.model.network import Logits
from mtkit.recipe import DecodingSettings, make_recipe
from mtkit.text.tokenizer import BREAK, EOS
from tests.decoding.echo import Echo
from tests.decoding.trained import make_run, sentences


def lengths(ratio: float, pieces: int = 30, counts: dict[int, int] | None = None) -> Lengths:
    """Those of pairs with one ratio, by default with any number of sentences."""
    bin_ = Bin(longest=40, pairs=500, mean=ratio, spread=0.0, most=ratio)
    return Lengths(
        bins=(bin_,),
        percentiles=dict.fromkeys(PERCENTILES, pieces),
        sentences={MOST_SENTENCES: 1} if counts is None else counts,
    )


SEGMENT = [5, 6, 7, 8, EOS]
JOINED = [5, 6, BREAK, 7, BREAK, 8, 9, 10, EOS]
UNKNOWN = Lengths(bins=(), percentiles={})


def test_of_an_imported_run_nothing_is_known() -> None:
    assert TrainedOn().limit(SEGMENT, None, None) == 2 * 5 + 20
    assert TrainedOn().limit(JOINED, None, None) == 2 * 9 + 3 * 20
    assert TrainedOn([[UNKNOWN]]).limit(SEGMENT, None, None) == 30
    assert TrainedOn().usual(None) is TrainedOn([[UNKNOWN]]).usual(0) is None


def test_a_limit_is_that_of_the_training_pairs() -> None:
    assert TrainedOn([[lengths(6.0)]]).limit(SEGMENT, None, None) == 30 + ROOM
    assert TrainedOn([[lengths(6.0)]]).limit(SEGMENT, None, 24) == 24
    assert TrainedOn([[lengths(6.0), lengths(5.0)]]).limit(SEGMENT, 1, None) == 25 + ROOM
    assert TrainedOn([[lengths(2.0)], [lengths(6.0)], [lengths(1.0)]]).limit(SEGMENT, None, None) == 30 + ROOM


def test_pairs_that_are_all_alike_cut_no_text_of_another_kind() -> None:
    for known in (TrainedOn([[lengths(0.5)]]), TrainedOn([[lengths(1.0)]])):
        assert known.limit(SEGMENT, None, None) == 2 * 5 + 20
        assert known.limit(SEGMENT, None, None, 7) == 7


def test_a_limit_that_was_given_holds() -> None:
    for known in (TrainedOn(), TrainedOn([[lengths(6.0)]])):
        assert known.limit(SEGMENT, None, None, 7) == 7
        assert known.limit(SEGMENT, None, 6, 7) == 6
        assert known.limit(JOINED, None, None, 7) == 21


def test_joined_lines_have_a_limit_each() -> None:
    known = TrainedOn([[lengths(30.0)]])
    assert known.limits(JOINED, None) == [30 * 3 + ROOM, 30 * 2 + ROOM, 30 * 4 + ROOM]
    assert known.limit(JOINED, None, None) == 30 * (3 + 2 + 4) + 3 * ROOM
    assert known.limits(JOINED, None, 7) == [7, 7, 7]


def test_usual_is_what_a_share_of_the_training_lines_have() -> None:
    def usual(counts: dict[int, int]) -> int | None:
        found = TrainedOn([[lengths(1.0, counts=counts)]]).usual(None)
        assert found is not None
        assert found.pieces == 30
        return found.sentences

    assert usual({1: 99, 2: 1}) == 1
    assert usual({1: 90, 2: 7, 3: 3}) == 2
    assert usual({1: 90, 2: 4, 9: 6}) == 9
    assert usual({1: 90, MOST_SENTENCES: 10}) is None  # that many or more, of which the longest may have any number
    assert usual({1: 1}) == 1
    assert usual({}) == 1


def test_an_ensemble_translates_what_is_usual_for_all() -> None:
    one, other = lengths(1.0, 30, {1: 9, 2: 9}), lengths(1.0, 20, {1: 9, 3: 9})
    assert TrainedOn([[one], [other]]).usual(None) == Usual(2, 20)
    assert TrainedOn([[one], [lengths(1.0)]]).usual(None) == Usual(2, 30)
    assert TrainedOn([[one], [UNKNOWN]]).usual(None) is None


def test_a_fingerprint_tells_all_apart() -> None:
    several = [
        TrainedOn(),
        TrainedOn([[lengths(1.0)]]),
        TrainedOn([[lengths(1.5)]]),
        TrainedOn([[lengths(1.0), lengths(1.0)]]),
        TrainedOn([[lengths(1.0)], [lengths(1.0)]]),
        TrainedOn([[lengths(1.0, counts={1: 4})]]),
    ]
    assert len({each.fingerprint for each in several}) == len(several)
    assert TrainedOn([[lengths(1.0)]]).fingerprint == several[1].fingerprint


class Sixfold(Echo):
    """Writes the source six times."""

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> Tensor:
        copy = super().encode(source, source_valid, task=task)
        rows = [[piece for piece in row if piece > EOS] * 6 for row in copy.tolist()]
        longest = max(map(len, rows))
        return torch.tensor([row + [EOS] * (longest - len(row)) for row in rows])

    def step(
        self, token: Tensor, state: dict[str, Any], *, need_weights: bool = False
    ) -> tuple[Logits, dict[str, Any], Tensor | None]:
        logits, state, weights = super().step(token, state, need_weights=need_weights)
        whole = logits.whole()
        whole[..., EOS] -= 10.0  # beams do not end early, for want of anything likelier
        return Logits.known(whole), state, weights


@pytest.fixture(scope="module")
def sixfold(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Pairs whose target is the source six times, as in semantic parsing."""
    folder = tmp_path_factory.mktemp("sixfold")
    given = {}
    for number, side in enumerate(("train", "valid")):
        paths = folder / f"{side}.source", folder / f"{side}.target"
        lines = sentences(200 if side == "train" else 12, seed=number)
        paths[0].write_text("".join(f"{line}\n" for line in lines))
        paths[1].write_text("".join(" ".join([line] * 6) + "\n" for line in lines))
        given[side] = {"source": str(paths[0]), "target": str(paths[1])}
    recipe = make_recipe({"data": {"folder": str(folder / "data"), **given, "tokenizer": {"vocabulary": 300}}})
    prepare(recipe.data)
    return open_prepared(recipe.data.folder)


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
@pytest.mark.parametrize("models", [1, 2])
def test_targets_six_times_as_long_as_their_sources_come_whole(sixfold: Prepared, method: str, models: int) -> None:
    side, tokenizers = sixfold.valid, sixfold.tokenizers
    assert side.source_text is not None
    assert side.target_text is not None
    several = [Sixfold(tokenizers.target.size) for _ in range(models)]
    model = Ensemble(several) if models > 1 else several[0]  # type: ignore[arg-type]
    settings = DecodingSettings.model_validate({"method": method, "beam": 2})

    def translated(trained_on: TrainedOn) -> list[str]:
        found = translate_lines(
            ModelEngine(model, settings), tokenizers, SourceLines(list(side.source_text or ()), trained_on=trained_on)
        )
        return [each[0].text for each in found]

    known = TrainedOn([list(lengths_of(sixfold, 1024).values())] * models)
    assert translated(known) == list(side.target_text)
    assert translated(TrainedOn()) != list(side.target_text)  # cut, as without known lengths


def test_ordinary_translations_run_no_longer_than_before(sixfold: Prepared) -> None:
    """A hypothesis that never ends costs no more where sides are about equally long."""
    side = sixfold.train
    known = TrainedOn([[*lengths_of(sixfold, 1024).values()]])
    alike = TrainedOn([[lengths(1.3)]])
    for pieces in set(side.source.lengths.tolist()):
        segment = [9] * pieces + [EOS]
        assert alike.limit(segment, None, None) <= TrainedOn().limit(segment, None, None)
        assert known.limit(segment, None, None) <= 7 * (pieces + 1) + ROOM


def test_a_run_keeps_what_it_was_trained_on(tmp_path: Path) -> None:
    old = make_run(tmp_path).run
    assert TrainedOn.of([old]) == TrainedOn()
