"""Sampling of translations from the distribution of the model, or from its most likely part."""

import torch
from torch import Tensor

from mtkit.decoding.search.continuations import Forbid, log_probs_of
from mtkit.decoding.search.contract import Hypotheses, SourceBatch
from mtkit.decoding.search.noise import uniform
from mtkit.decoding.search.selection import best
from mtkit.decoding.search.walk import walk
from mtkit.model.logits import Logits
from mtkit.model.network import Model
from mtkit.recipe import DecodingSettings


def sample(model: Model, batch: SourceBatch, settings: DecodingSettings) -> Hypotheses:
    """`settings.n_best` independent draws per segment, the likeliest first.

    The draws of a segment depend on the seed and its key, not on its batch, except where `batch.pieces` restricts them.
    """

    def choose(
        logits: Logits, rows: Tensor, step: int, ends: Tensor | None, forbid: Forbid | None
    ) -> tuple[Tensor, Tensor]:
        log_probs = log_probs_of(logits, ends, forbid)
        draws = uniform(settings.seed, batch.keys[rows], log_probs.shape[1], step)
        flat = draw(
            log_probs.flatten(0, 1),
            draws.flatten(),
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
        )
        token = flat.view(log_probs.shape[:2])
        return token, log_probs.gather(-1, token[..., None]).squeeze(-1)

    return walk(
        model,
        batch,
        choose,
        hypotheses=settings.n_best,
        length_penalty=settings.length_penalty,
        no_repeat_ngram=settings.no_repeat_ngram,
    )


def draw(logits: Tensor, uniforms: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The pieces (M,) at which the cumulative probability exceeds the uniform numbers (M,) in [0, 1).

    logits (M, V) are divided by the temperature. The draw is among the `top_k` likeliest pieces (0: all), and among
    these the likeliest that together reach the probability `top_p` (Holtzman et al., 2020, arXiv 1904.09751).
    """
    ids: Tensor | None = None
    if 0 < top_k < logits.shape[-1]:
        logits, ids = best(logits, top_k)
    elif top_p < 1.0:
        logits, ids = best(logits, logits.shape[-1])
    scaled = (logits - logits.amax(-1, keepdim=True)).double() / temperature
    probabilities = scaled.softmax(-1)
    cumulated = probabilities.cumsum(-1)
    total = cumulated[:, -1:]
    if top_p < 1.0:
        kept = (cumulated - probabilities < top_p).sum(-1, keepdim=True)
        total = cumulated.gather(-1, kept.clamp(min=1) - 1)
    chosen = torch.searchsorted(cumulated, uniforms[:, None] * total, right=True).clamp(max=logits.shape[-1] - 1)
    return (chosen if ids is None else ids.gather(-1, chosen)).squeeze(-1)
