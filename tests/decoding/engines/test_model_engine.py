"""mtkit's own engine: what tells two of them apart."""

from dataclasses import replace

import torch

from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.lexicon import Lexicon
from mtkit.recipe import DecodingSettings
from tests.decoding.tiny import TinyModel
from tests.decoding.trained import three_threads


def test_what_decides_its_hypotheses_is_its_identity() -> None:
    engine = ModelEngine(TinyModel(), DecodingSettings())
    assert replace(engine, settings=DecodingSettings(batch_tokens=50)).identity == engine.identity
    assert replace(engine, dtype=torch.float32).identity == engine.identity
    assert replace(engine, settings=DecodingSettings(beam=2)).identity != engine.identity
    assert replace(engine, dtype=torch.bfloat16).identity != engine.identity


def test_machines_with_other_cores_make_parts_of_one_translation() -> None:
    """With a shortlist, what else is in a batch decides which pieces may come; each result is one of these settings."""
    lexicon = Lexicon(torch.zeros(8, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    engine = ModelEngine(TinyModel(), DecodingSettings(), lexicon=lexicon)
    assert engine.identity != replace(engine, lexicon=None).identity
    with three_threads():
        assert replace(engine, settings=DecodingSettings(batch_tokens=50)).identity == engine.identity
