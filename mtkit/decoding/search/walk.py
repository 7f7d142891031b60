"""Decoding without branches: each step extends every hypothesis by one chosen piece."""

from collections.abc import Callable

import torch
from torch import Tensor

from mtkit.attention import reorder
from mtkit.data.tokenizer import BOS, EOS, PAD
from mtkit.decoding.search.contract import Hypotheses, SourceBatch, begin, restrict, still_running
from mtkit.decoding.search.ngrams import forbid_repeats
from mtkit.decoding.search.penalties import normalised
from mtkit.model.network import Model

Choose = Callable[[Tensor, Tensor, int], Tensor]
"""(log-probabilities (B', N, V), segments (B',), step) to the chosen pieces (B', N); those of forbidden pieces are
-inf."""


def walk(
    model: Model, batch: SourceBatch, choose: Choose, *, hypotheses: int, length_penalty: float, no_repeat_ngram: int
) -> Hypotheses:
    """The hypotheses (B, N) made by choosing piece after piece, until EOS is chosen, or forced at the limit.

    A hypothesis without any piece of finite probability ends there with a log-probability of -inf.
    """
    size, device = len(batch.limits), batch.source.device
    pieces = torch.full((size, hypotheses, batch.longest), PAD, device=device)
    log_probs = torch.zeros(size, hypotheses, device=device)

    state = begin(model, batch, hypotheses)
    rows = torch.arange(size, device=device)  # the segments that are still decoded
    token = torch.full((size, hypotheses), BOS, device=device)
    done = torch.zeros(size, hypotheses, dtype=torch.bool, device=device)
    for step in range(batch.longest):
        logits, state, _ = model.step(token, state)
        # over all pieces of the batch: the score is the probability of the model, forbidden pieces included
        scores = torch.log_softmax(logits, -1, out=logits)
        restrict(scores, batch, rows, step)
        if no_repeat_ngram:
            forbid_repeats(scores, pieces[rows, :, :step], no_repeat_ngram)
        token = choose(scores, rows, step)
        log_prob = scores.gather(-1, token[..., None]).squeeze(-1)
        broken = ~log_prob.isfinite()
        token = token.masked_fill(broken, EOS).masked_fill(done, PAD)
        pieces[rows, :, step] = token
        log_probs[rows] += log_prob.masked_fill(broken, -torch.inf).masked_fill(done, 0.0)
        done |= token == EOS
        running = still_running(done.all(1), step)
        if running is not None:
            if not len(running):
                break
            state = reorder(state, running)
            rows, token, done = rows[running], token[running], done[running]
    lengths = (pieces != PAD).sum(-1)
    return Hypotheses(pieces, log_probs, normalised(log_probs, lengths, length_penalty)).ranked()
