"""mtkit's own engine: what tells two of them apart."""

from dataclasses import replace

import torch

from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.lexicon import Lexicon
from mtkit.recipe import DecodingSettings
from tests.decoding.tiny import TinyModel


def test_what_decides_its_hypotheses_is_its_identity() -> None:
    engine = ModelEngine(TinyModel(), DecodingSettings())
    assert replace(engine, settings=DecodingSettings(batch_tokens=50)).identity == engine.identity
    assert replace(engine, dtype=torch.float32).identity == engine.identity
    assert replace(engine, settings=DecodingSettings(beam=2)).identity != engine.identity
    assert replace(engine, dtype=torch.bfloat16).identity != engine.identity


def test_batches_count_where_they_decide() -> None:
    lexicon = Lexicon(torch.zeros(8, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    smaller = DecodingSettings(batch_tokens=50)
    engine = ModelEngine(TinyModel(), DecodingSettings(), lexicon=lexicon)
    assert replace(engine, settings=smaller).identity != engine.identity
    int8 = ModelEngine(TinyModel(), DecodingSettings(), torch.int8)  # each row has a scale of its own
    assert replace(int8, settings=smaller).identity == int8.identity
