"""The score of a finished hypothesis: its log-probability over a power of its length, and its coverage penalty."""

from torch import Tensor

LEAST_COVERAGE = 1e-10
"""Attention that a source piece counts as having got at least, so that its logarithm is finite."""


def normalised(log_probs: Tensor, lengths: Tensor, alpha: float) -> Tensor:
    """log P / |Y|^alpha (B, N), with the length |Y| in pieces, EOS counted; alpha 0 is the sum, 1 the mean."""
    return log_probs / lengths.clamp(min=1).to(log_probs.dtype) ** alpha


def coverage_penalty(attention: Tensor, valid: Tensor, beta: float) -> Tensor:
    """beta * sum_i log min(sum_t p_it, 1), at most 0 (Wu et al., 2016, arXiv 1609.08144, equation 14).

    attention (B, N, S), sum_t p_it: the attention that each source piece got over all steps; valid (B, S), True at real
    source pieces, over which the sum runs. Gives (B, N).
    """
    logs = attention.clamp(LEAST_COVERAGE, 1.0).log()
    return beta * logs.masked_fill(~valid[:, None], 0.0).sum(-1)
