"""The ban on repeated n-grams of pieces.

The score of a finished hypothesis: its log-probability over a power of its length, and its coverage penalty.

Selection of the k best values, with the same result on every device.

The best continuations of the hypotheses of each segment, from the logits of their next pieces.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mtkit.decoding.search.contract import NEVER_GENERATED, restrict
from mtkit.model.network import Logits
from mtkit.text.tokenizer import BREAK, EOS


def forbid_repeats(scores: Tensor, pieces: Tensor, size: int) -> None:
    """Sets to -inf, in place, the score of each piece that would repeat an n-gram of `size` pieces of the same line.

    Lines that are translated together have a break piece between them. scores (B, N, V) for the next piece;
    pieces (B, N, t), those generated so far.
    """
    if pieces.shape[-1] < size:
        return
    seen = pieces.unfold(-1, size, 1)  # (B, N, t - size + 1, size)
    beginning = pieces[..., pieces.shape[-1] - size + 1 :]  # (B, N, size - 1), what the next piece would complete
    line = (pieces == BREAK).cumsum(-1)  # (B, N, t): how many lines have ended with this piece
    here = ((line == line[..., -1:]) & (pieces != BREAK))[..., : seen.shape[2]]  # n-grams that begin in the last line
    repeats = (seen[..., :-1] == beginning[..., None, :]).all(-1) & here
    ceiling = torch.full_like(repeats, torch.inf, dtype=scores.dtype).masked_fill_(repeats, -torch.inf)
    scores.scatter_reduce_(-1, seen[..., -1], ceiling, "amin")


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


BLOCK = 64


def best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of float32 values (B, M), largest first, and their indices, (B, k) each; ties go to the first.

    NaN counts as -inf. A row is NaN as a whole or not at all, as the result of a softmax is.
    """
    return best_sums(values.unsqueeze(1), values.new_zeros(len(values), 1), k)


def best_sums(values: Tensor, before: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`best` of the N * V sums of values (B, N, V) and before (B, N), of which only the best are computed.

    The k best lie in the k blocks with the largest maxima (ties go to the first blocks), so that two small selections
    suffice. Adding the same number to all values of a block keeps their order.
    """
    count = values.shape[2]
    whole = count // BLOCK * BLOCK
    highest = [values[..., :whole].unflatten(2, (-1, BLOCK)).amax(-1)] if whole else []
    if whole < count:
        highest.append(values[..., whole:].amax(2, keepdim=True))
    maxima = torch.cat(highest, 2) + before[..., None]  # (B, N, blocks)
    blocks = _first_best(maxima.flatten(1), k)[1].sort(dim=1).values[..., None]
    row, column = blocks // maxima.shape[2], blocks % maxima.shape[2] * BLOCK
    column = column + torch.arange(BLOCK, device=values.device)  # (B, k, BLOCK)
    index = (row * count + column.clamp(max=count - 1)).flatten(1)  # rising
    near = values.flatten(1).gather(1, index).view(column.shape) + before.gather(1, row.squeeze(2))[..., None]
    if whole < count:
        near = near.masked_fill(column >= count, -torch.inf)
    near = near.flatten(1)
    top, place = _first_best(near, min(k, values.shape[1] * count))
    return top, index.gather(1, place)


def _first_best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`best` by distinct integers, because the order of equal values in `torch.topk` is undefined.

    The upper half of an integer has the order of the values, the lower half that of the places. A stable sort takes six
    times as long.
    """
    count, values = values.shape[1], values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32  # the bits of negative numbers rise as these fall
    places = torch.arange(count - 1, -1, -1, device=values.device)
    top = (ordered | places).topk(min(k, count), dim=1).values
    index = count - 1 - (top & 0xFFFFFFFF)
    return values.gather(1, index), index


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
    from mtkit.attention.kernels.cpu.decoding_loops import best_of_logits

    k = min(k, before.shape[1] * logits.pieces)
    ends = torch.zeros(len(before), dtype=torch.bool) if ends is None else ends
    top, index = torch.empty(len(before), k), torch.empty(len(before), k, dtype=torch.long)
    arrays = [each.numpy() for each in (before.contiguous(), ends, top, index)]
    for some, *part in logits.parts():
        sums, units, added = (each.contiguous().numpy() for each in part)
        former, last, best, places = (each[some] for each in arrays)
        best_of_logits(sums, units, added, former, last, NEVER_GENERATED, EOS, best, places)
    return top, index
