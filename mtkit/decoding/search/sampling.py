"""Greedy decoding and sampling: each step extends every hypothesis by one chosen piece."""

from functools import partial

import torch
from torch import Tensor

from mtkit.attention.states import close_gaps
from mtkit.decoding.contract import Hypotheses, SourceBatch
from mtkit.decoding.search.continuations import (
    allowed_log_probs,
    begin,
    best,
    best_continuations,
    forbid_repeats,
    normalised,
    still_running,
)
from mtkit.decoding.search.endings import Lines
from mtkit.model.network import Model
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import BOS, EOS, PAD

# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the constants as signed 64-bit integers, whose products wrap around
GAMMA = 0x9E3779B97F4A7C15 - 2**64
FIRST = 0xBF58476D1CE4E5B9 - 2**64
SECOND = 0x94D049BB133111EB - 2**64


def greedy_search(model: Model, batch: SourceBatch, settings: DecodingSettings) -> Hypotheses:
    """Return one hypothesis per segment: the likeliest piece at each step; of equally likely ones, the lowest id."""
    return _generate(model, batch, settings, hypotheses=1, sampling=False)


def sample(model: Model, batch: SourceBatch, settings: DecodingSettings) -> Hypotheses:
    """`settings.hypotheses` independent draws per segment, the likeliest first.

    The draws of a segment depend on the seed and its key, not on its batch, unless `batch.pieces` restricts them.
    """
    return _generate(model, batch, settings, hypotheses=settings.hypotheses, sampling=True)


def _generate(
    model: Model, batch: SourceBatch, settings: DecodingSettings, *, hypotheses: int, sampling: bool
) -> Hypotheses:
    """Return the hypotheses (B, N) made by choosing piece after piece, until EOS is chosen, or forced at the limit.

    A hypothesis whose next pieces all have the probability 0 ends with a log-probability of -inf.
    """
    size, device = len(batch.limits), batch.source.device
    pieces = torch.full((size, hypotheses, batch.longest), PAD, device=device)
    log_probs = torch.zeros(size, hypotheses, device=device)
    astray = torch.zeros(size, hypotheses, dtype=torch.bool, device=device)
    state, lines = begin(model, batch, hypotheses), Lines(batch)
    rows = torch.arange(size, device=device)  # the unfinished segments
    token = torch.full((size, hypotheses), BOS, device=device)
    done = torch.zeros(size, hypotheses, dtype=torch.bool, device=device)
    for step in range(batch.longest):
        batch.check()
        logits, state, _ = model.step(token, state)
        endings, forbid = lines.endings(token, rows, step), None
        if settings.no_repeat_ngram:
            forbid = partial(forbid_repeats, pieces=pieces[rows, :, :step], size=settings.no_repeat_ngram)
        if sampling:
            candidates = allowed_log_probs(logits, endings, forbid)
            uniforms = uniform(settings.seed, batch.keys[rows], hypotheses, step)
            token = draw(
                candidates.flatten(0, 1),
                uniforms.flatten(),
                temperature=settings.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                epsilon=settings.epsilon,
            ).view(uniforms.shape)
            log_prob = candidates.gather(-1, token[..., None]).squeeze(-1)
        else:
            log_prob, _, token = best_continuations(
                logits, torch.zeros(len(rows), 1, device=device), 1, endings, forbid
            )
        impossible = ~log_prob.isfinite()
        token = token.masked_fill(impossible, EOS).masked_fill(done, PAD)
        pieces[rows, :, step] = token
        log_probs[rows] += log_prob.masked_fill(impossible, -torch.inf).masked_fill(done, 0.0)
        done |= token == EOS
        lines.follow(token)
        if lines.counts:
            astray[rows] = lines.astray
        running = still_running(done.all(1), step)
        if running is not None:
            if not len(running):
                break
            state = close_gaps(state, running)
            rows, token, done = rows[running], token[running], done[running]
            lines.keep(running)
    lengths = (pieces != PAD).sum(-1)
    scores = normalised(log_probs, lengths, settings.length_penalty)
    return Hypotheses(pieces, log_probs, scores, astray).ranked()


def draw(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    epsilon: float = 0.0,
) -> Tensor:
    """Return the pieces (M,) at which the cumulative probability exceeds the uniform numbers (M,) in [0, 1).

    logits (M, V) are divided by the temperature. The draw is among the `top_k` likeliest pieces (0: all), of these
    among the likeliest that together reach the probability `top_p` (Holtzman et al., 2020, arXiv 1904.09751), and of
    these among pieces that then have at least the probability `epsilon`, or the likeliest (Hewitt et al., 2022, arXiv
    2210.15191).
    """
    ids: Tensor | None = None
    if 0 < top_k < logits.shape[-1]:
        logits, ids = best(logits, top_k)
    elif top_p < 1.0:
        logits, ids = best(logits, logits.shape[-1])
    scaled = (logits - logits.amax(-1, keepdim=True)).double() / temperature
    probabilities = scaled.softmax(-1)
    if top_p < 1.0:
        excess = probabilities.cumsum(-1) - probabilities >= top_p
        excess[:, 0] = False
        probabilities = probabilities.masked_fill(excess, 0.0)
    if epsilon > 0.0:
        least = epsilon * probabilities.sum(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least.minimum(probabilities.amax(-1, True)), 0.0)
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:]
    chosen = torch.searchsorted(cumulated, uniforms[:, None] * total, right=True).clamp(max=logits.shape[-1] - 1)
    return (chosen if ids is None else ids.gather(-1, chosen)).squeeze(-1)


def uniform(seed: int, keys: Tensor, hypotheses: int, step: int) -> Tensor:
    """Uniform numbers in [0, 1), (B, N) float64: functions of the seed, the segment's key, the hypothesis and the step.

    keys (B,) int64, one per segment.
    """
    hypothesis = torch.arange(hypotheses, device=keys.device)
    signed_seed = (seed + 2**63) % 2**64 - 2**63  # the 64-bit integer with the same last 64 bits
    mixed = _mix(keys[:, None] ^ _mix(torch.full_like(keys, signed_seed))[:, None])
    mixed = _mix(_mix(mixed ^ hypothesis) ^ step)  # (B, N)
    return _shift(mixed, 11).double() * 2.0**-53


def _mix(number: Tensor) -> Tensor:
    number = number + GAMMA
    number = (number ^ _shift(number, 30)) * FIRST
    number = (number ^ _shift(number, 27)) * SECOND
    return number ^ _shift(number, 31)


def _shift(number: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros."""
    return (number >> bits) & ((1 << (64 - bits)) - 1)
