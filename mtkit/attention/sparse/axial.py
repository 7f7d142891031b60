"""Axial attention: the sequence is folded into rows, and tokens attend along their row, then along their column.

Paper: Ho, Kalchbrenner, Weissenborn and Salimans, "Axial Attention in Multidimensional Transformers", 2019, arXiv
1912.12180, sections 3 and 4. Position i is in row i // C and column i % C. Each pass has its own projections.
In the decoder, axial_causal=shift is the paper's semi-parallel construction as one layer: full rows and the columns
above are read first, the result is shifted down by one row and added to the tokens, and each token then reads its row
up to itself. So it sees all tokens before it. axial_causal=quadrant reads the row and the column up to the own
position, and sees no later columns of earlier rows.
Departures: one sequence axis is folded; images have two. The paper's shift to the right is left out, because decoder
inputs are already shifted. Row and column embeddings are left to the model's positions; relative positions count along
each pass. `q_proj`, `k_proj`, `v_proj` and `out_proj` belong to the pass along rows, or with axial_causal=shift to the
last pass; only that pass has the merge and the regularizer.
Cost: O(T (C + T / C)) for C columns: O(T sqrt T) for the default, which is close to the square root of the longest
length. No T x T tensor. A step costs O(C + T / C); with axial_causal=shift O(C), and O(C (C + T / C)) at the end of a
row.
"""

from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import attend, attend_step, scores_of, weigh
from mtkit.attention.kernels.sparse import visible_pairs
from mtkit.attention.options import NearRoot, OneOf, root_of_length
from mtkit.attention.slots import Placed, combining


class _LineAttention(HeadAttention):
    """One pass of attention along lines, with its own projections and slots; relative positions count along a line."""

    def along(self, x: Tensor, valid: Tensor | None, *, causal: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend within lines x (B, lines, L, D); return the outputs in the same shape and the regularizer's losses.

        valid (B, lines, L), with padding at the end of each line.
        """
        lines = Inputs(x.flatten(0, 1), query_valid=None if valid is None else valid.flatten(0, 1))
        q, k, v = self.queries_keys_values(lines.query)
        how: dict[str, Any] = {"scale": self.scale, "positions": self.positions, "dropout": self.dropout}
        heads, _ = attend(q, k, v, causal=causal, valid=lines.query_valid, **how)
        return self.merge_heads(heads, lines.query).view_as(x), self.losses(lines, heads, v)

    def newest(self, tokens: Tensor, place: int) -> list[Tensor]:
        """Return queries, keys and values (B, N, heads, K) of tokens (B, N, D), all at this place of a line."""
        return self.newest_heads(tokens, torch.full((1,), place, device=tokens.device))

    def at_the_end(self, x: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the output (B, N, D) of the last tokens x (B, N, D) of lines of L tokens.

        q (B, N, H, K); keys and values (B, N, G, L, K).
        """
        heads, _ = attend_step(
            q, keys, values, scale=self.scale, positions=self.positions, query_position=keys.shape[3] - 1
        )
        return self.merge_heads(heads.transpose(1, 2), x)

    def naive_along(self, x: Tensor, line: Tensor, place: Tensor, causal: bool, valid: Tensor | None) -> Tensor:
        """`along` from all pairs of an unfolded x (B, T, D), whose tokens are in `line` (T,) at `place` (T,)."""
        q, k, v = self.queries_keys_values(x, place)
        visible = visible_pairs(line.unsqueeze(-1) == line, causal, valid)
        relative = None if self.positions is None else Placed(self.positions, place, place)
        heads, _ = weigh(scores_of(q, k, self.scale), q, v, relative, scale=self.scale, visible=visible)
        return self.merge_heads(heads, x)


COMBINE = ("sequential", "sum")
CAUSAL = ("shift", "quadrant")


class Axial(_LineAttention):
    """Attention along the rows and along the columns of a folded sequence.

    axial_width: number of columns C. axial_combine: columns read the output of the rows ("sequential"), or both read
    the tokens and their outputs are added ("sum"). axial_causal: in the decoder role a token sees all tokens before it
    ("shift"), or its row and the columns up to its own ("quadrant").
    """

    roles = published = frozenset({"encoder", "decoder"})
    paper = "Ho et al. 2019, arXiv 1912.12180"
    complexity = "O(T √T)"
    growth = 1.5
    sequential_operations = "O(1)"
    longest_path = "O(1)"
    slots = combining("positions", "projection", "merge", regularizer={"disagreement"})
    small: ClassVar[dict[str, Any]] = {"axial_width": 4}
    variants = (
        {"axial_combine": "sum"},
        {"axial_causal": "quadrant"},
        {"axial_combine": "sum", "axial_causal": "quadrant"},
    )

    def __init__(
        self,
        site: Site,
        *,
        axial_width: NearRoot = None,
        axial_combine: Annotated[str, OneOf(COMBINE)] = "sequential",
        axial_causal: Annotated[str, OneOf(CAUSAL)] = "shift",
    ) -> None:
        super().__init__(site)
        self.width, self.sequential = root_of_length(axial_width, site), axial_combine == "sequential"
        pass_site = replace(site, merge=None, regularizer=None)
        self.column = _LineAttention(pass_site)
        self.above = _LineAttention(pass_site) if site.causal and axial_causal == "shift" else None

    def attend(self, inputs: Inputs) -> Attended:
        """Full attention in each row and in each column."""
        query = inputs.query
        batch, length = query.shape[:2]
        width = max(min(self.width, length), 1)
        rows = -(-length // width)
        fill = rows * width - length
        x = F.pad(query, (0, 0, 0, fill)).unflatten(1, (rows, width))
        valid = inputs.query_valid
        if valid is None and fill:
            valid = query.new_ones(batch, length, dtype=torch.bool)
        if valid is not None:
            valid = F.pad(valid, (0, fill)).unflatten(1, (rows, width))
        if self.above is None:
            output, losses = self._both(self, x, valid, causal=self.site.causal)
        else:
            upper, _ = self._both(self.above, x, valid, causal=False)
            output, losses = self.along(x + F.pad(upper, (0, 0, 0, 0, 1, -1)), valid, causal=True)
        return Attended(output.flatten(1, 2)[:, :length], losses=losses)

    def _both(
        self, row: _LineAttention, x: Tensor, valid: Tensor | None, *, causal: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend along rows and columns of x (B, R, C, D); columns are causal in the decoder."""
        along, losses = row.along(x, valid, causal=causal)
        above = (along if self.sequential else x).transpose(1, 2)
        real = None if valid is None else valid.transpose(1, 2)
        down, _ = self.column.along(above, real, causal=self.site.causal)
        down = down.transpose(1, 2)
        return down if self.sequential else along + down, losses

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        return {"row": {"count": 0}, "column": {"count": 0}, "count": 0}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Read the row and, with axial_causal=quadrant, the column; at the end of a row, read all columns."""
        query = inputs.query
        row, column = divmod(state["count"], self.width)
        state = {**state, "count": state["count"] + 1}
        token = query + state["above"][:, :, column] if self.above is not None and row else query
        q, k, v = self.newest(token, column)
        state["row"] = append(state["row"], window=self.width, keys=k, values=v, tokens=query.unsqueeze(2))
        keys, values = (written(state["row"], name, window=self.width) for name in ("keys", "values"))
        output = self.at_the_end(token, q, keys[:, :, :, : column + 1], values[:, :, :, : column + 1])
        if self.above is None:
            above = output if self.sequential else query
            q, k, v = self.column.newest(above, row)
            state["column"] = append(state["column"], keys=k, values=v)
            down = [written(state["column"], name)[:, :, :, column :: self.width] for name in ("keys", "values")]
            below = self.column.at_the_end(above, q, *down)
            output = below if self.sequential else output + below
        elif column == self.width - 1:
            state = self._row_ends(self.above, state, row)
        return Attended(output), state

    def _row_ends(self, above: _LineAttention, state: State, row: int) -> State:
        """Return the state with the finished row in the column cache, and its output for the next row, (B, N, C, D)."""
        x = written(state["row"], "tokens", window=self.width).squeeze(2)
        along, _ = above.along(x, None, causal=False)
        rows_above = (along if self.sequential else x).flatten(1, 2)
        q, k, v = self.column.newest(rows_above, row)  # (B, N*C, heads, K)
        k, v = (rows.unflatten(1, x.shape[1:3]).flatten(2, 3) for rows in (k, v))
        state["column"] = append(state["column"], keys=k, values=v)
        keys, values = (
            written(state["column"], name).unflatten(2, (self.width, -1)).flatten(1, 2) for name in ("keys", "values")
        )
        down = self.column.at_the_end(rows_above, q, keys, values).view_as(along)
        return {**state, "above": down if self.sequential else along + down}

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same from the scores of all pairs, each pass under a mask."""
        query, query_valid = inputs.query, inputs.query_valid
        i, causal = torch.arange(query.shape[1], device=query.device), self.site.causal
        row, column = i // self.width, i % self.width
        first = self.above or self
        along = first.naive_along(query, row, column, causal and self.above is None, query_valid)
        down = self.column.naive_along(along if self.sequential else query, column, row, causal, query_valid)
        both = down if self.sequential else along + down
        if self.above is None:
            return Attended(both)
        lower = F.pad(both, (0, 0, self.width, 0))[:, : len(i)]
        return Attended(self.naive_along(query + lower, row, column, causal, query_valid))

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Leave out means over tokens with `axial_causal` shift: the pass with the merge reads other vectors."""
        return super().learned_numbers(inputs if self.above is None else None)

    def after_update(self, update: int, total_updates: int) -> None:
        super().after_update(update, total_updates)
        for part in (self.column, self.above):
            if part is not None:
                part.after_update(update, total_updates)
