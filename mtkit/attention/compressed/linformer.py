"""Linformer: learned matrices mix the keys and values of all positions into a fixed number of slots.

Paper: Wang, Li, Khabsa, Fang and Ma, "Linformer: Self-Attention with Linear Complexity", 2020, arXiv 2006.04768,
equation 7.
Departures: padded rows are zeroed before they are mixed, so that the result of a segment is independent of its batch.
There is no decoder role, because every slot mixes all positions, later ones included. E and F are initialised at
random, plus 1 for slot i at positions i, i + rank, ... With independent random matrices only, weights hardly depend on
the scores (on 12 tokens they correlate by 0.02 with the weights of `full` and vary 100 times less), and short segments
are learned slowly. (The proof of theorem 2 uses E = F.) E and F have one column per position up to `longest`; the first
S are used.
Cost: O((T + S) rank) time and memory; a step over the source costs O(rank).
"""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, for_heads, packing
from mtkit.attention.kernels.dot_product import attend, attend_step, safe_softmax, upcast
from mtkit.attention.options import OneOf, Positive
from mtkit.attention.slots import combining
from mtkit.errors import MtkitError

SHARE = ("none", "head", "kv", "layer")


class Linformer(HeadAttention):
    """Softmax attention to a fixed number of learned mixtures of all positions.

    rank: number of slots. share: how the matrices E of the keys and F of the values are shared: a pair per head
    ("none"), a pair per layer ("head"), one matrix per layer for both ("kv"), or one matrix for both in all layers
    ("layer"), which the first layer of a run owns and carries to the next.
    """

    roles = published = frozenset({"encoder", "cross"})
    paper = "Wang et al. 2020, arXiv 2006.04768"
    complexity = "O(T k)"
    growth = 1
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    slots = combining("projection", "merge", "nearby", regularizer={"disagreement"})
    small: ClassVar[dict[str, Any]] = {"rank": 5}
    variants = ({"share": "none"}, {"share": "kv"}, {"share": "layer"})

    def __init__(self, site: Site, *, rank: Positive = 128, share: Annotated[str, OneOf(SHARE)] = "head") -> None:
        super().__init__(site)
        self.share = share
        self.longest: int = (site.memory_length or site.max_length) if site.role == "cross" else site.max_length
        keys, values = (self.projection.key_heads, self.projection.value_heads) if share == "none" else (1, 1)
        owns = share != "layer" or site.layer == 0
        self.key_slots = self._slots(keys, rank) if owns else None  # E
        self.value_slots = self._slots(values, rank) if share in ("none", "head") else None  # F

    def attend(self, inputs: Inputs) -> Attended:
        """Compute softmax(Q (E K)^T / sqrt(K)) F V. Raises: MtkitError if S is more than `longest`."""
        key_slots, value_slots = self._matrices(inputs.carry)
        k, v = self._rows(inputs.context, inputs.context_valid)
        heads, _ = attend(
            self.queries(inputs.query),
            _mixed(key_slots, k),
            _mixed(value_slots, v),
            scale=self.scale,
            dropout=self.dropout,
        )
        return self.result(inputs, heads, v, carry=self._carried(key_slots))

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        assert inputs.memory is not None  # the cross role is the only one that steps
        key_slots, value_slots = self._matrices(inputs.carry)
        k, v = self._rows(inputs.memory, inputs.memory_valid)
        shared = {"keys": _mixed(key_slots, k), "values": _mixed(value_slots, v)}
        return {"shared": shared}, self._carried(key_slots)

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        q = self.queries(inputs.query).transpose(1, 2)  # (B, N, H, K)
        heads, _ = attend_step(q, state["shared"]["keys"], state["shared"]["values"], scale=self.scale)
        return Attended(self.merge_heads(heads.transpose(1, 2), inputs.query)), state

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Compute equation 7 head by head, summing slots over positions one after the other."""
        e, f = self._matrices(inputs.carry)
        k, v = self._rows(inputs.context, inputs.context_valid)
        heads = []
        for head, q in enumerate(self.queries(inputs.query).unbind(1)):
            mixed = []
            for matrices, rows in ((e, k), (f, v)):
                group = head * rows.shape[1] // self.site.heads
                matrix, row = matrices[group if len(matrices) > 1 else 0], rows[:, group]
                parts = [matrix[:, j, None] * row[:, None, j] for j in range(row.shape[1])]  # each (B, rank, K)
                mixed.append(torch.stack(parts).sum(0))
            weights = safe_softmax(q @ mixed[0].transpose(-1, -2) * self.scale, None)
            heads.append(weights @ mixed[1])
        return Attended(self.merge_heads(torch.stack(heads, dim=1), inputs.query), carry=self._carried(e))

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add how many positions a slot mixes, a mean over the slots: (sum of |e|)² / sum of e², from 1 to all."""
        learned = super().learned_numbers(inputs)
        for name, slots in (("positions per key slot", self.key_slots), ("positions per value slot", self.value_slots)):
            if slots is not None:
                spread = (slots.abs().sum(-1).square() / slots.square().sum(-1).clamp(min=1e-20)).mean(-1)
                learned[name] = for_heads(spread, self.site.heads) if self.share == "none" else spread
        return learned

    def _slots(self, groups: int, rank: int) -> nn.Parameter:
        """Return random slots plus 1 for slot i at positions i, i + rank, ..."""
        bound = rank**-0.5
        drawn = torch.empty(groups, rank, self.longest).uniform_(-bound, bound)
        position = torch.arange(self.longest)
        drawn[:, position % rank, position] += 1.0
        return nn.Parameter(drawn)

    def _matrices(self, carry: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return E and F, each (G, rank, longest), or (1, rank, longest) for all heads."""
        key_slots = carry if self.key_slots is None else self.key_slots
        if key_slots is None:
            raise MtkitError("linformer with share=layer needs the matrix that the first layer of its run carries up")
        return key_slots, key_slots if self.value_slots is None else self.value_slots

    def _carried(self, key_slots: Tensor) -> Tensor | None:
        return key_slots if self.share == "layer" else None

    def _rows(self, memory: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys and values, zero at padding, because biases would make padding count in the slots."""
        if memory.shape[1] > self.longest:
            raise MtkitError(
                f"linformer was built for {self.longest} positions, not {memory.shape[1]}: raise model.max_length"
            )
        k, v = self.keys_values(memory)
        if valid is None:
            return k, v
        padding = ~valid[:, None, :, None]
        return k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)


def _mixed(matrices: Tensor, rows: Tensor) -> Tensor:
    """Return slots (B, G, rank, K) of rows (B, G, S, K), summed in at least float32."""
    with torch.autocast(rows.device.type, enabled=False):
        return (upcast(matrices[:, :, : rows.shape[2]]) @ upcast(rows)).type_as(rows)
