"""Steps that all searches share: the model's first state, the best next pieces, scores, finished segments."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtkit.decoding.contract import SourceBatch
from mtkit.decoding.search.endings import ANY, Endings
from mtkit.model.network import Logits, Model
from mtkit.text.tokenizer import BREAK, EOS

NEVER_GENERATED = EOS
"""Pieces below this id, PAD, UNK and BOS, are never generated."""

CHECK_EVERY = 8
"""Steps between two checks for finished segments on an accelerator, since each check waits for the device."""

WORTHWHILE, ENOUGH = 0.2, 8
"""Finished segments are dropped from the batch on a CPU if they are this share of it, or this number; on an
accelerator, if they are half of it, because a smaller batch has a new shape and is hardly faster."""

LEAST_COVERAGE = 1e-10
"""Minimum attention of a source piece in the coverage penalty, so that its logarithm is finite."""

BLOCK = 64
"""Number of values whose maximum `best_sums` computes first."""

Forbid = Callable[[Tensor], object]
"""Sets the log-probabilities (B, N, V) of further forbidden pieces to -inf, in place."""


def begin(model: Model, batch: SourceBatch, hypotheses: int) -> Any:
    """Return the model's state before the first piece of each segment's hypotheses."""
    # copies, because the state may hold them, and `close_gaps` overwrites segments that are dropped
    valid, task = batch.valid.clone(), None if batch.task is None else batch.task.clone()
    encoded = model.encode(batch.source, valid, task=task)
    return model.start(encoded, hypotheses=hypotheses, pieces=batch.pieces)


def still_running(done: Tensor, step: int) -> Tensor | None:
    """Return the rows of unfinished segments if dropping the others saves time, else None; empty: all are finished.

    done (B',), True at finished segments. The rows are in the order of `close_gaps`.
    """
    if done.is_cuda and (step + 1) % CHECK_EVERY:
        return None
    running = (~done).nonzero().squeeze(1)
    count = len(running)
    if len(done) - count < (len(done) / 2 if done.is_cuda else min(ENOUGH, WORTHWHILE * len(done))):
        return None
    order = torch.arange(count, device=done.device)
    order[done[:count]] = running[running >= count]
    return order


def normalised(log_probs: Tensor, lengths: Tensor, alpha: float) -> Tensor:
    """log P / |Y|^alpha (B, N), with the length |Y| in pieces, EOS counted; alpha 0 is the sum, 1 the mean."""
    return log_probs / lengths.clamp(min=1).to(log_probs.dtype) ** alpha


def coverage_penalty(attention: Tensor, valid: Tensor, beta: float) -> Tensor:
    """beta * sum_i log min(sum_t p_it, 1) (B, N), at most 0 (Wu et al., 2016, arXiv 1609.08144, equation 14).

    attention (B, N, S), sum_t p_it: each source piece's attention, summed over the steps; valid (B, S), True at real
    source pieces, which are summed over.
    """
    logs = attention.clamp(LEAST_COVERAGE, 1.0).log()
    return beta * logs.masked_fill(~valid[:, None], 0.0).sum(-1)


def of_parents(values: Tensor, parents: Tensor) -> Tensor:
    """values (B', N, X) at the hypotheses `parents` (B', N'), as a new tensor (B', N', X)."""
    return values.gather(1, parents[..., None].expand(-1, -1, values.shape[2]))


def forbid_repeats(scores: Tensor, pieces: Tensor, size: int) -> None:
    """Sets to -inf, in place, the score of each piece that would repeat an n-gram of `size` pieces of the same line.

    Lines that are translated together have a break piece between them. scores (B, N, V) of the next piece;
    pieces (B, N, t) generated so far.
    """
    if pieces.shape[-1] < size:
        return
    ngrams = pieces.unfold(-1, size, 1)  # (B, N, t - size + 1, size)
    prefix = pieces[..., pieces.shape[-1] - size + 1 :]  # (B, N, size - 1), which the next piece would complete
    line = (pieces == BREAK).cumsum(-1)  # (B, N, t): the number of lines that have ended with this piece
    in_last_line = ((line == line[..., -1:]) & (pieces != BREAK))[..., : ngrams.shape[2]]
    repeats = (ngrams[..., :-1] == prefix[..., None, :]).all(-1) & in_last_line
    ceiling = torch.full_like(repeats, torch.inf, dtype=scores.dtype).masked_fill_(repeats, -torch.inf)
    scores.scatter_reduce_(-1, ngrams[..., -1], ceiling, "amin")


def allowed_log_probs(logits: Logits, endings: Endings | None, forbid: Forbid | None = None) -> Tensor:
    """Return the log-probabilities (B, N, V) of the next pieces, normalised over all pieces; -inf for forbidden ones.

    Forbidden are pieces that are never generated, and the pieces of `endings` and `forbid`.
    """
    log_probs = logits.whole()
    torch.log_softmax(log_probs, -1, out=log_probs)  # new memory of this size costs more than the logarithm
    log_probs[..., :NEVER_GENERATED] = -torch.inf
    if endings is not None:
        endings.apply(log_probs)
    if forbid is not None:
        forbid(log_probs)
    return log_probs


def best_continuations(
    logits: Logits, prefix: Tensor, k: int, endings: Endings | None, forbid: Forbid | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest sums of `allowed_log_probs` and of the prefixes' log-probabilities `prefix` (B, N).

    Gives the sums, largest first, their hypotheses and their pieces, (B, k) each. Of equal sums the first comes first.
    Sums of -inf mark missing continuations.
    """
    if logits.repeat is not None and (endings is None or endings.constant) and forbid is None:
        compute = partial(_best_of_all, logits, k, endings)
        top, index = logits.repeat(("best", k, endings is None), compute, logits.hidden, prefix)
    elif forbid is not None or logits.hidden.device.type != "cpu":
        top, index = best_sums(allowed_log_probs(logits, endings, forbid), prefix, k)
    else:
        top, index = _best_on_cpu(logits, prefix, k, endings)
    return top, index.div(logits.pieces, rounding_mode="floor"), index % logits.pieces


def _best_of_all(
    logits: Logits, k: int, endings: Endings | None, hidden: Tensor, prefix: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the k largest sums and their indices among N * V, from other hidden vectors (B, N, D)."""
    return best_sums(allowed_log_probs(replace(logits, hidden=hidden), endings), prefix, k)


def _best_on_cpu(logits: Logits, prefix: Tensor, k: int, endings: Endings | None) -> tuple[Tensor, Tensor]:
    """Return sums and indices among N * V by a compiled loop, from as many logits at a time as the cache holds."""
    from mtkit.attention.kernels.cpu.decoding_loops import best_of_logits

    k = min(k, prefix.shape[1] * logits.pieces)
    shape, must = logits.hidden.shape[:2], None if endings is None else endings.must
    piece = torch.full(shape, ANY) if endings is None else endings.piece
    piece = torch.full(shape, EOS) if piece is None else piece
    must = torch.zeros(shape, dtype=torch.bool) if must is None else must
    doubt = torch.zeros(shape, dtype=torch.bool) if endings is None or endings.doubt is None else endings.doubt
    top, index = torch.empty(len(prefix), k), torch.empty(len(prefix), k, dtype=torch.long)
    arrays = [tensor.contiguous().numpy() for tensor in (prefix, piece, must, top, index, doubt)]
    for rows, *part in logits.parts():
        sums, units, added = (tensor.contiguous().numpy() for tensor in part)
        before, ending, ends, largest, places, doubts = (array[rows] for array in arrays)
        best_of_logits(sums, units, added, before, ending, ends, NEVER_GENERATED, largest, places, doubts)
    return top, index


def best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of float32 values (B, M), largest first, and their indices, (B, k) each.

    Equal values are ordered by index, on every device. NaN counts as -inf. A row must be NaN entirely or not at all, as
    the result of a softmax is.
    """
    return best_sums(values.unsqueeze(1), values.new_zeros(len(values), 1), k)


def best_sums(values: Tensor, added: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`best` of the N * V sums of values (B, N, V) and added (B, N), without computing all sums.

    The k best lie in the k blocks with the largest maxima (of equal ones, the first), so that two small selections
    suffice. Adding the same number to all values of a block keeps their order.
    """
    count = values.shape[2]
    in_blocks = count // BLOCK * BLOCK
    highest = [values[..., :in_blocks].unflatten(2, (-1, BLOCK)).amax(-1)] if in_blocks else []
    if in_blocks < count:
        highest.append(values[..., in_blocks:].amax(2, keepdim=True))
    maxima = torch.cat(highest, 2) + added[..., None]  # (B, N, blocks)
    blocks = _top_k(maxima.flatten(1), k)[1].sort(dim=1).values[..., None]
    row, column = blocks // maxima.shape[2], blocks % maxima.shape[2] * BLOCK
    column = column + torch.arange(BLOCK, device=values.device)  # (B, k, BLOCK)
    index = (row * count + column.clamp(max=count - 1)).flatten(1)  # ascending
    sums = values.flatten(1).gather(1, index).view(column.shape) + added.gather(1, row.squeeze(2))[..., None]
    if in_blocks < count:
        sums = sums.masked_fill(column >= count, -torch.inf)
    top, place = _top_k(sums.flatten(1), min(k, values.shape[1] * count))
    return top, index.gather(1, place)


def _top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`best` by distinct integers, because the order of equal values in `torch.topk` is undefined.

    The upper half of an integer orders by value, the lower half by index. A stable sort takes six times as long.
    """
    count, values = values.shape[1], values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32  # the bits of negative numbers rise as these fall
    reversed_index = torch.arange(count - 1, -1, -1, device=values.device)
    top = (ordered | reversed_index).topk(min(k, count), dim=1).values
    index = count - 1 - (top & 0xFFFFFFFF)
    return values.gather(1, index), index
