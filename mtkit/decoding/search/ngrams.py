"""The ban on repeated n-grams of pieces."""

import torch
from torch import Tensor

from mtkit.data.tokenizer import BREAK


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
