"""Decoding without branches: each step extends every hypothesis by one chosen piece."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mtkit.attention.contract import close_gaps
from mtkit.data.tokenizer import BOS, EOS, PAD
from mtkit.decoding.search.continuations import Forbid
from mtkit.decoding.search.contract import Hypotheses, SourceBatch, begin, ending, still_running
from mtkit.decoding.search.ngrams import forbid_repeats
from mtkit.decoding.search.penalties import normalised
from mtkit.model.logits import Logits
from mtkit.model.network import Model

Choose = Callable[[Logits, Tensor, int, Tensor | None, Forbid | None], tuple[Tensor, Tensor]]
"""(logits (B', N, V), segments (B',), step, and as `log_probs_of` takes them which end, and what forbids) to the chosen
pieces and their log-probabilities, (B', N) each."""


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
        batch.check()
        logits, state, _ = model.step(token, state)
        ends, forbid = ending(batch, rows, step), None
        if no_repeat_ngram:
            forbid = partial(forbid_repeats, pieces=pieces[rows, :, :step], size=no_repeat_ngram)
        token, log_prob = choose(logits, rows, step, ends, forbid)
        broken = ~log_prob.isfinite()
        token = token.masked_fill(broken, EOS).masked_fill(done, PAD)
        pieces[rows, :, step] = token
        log_probs[rows] += log_prob.masked_fill(broken, -torch.inf).masked_fill(done, 0.0)
        done |= token == EOS
        running = still_running(done.all(1), step)
        if running is not None:
            if not len(running):
                break
            state = close_gaps(state, running)
            rows, token, done = rows[running], token[running], done[running]
    lengths = (pieces != PAD).sum(-1)
    return Hypotheses(pieces, log_probs, normalised(log_probs, lengths, length_penalty)).ranked()
