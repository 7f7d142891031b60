"""CTranslate2 behind the seam: the hypotheses, scores, limits and shortlists of mtkit's own engine."""

import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import pad

from mtkit.decoding.contract import Hypotheses, SourceBatch, StoppedError
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.lines.batches import padded
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import EOS, PAD
from tests.decoding.engines.plain import V, recipe_of, reversing_model, sources_of
from tests.decoding.tiny import batch_of
from tests.decoding.trained import three_threads

pytestmark = pytest.mark.peer
ctranslate2 = pytest.importorskip("ctranslate2")

from mtkit.decoding.engines.ctranslate2_engine import LONGEST_UNSTOPPED  # noqa: E402

SEGMENTS = 100


@cache
def model_of(attention: str = "full", options: tuple[tuple[str, Any], ...] = (), **changes: Any) -> Network:
    return reversing_model(recipe_of(attention, dict(options), **changes))


def engine_of(model: Network, *, lexicon: Lexicon | None = None, **settings: Any) -> Any:
    from mtkit.decoding.engines.ctranslate2_conversion import convert
    from mtkit.decoding.engines.ctranslate2_engine import CTranslate2Engine

    with TemporaryDirectory() as folder:
        convert(model, Path(folder) / "model")
        files = {each.name: each.read_bytes() for each in (Path(folder) / "model").iterdir()}
    return CTranslate2Engine(model, DecodingSettings.model_validate(settings), lexicon=lexicon, files=files)


class Counted(ModelEngine):
    """mtkit's engine, which counts the segments it decodes."""

    segments = 0

    def translate(self, batch: SourceBatch) -> Hypotheses:
        Counted.segments += len(batch.limits)
        return super().translate(batch)


def both(engine: Any, batch: SourceBatch) -> tuple[Hypotheses, Hypotheses, int]:
    """The hypotheses of mtkit and of CTranslate2, as wide, and how many segments mtkit decoded for the latter."""
    from mtkit.decoding.engines import ctranslate2_engine

    with engine.own.ready():
        expected = engine.own.translate(batch)
    Counted.segments = 0
    with patch.object(ctranslate2_engine, "ModelEngine", Counted), engine.ready():
        found = engine.translate(batch)
    width = batch.longest - expected.pieces.shape[2]
    return replace(expected, pieces=pad(expected.pieces, (0, width), value=PAD)), found, Counted.segments


def assert_alike(expected: Hypotheses, found: Hypotheses) -> None:
    """The pieces of 99% of the segments, all their hypotheses among them, and the scores to 1e-3."""
    assert found.pieces.shape == expected.pieces.shape
    same = (found.pieces == expected.pieces).all(-1).all(-1)
    assert same.float().mean() >= 0.99
    for name in ("scores", "log_probs"):
        torch.testing.assert_close(getattr(found, name)[same], getattr(expected, name)[same], atol=1e-3, rtol=0)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "post"},
        {"activation": "gelu"},
        {"activation": "swiglu", "positions": "learned"},
        {"positions": "none", "tie": "none"},
        {"attention": "multi-query", "tie": "decoder"},
        {"attention": "grouped-query", "positions": "sinusoidal-cat"},
        {"attention": "multi-query", "options": (("positions", "rotary"),), "positions": "none"},
    ],
    ids=str,
)
def test_it_finds_the_hypotheses_of_mtkit(changes: dict[str, Any], beam: int) -> None:
    settings = {"beam": beam, "n_best": beam} if beam > 1 else {"method": "greedy"}
    expected, found, again = both(engine_of(model_of(**changes), **settings), batch_of(sources_of(SEGMENTS), 20))
    assert_alike(expected, found)
    assert again < SEGMENTS * 3 / 4
    assert len({tuple(each) for each in found.pieces[:, 0].tolist()}) > SEGMENTS / 4


def test_a_long_batch_that_may_be_stopped_is_left_to_mtkit() -> None:
    engine = engine_of(model_of(), method="greedy")
    for limit, whole in ((LONGEST_UNSTOPPED, False), (LONGEST_UNSTOPPED + 1, True)):
        batch = replace(batch_of(sources_of(20), limit), stopped=lambda: False)
        expected, found, again = both(engine, batch)
        assert (again == 20) == whole
        assert_alike(expected, replace(found, pieces=pad(found.pieces, (0, limit - found.pieces.shape[2]), value=PAD)))
    with engine.ready(), pytest.raises(StoppedError):
        engine.translate(replace(batch, stopped=lambda: True))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_scores_are_normalised_alike(alpha: float) -> None:
    engine = engine_of(model_of(), beam=4, n_best=4, length_penalty=alpha)
    expected, found, _ = both(engine, batch_of(sources_of(SEGMENTS), 20))
    assert_alike(expected, found)


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_each_segment_has_a_limit_of_its_own(method: str) -> None:
    limits = [1 + row % 9 for row in range(SEGMENTS)]
    expected, found, again = both(engine_of(model_of(), method=method), batch_of(sources_of(SEGMENTS), limits))
    assert_alike(expected, found)
    assert (found.lengths <= torch.tensor(limits)[:, None]).all()
    assert (found.lengths[:, 0] == torch.tensor(limits)).any()
    assert 0 < again < SEGMENTS


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_a_shortlist_is_that_of_the_batch(method: str) -> None:
    generator = torch.Generator().manual_seed(3)
    translations = torch.randint(EOS + 1, V, (V, 3), generator=generator, dtype=torch.int32)
    translations[PAD] = PAD
    lexicon = Lexicon(translations, torch.tensor([7], dtype=torch.int32))
    free = engine_of(model_of(), method=method)
    short = replace(free, lexicon=lexicon)
    for first in range(0, SEGMENTS, 4):  # a batch of few segments, so that most pieces may not come
        batch = batch_of(sources_of(SEGMENTS)[first : first + 4], [4, 20, 20, 20])
        expected, found, _ = both(short, batch)
        assert_alike(expected, found)
        assert set(found.pieces.unique().tolist()) <= {PAD, *lexicon.shortlist(batch.source).tolist()}
    assert short.identity != free.identity


def test_pieces_that_never_come_do_not_come() -> None:
    model = reversing_model(recipe_of(tie="none"))
    with torch.no_grad():  # as likely as other pieces
        model.output_weight[:EOS] = model.output_weight[7 : 7 + EOS]
    engine = engine_of(model, beam=4, n_best=4)
    expected, found, again = both(engine, batch_of(sources_of(20), 12))
    assert again > 0
    assert found.pieces[found.pieces != PAD].min() >= EOS
    assert expected.pieces[expected.pieces != PAD].min() >= EOS


def test_a_model_that_gives_no_numbers_ends_without_hypotheses() -> None:
    model = reversing_model(recipe_of(tie="none"), updates=1)
    with torch.no_grad():
        model.source_embedding.tokens.weight[9] = torch.nan
    _, found, _ = both(engine_of(model, beam=3), batch_of([[9, 8], [7, 8]], 9))
    assert (found.log_probs[0] == -torch.inf).all()
    assert found.log_probs[1].isfinite().all()


def test_given_translations_have_the_likelihood_of_mtkit() -> None:
    engine = engine_of(model_of())
    source = padded([[*each, EOS] for each in sources_of(9)], torch.device("cpu"))
    target = padded([[*each, EOS] for each in sources_of(18)[9:]], torch.device("cpu"))
    with engine.ready(), torch.inference_mode():
        torch.testing.assert_close(engine.log_probs(source, target), engine.own.log_probs(source, target))


def test_what_decides_its_hypotheses_is_its_identity() -> None:
    engine = engine_of(model_of(), beam=3)
    assert engine.identity != engine.own.identity
    assert "ctranslate2" in engine.identity["engine"]
    with three_threads():
        assert replace(engine).identity == engine.identity
    other = replace(engine, dtype=torch.int8)
    assert other.identity != engine.identity


def test_engines_that_differ_in_their_settings_share_one_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, load = list[object](), ctranslate2.Translator
    monkeypatch.setattr(ctranslate2, "Translator", lambda *given, **how: loads.append(how) or load(*given, **how))
    engine, batch = engine_of(model_of(), beam=3), batch_of(sources_of(3), 9)
    others = [engine.with_settings(DecodingSettings(beam=beam)) for beam in (1, 2, 3)]
    for one in (*others, engine, engine.with_settings(DecodingSettings(beam=4))):
        with one.ready():
            one.translate(batch)
    assert len(loads) == 1
    shortlist = Lexicon(torch.full((V, 3), EOS, dtype=torch.int32), torch.tensor([7], dtype=torch.int32))
    copies = (replace(engine, lexicon=shortlist), replace(engine, dtype=torch.int8), pickle.loads(pickle.dumps(engine)))
    for one in copies:
        with one.ready():
            one.translate(batch)
    assert len(loads) == 4


def test_int8_differs_little() -> None:
    batch, scores = batch_of(sources_of(30), 20), []
    for dtype in (None, torch.int8):
        engine = replace(engine_of(model_of(), beam=3), dtype=dtype)
        with engine.ready():
            scores.append(engine.translate(batch).scores[:, 0])
    assert not torch.equal(*scores)
    assert (scores[0] - scores[1]).abs().median() < 0.1
