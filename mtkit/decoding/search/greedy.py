"""Greedy decoding: the most likely piece at each step."""

from mtkit.decoding.search.contract import Hypotheses, SourceBatch
from mtkit.decoding.search.selection import first_best
from mtkit.decoding.search.walk import walk
from mtkit.model.network import Model
from mtkit.recipe import DecodingSettings


def greedy_search(model: Model, batch: SourceBatch, settings: DecodingSettings) -> Hypotheses:
    """One hypothesis per segment; among equally likely pieces, the one with the lowest id is taken."""
    return walk(
        model,
        batch,
        lambda scores, rows, step: first_best(scores),
        hypotheses=1,
        length_penalty=settings.length_penalty,
        no_repeat_ngram=settings.no_repeat_ngram,
    )
