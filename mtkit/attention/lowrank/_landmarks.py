"""Base of attention through landmarks: the means of queries and keys over a few segments of neighbouring tokens.

With m means Q~ of queries and K~ of keys,
    F = softmax(Q K~^T / sqrt(K)),  M = softmax(Q~ K~^T / sqrt(K)),  B = softmax(Q~ K^T / sqrt(K)),
the softmax of all pairs is about F Z B, in which a mechanism defines Z, an approximate inverse of M. Token t of n is in
segment floor(t m / n), so that segments depend on the real tokens only. If n is at most m, each token is its own
landmark, B is the softmax of all pairs, and B V is the result.

Only the encoder role is possible: a landmark averages queries, so that a later position would change earlier ones.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Inputs, Site, packing
from mtkit.attention.kernels.dot_product import attend, expand_heads, safe_softmax, scores_of, upcast
from mtkit.attention.slots import combining


class Means(NamedTuple):
    """The tokens that each landmark averages; B is 1 if all tokens are real."""

    shares: Tensor
    """(B, m, T): 1 / segment size at the segment's tokens, 0 elsewhere."""
    used: Tensor
    """(B, m): whether the landmark has tokens."""
    few: Tensor
    """(B,): whether there are no more tokens than landmarks."""


class LandmarkAttention(HeadAttention):
    """Base of mechanisms that differ in Z, the approximate inverse of M. Dropout acts on the heads' outputs."""

    roles = published = frozenset({"encoder"})
    complexity = "O(T m)"
    growth = 1
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    slots = combining("projection", "merge", "nearby", regularizer={"disagreement"})

    def __init__(self, site: Site, landmarks: int) -> None:
        super().__init__(site)
        self.landmarks = landmarks

    def solve(self, kernel: Tensor, rows: Tensor) -> Tensor:
        """Return Z R of rows R (B, H, m, V), for M (B, H, m, m), which is the identity at unused landmarks."""
        return self.inverse(kernel) @ rows

    def inverse(self, kernel: Tensor) -> Tensor:
        """Return Z itself, as in the equation."""
        raise NotImplementedError

    def attend(self, inputs: Inputs) -> Attended:
        """Compute F Z (B V) in O(T) memory and in at least float32, because Z multiplies rounding errors."""
        q, k, v = self.queries_keys_values(inputs.query)
        with torch.autocast(inputs.query.device.type, enabled=False):
            heads = self._heads(q, k, v, inputs.query_valid).type_as(v)
        return self.result(inputs, heads, v, dropout=self.dropout)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        padded = []
        for row, tokens in enumerate(inputs.query.split(1)):
            length = tokens.shape[1] if inputs.query_valid is None else int(inputs.query_valid[row].sum())
            q, k, v = self.queries_keys_values(tokens[:, :length])
            k, v = expand_heads(k, self.site.heads), expand_heads(v, self.site.heads)
            count = min(self.landmarks, length)
            segments = [[t for t in range(length) if t * count // length == segment] for segment in range(count)]
            if length <= self.landmarks:
                heads = _softmax(q, k, self.scale) @ v
            else:
                mean_q, mean_k = (torch.stack([x[:, :, segment].mean(2) for segment in segments], 2) for x in (q, k))
                inverse = self.inverse(_softmax(mean_q, mean_k, self.scale))
                heads = _softmax(q, mean_k, self.scale) @ inverse @ _softmax(mean_q, k, self.scale) @ v
            heads = self.with_nearby(heads, v, None)
            padded.append(F.pad(heads, (0, 0, 0, inputs.query.shape[1] - length)))
        return Attended(self.merge_heads(torch.cat(padded), inputs.query))

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        if q.shape[2] <= self.landmarks:
            return attend(q, k, v, scale=self.scale, valid=valid)[0]
        return self._through_landmarks(upcast(q), upcast(k), upcast(v), valid)

    def _through_landmarks(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None) -> Tensor:
        lengths = torch.full((1,), q.shape[2], device=q.device) if valid is None else valid.sum(1)
        means = means_of(lengths, q, self.landmarks)
        mean_q, mean_k = (means.shares.unsqueeze(1) @ x for x in (q, k))
        read, _ = attend(mean_q, k, v, scale=self.scale, valid=valid)  # B V
        read = read.masked_fill(~means.used[:, None, :, None], 0.0)
        # short segments need no inverse; they get the identity's, so that all gradients are finite
        used = means.used & ~means.few.unsqueeze(1)
        kernel = safe_softmax(scores_of(mean_q, mean_k, self.scale), used[:, None, None])
        eye = torch.eye(self.landmarks, dtype=kernel.dtype, device=kernel.device)
        kernel = torch.where(used[:, None, :, None], kernel, eye)
        heads, _ = attend(q, mean_k, self.solve(kernel, read), scale=self.scale, valid=used)
        all_pairs = F.pad(read, (0, 0, 0, q.shape[2] - self.landmarks))
        return torch.where(means.few[:, None, None, None], all_pairs, heads)


def means_of(lengths: Tensor, rows: Tensor, landmarks: int) -> Means:
    """Return the segments of padded sequences rows (..., T, K), whose first `lengths` (B,) tokens are real."""
    real, count = lengths.unsqueeze(1), lengths.clamp(max=landmarks).unsqueeze(1)  # (B, 1)
    position = torch.arange(rows.shape[-2], device=lengths.device)
    segment = torch.where(position < real, position * count // real.clamp(min=1), landmarks).unsqueeze(1)  # (B, 1, T)
    landmark = torch.arange(landmarks, device=lengths.device)
    members = (segment == landmark.unsqueeze(1)).type_as(rows)
    shares = members / members.sum(-1, keepdim=True).clamp(min=1)
    return Means(shares, landmark < count, lengths <= landmarks)


def _softmax(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q @ k.transpose(-1, -2) * scale).softmax(-1)
