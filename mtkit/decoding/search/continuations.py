"""The best continuations of the hypotheses of each segment, from the logits of their next pieces."""

from collections.abc import Callable

import torch
from torch import Tensor

from mtkit.data.tokenizer import EOS
from mtkit.decoding.search.contract import NEVER_GENERATED, restrict
from mtkit.decoding.search.selection import best_sums

Forbid = Callable[[Tensor], object]
"""Sets the log-probabilities (B, N, V) of further pieces that may not come to -inf, in place."""


def log_probs_of(logits: Tensor, ends: Tensor | None, forbid: Forbid | None = None) -> Tensor:
    """The log-probabilities (B, N, V) of the next pieces, over all of them; then those that may not come are -inf.

    They are written over the logits. What may not come: what `restrict` says with `ends` (B,), and what `forbid` does.
    """
    log_probs = torch.log_softmax(logits, -1, out=logits)  # new memory of this size costs more than the logarithm
    restrict(log_probs, ends)
    if forbid is not None:
        forbid(log_probs)
    return log_probs


def best_continuations(
    logits: Tensor, before: Tensor, k: int, ends: Tensor | None, forbid: Forbid | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest sums of `log_probs_of` and before (B, N), largest first, and their places among N * V, (B, k).

    Of equal sums the first comes first. Sums of -inf are missing ones. The logits may be overwritten.
    """
    if forbid is not None or logits.device.type != "cpu" or logits.dtype != torch.float32:
        return best_sums(log_probs_of(logits, ends, forbid), before, k)
    from mtkit.compiled.continuations import best_of_logits

    k, ends = min(k, logits.shape[1] * logits.shape[2]), _none(logits) if ends is None else ends
    top, index = torch.empty(len(logits), k), torch.empty(len(logits), k, dtype=torch.long)
    rows, sums = logits.contiguous().numpy(), before.contiguous().numpy()
    best_of_logits(rows, sums, ends.numpy(), NEVER_GENERATED, EOS, top.numpy(), index.numpy())
    return top, index


def _none(logits: Tensor) -> Tensor:
    return torch.zeros(len(logits), dtype=torch.bool)
