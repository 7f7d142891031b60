"""Greedy decoding: the most likely piece at each step."""

import torch
from torch import Tensor

from mtkit.decoding.search.continuations import Forbid, best_continuations
from mtkit.decoding.search.contract import Hypotheses, SourceBatch
from mtkit.decoding.search.walk import walk
from mtkit.model.logits import Logits
from mtkit.model.network import Model
from mtkit.recipe import DecodingSettings


def greedy_search(model: Model, batch: SourceBatch, settings: DecodingSettings) -> Hypotheses:
    """One hypothesis per segment; among equally likely pieces, the one with the lowest id is taken."""

    def choose(
        logits: Logits, rows: Tensor, step: int, ends: Tensor | None, forbid: Forbid | None
    ) -> tuple[Tensor, Tensor]:
        log_prob, _, piece = best_continuations(logits, torch.zeros(len(rows), 1, device=rows.device), 1, ends, forbid)
        return piece, log_prob

    return walk(
        model,
        batch,
        choose,
        hypotheses=1,
        length_penalty=settings.length_penalty,
        no_repeat_ngram=settings.no_repeat_ngram,
    )
