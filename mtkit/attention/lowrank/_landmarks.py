"""Attention through landmarks: queries and keys meet in the means of a few neighbouring segments of tokens.

With m means Q~ of queries and K~ of keys,
    F = softmax(Q K~^T / sqrt(K)),  M = softmax(Q~ K~^T / sqrt(K)),  B = softmax(Q~ K^T / sqrt(K)),
the softmax of all pairs is about F Z B, where Z stands for the inverse of M; a mechanism says what it is. Token t of n
is in segment floor(t m / n), so that segments depend on the real tokens alone. Where n is at most m, each token would
be a landmark, B is the softmax of all pairs, and its rows are the result.

Only the encoder role can be: a landmark averages queries, so that one at a later position would change those before it.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import attend, expand_heads, safe_softmax, scores_of, upcast


class Means(NamedTuple):
    """Which tokens the landmarks average; B is 1 where all tokens are real."""

    shares: Tensor
    """(B, m, T): 1 over the size of the segment at its tokens, 0 elsewhere."""
    used: Tensor
    """(B, m): whether there is such a landmark."""
    few: Tensor
    """(B,): whether there are no more tokens than landmarks."""


class LandmarkAttention(HeadAttention):
    """The base of mechanisms that differ in what stands for the inverse of M. Dropout acts on the heads' outputs."""

    roles = frozenset({"encoder"})
    published = frozenset({"encoder"})
    complexity = "O(T m)"
    growth = 1
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {
        "projection": None,
        "merge": None,
        "regularizer": frozenset({"disagreement"}),
    }

    def __init__(self, site: Site, landmarks: int) -> None:
        super().__init__(site)
        self.landmarks = landmarks

    def solve(self, kernel: Tensor, rows: Tensor) -> Tensor:
        """Z R of rows R (B, H, m, V), for M (B, H, m, m), which is the identity where landmarks are not used."""
        raise NotImplementedError

    def inverse(self, kernel: Tensor) -> Tensor:
        """Z itself, as the equation has it."""
        raise NotImplementedError

    def beside(self, values: Tensor) -> Tensor | None:
        """What the heads' outputs have besides, (B, H, T, V), from values of that shape that are zero at padding."""
        return None

    def attend(self, inputs: Inputs) -> Attended:
        """F Z (B V), in float32 at least: what rounding adds, Z multiplies. In O(T) memory."""
        q, k, v = self.queries_keys_values(inputs.query)
        with torch.autocast(inputs.query.device.type, enabled=False):
            heads = self._heads(upcast(q), upcast(k), upcast(v), inputs.query_valid).type_as(v)
        losses = self.losses(heads, v, None, inputs.query_valid)
        return Attended(self.merge_heads(F.dropout(heads, self.dropout)), losses=losses)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """(F Z B) V with all three written out, segment by segment; all pairs where a segment is short."""
        padded = []
        for row, tokens in enumerate(inputs.query.split(1)):
            length = tokens.shape[1] if inputs.query_valid is None else int(inputs.query_valid[row].sum())
            q, k, v = self.queries_keys_values(tokens[:, :length])
            k, v = expand_heads(k, self.site.heads), expand_heads(v, self.site.heads)
            some = min(self.landmarks, length)
            near = [[t for t in range(length) if t * some // length == each] for each in range(some)]
            if length <= self.landmarks:
                heads = _softmax(q, k, self.scale) @ v
            else:
                mean_q, mean_k = (torch.stack([x[:, :, each].mean(2) for each in near], 2) for x in (q, k))
                inverse = self.inverse(_softmax(mean_q, mean_k, self.scale))
                heads = _softmax(q, mean_k, self.scale) @ inverse @ _softmax(mean_q, k, self.scale) @ v
            extra = self.beside(v)
            heads = heads if extra is None else heads + extra
            padded.append(F.pad(heads, (0, 0, 0, inputs.query.shape[1] - length)))
        return Attended(self.merge_heads(torch.cat(padded)))

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        if q.shape[2] <= self.landmarks:
            heads, _ = attend(q, k, v, scale=self.scale, valid=valid)
        else:
            heads = self._through_landmarks(q, k, v, valid)
        real = expand_heads(v, q.shape[1])
        extra = self.beside(real if valid is None else real.masked_fill(~valid[:, None, :, None], 0.0))
        return heads if extra is None else heads + extra

    def _through_landmarks(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        lengths = torch.full((1,), q.shape[2], device=q.device) if valid is None else valid.sum(1)
        means = means_of(lengths, q, self.landmarks)
        mean_q, mean_k = (means.shares.unsqueeze(1) @ x for x in (q, k))
        read, _ = attend(mean_q, k, v, scale=self.scale, valid=valid)  # B V
        read = read.masked_fill(~means.used[:, None, :, None], 0.0)
        # short segments need no inverse; theirs is that of the identity, so that no gradient is more than finite
        used = means.used & ~means.few.unsqueeze(1)
        kernel = safe_softmax(scores_of(mean_q, mean_k, self.scale), used[:, None, None])
        eye = torch.eye(self.landmarks, dtype=kernel.dtype, device=kernel.device)
        kernel = torch.where(used[:, None, :, None], kernel, eye)
        heads, _ = attend(q, mean_k, self.solve(kernel, read), scale=self.scale, valid=used)
        all_pairs = F.pad(read, (0, 0, 0, q.shape[2] - self.landmarks))
        return torch.where(means.few[:, None, None, None], all_pairs, heads)


def means_of(lengths: Tensor, rows: Tensor, landmarks: int) -> Means:
    """The segments of padded sequences rows (..., T, K), of which `lengths` (B,) tokens are real."""
    real, some = lengths.unsqueeze(1), lengths.clamp(max=landmarks).unsqueeze(1)  # (B, 1)
    position = torch.arange(rows.shape[-2], device=lengths.device)
    segment = torch.where(position < real, position * some // real.clamp(min=1), landmarks).unsqueeze(1)  # (B, 1, T)
    each = torch.arange(landmarks, device=lengths.device)
    members = (segment == each.unsqueeze(1)).type_as(rows)
    shares = members / members.sum(-1, keepdim=True).clamp(min=1)
    return Means(shares, each < some, lengths <= landmarks)


def _softmax(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q @ k.transpose(-1, -2) * scale).softmax(-1)
