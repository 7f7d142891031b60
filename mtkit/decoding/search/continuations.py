"""The best continuations of the hypotheses of each segment, from the logits of their next pieces."""

from collections.abc import Callable

import torch
from torch import Tensor

from mtkit.data.tokenizer import EOS
from mtkit.decoding.search.contract import NEVER_GENERATED, restrict
from mtkit.decoding.search.selection import best_sums
from mtkit.model.logits import Logits

Forbid = Callable[[Tensor], object]
"""Sets the log-probabilities (B, N, V) of further pieces that may not come to -inf, in place."""


def log_probs_of(logits: Logits, ends: Tensor | None, forbid: Forbid | None = None) -> Tensor:
    """The log-probabilities (B, N, V) of the next pieces, over all of them; then those that may not come are -inf.

    What may not come: what `restrict` says with `ends` (B,), and what `forbid` does.
    """
    whole = logits.whole()
    log_probs = torch.log_softmax(whole, -1, out=whole)  # new memory of this size costs more than the logarithm
    restrict(log_probs, ends)
    if forbid is not None:
        forbid(log_probs)
    return log_probs


def best_continuations(
    logits: Logits, before: Tensor, k: int, ends: Tensor | None, forbid: Forbid | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest sums of `log_probs_of` and before (B, N), largest first, their hypotheses and pieces, (B, k) each.

    Of equal sums the first comes first. Sums of -inf are missing ones.
    """
    if forbid is not None or logits.hidden.device.type != "cpu":
        top, index = best_sums(log_probs_of(logits, ends, forbid), before, k)
    else:
        top, index = _best_of_parts(logits, before, k, ends)
    return top, index.div(logits.pieces, rounding_mode="floor"), index % logits.pieces


def _best_of_parts(logits: Logits, before: Tensor, k: int, ends: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums and their places among N * V, by a compiled loop, from as many logits at a time as the cache holds."""
    from mtkit.compiled.continuations import best_of_logits

    k = min(k, before.shape[1] * logits.pieces)
    ends = torch.zeros(len(before), dtype=torch.bool) if ends is None else ends
    top, index = torch.empty(len(before), k), torch.empty(len(before), k, dtype=torch.long)
    arrays = [each.numpy() for each in (before.contiguous(), ends, top, index)]
    for some, *part in logits.parts():
        sums, units, added = (each.contiguous().numpy() for each in part)
        former, last, best, places = (each[some] for each in arrays)
        best_of_logits(sums, units, added, former, last, NEVER_GENERATED, EOS, best, places)
    return top, index
