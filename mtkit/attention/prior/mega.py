"""Mega: one gated head whose queries and keys come from a moving average of the tokens.

Paper: Ma et al., "Mega: Moving Average Equipped Gated Attention", 2022, arXiv 2209.10655, section 3. In the self roles,
with x' = silu(e + omega x) of the moving average e (`_moving_average`), z = silu(W_z x'), q and k are z * kappa + mu,
v = silu(W_v x), r = silu(W_r x'), u = sigmoid(W_u x'), o = softmax(q k^T / sqrt(s) + b_(j-i)) v, and the output is
u * (h - x) with h = silu(W_h x' + U_h(r * o)). In the encoder role e has a second average from the right; both include
the token itself. In the cross role q = W_q x, r and u come from x, k and v = silu(.) from the memory, W_h x' is left
out, and values are as wide as the model. `activation=laplace` has weights laplace(q k^T / n + b) for n visible keys.
The equations were checked against the authors' code, not against the paper's text. A later version of the code can
leave the token itself out of the average from the right.
Departures: x + u * (h - x) of the paper is the output and the residual around it, with x as it enters the layer; in a
pre-norm model x in u * (h - x) is normalised, and dropout around the layer acts on the sum. Dropout otherwise acts
on attention weights only. The last chunk may be short. The cross role has no chunks and no average. The number of
heads is not used.
Cost: O(T S (s + w)) time for width s of queries and w of values, O(T) memory, or O(T S) if weights are requested; with
chunks of c O(T c (s + w)). The average takes O(T D (64 + n)) time for n states. A step costs O(t (s + w) + D n), with
chunks O(c (s + w) + D n). With no key to see, o is 0, but the output is not.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.single_head import ELEMENTWISE, ScaleAndShift, SingleHead
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing, token_means
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.options import Null, OneOf, Positive
from mtkit.attention.prior._moving_average import MovingAverage

ACTIVATIONS = ("softmax", "laplace")


class Mega(SingleHead):
    """Softmax attention of one head over moving averages of the tokens, with a reset gate and an update gate.

    ema: states of the moving average for each channel. z_width: width of queries and keys. v_width: width of values.
    chunk_size: number of tokens in a chunk; a token sees its own chunk only. activation: what makes weights of scores.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Ma et al. 2022, arXiv 2209.10655"
    sequential_operations = "O(log T)"
    small: ClassVar[Mapping[str, Any]] = {"ema": 3, "z_width": 48}  # so that scores cost more than maps at 128 tokens
    variants = ({"activation": "laplace", "chunk_size": 5, "z_width": 5, "v_width": 20},)

    def __init__(
        self,
        site: Site,
        *,
        ema: Positive = 16,
        z_width: Annotated[Positive | None, Null("a quarter of the model's width")] = None,
        v_width: Annotated[
            Positive | None, Null("twice the model's width, in the cross role the model's width")
        ] = None,
        chunk_size: Annotated[Positive | None, Null("all tokens")] = None,
        activation: Annotated[str, OneOf(ACTIVATIONS)] = "softmax",
    ) -> None:
        cross = site.role == "cross"
        width = z_width or max(1, site.d_model // 4)
        values = v_width or (1 if cross else 2) * site.d_model
        chunk = None if cross else chunk_size
        super().__init__(site, key_width=width, value_width=values, chunk=chunk, activation=activation)
        self.reset_proj, self.update_proj = nn.Linear(site.d_model, values), nn.Linear(site.d_model, site.d_model)
        if not cross:
            del self.q_proj, self.k_proj
            self.z_proj, self.h_proj = nn.Linear(site.d_model, width), nn.Linear(site.d_model, site.d_model)
            self.vectors = ScaleAndShift(2, width)
            self.average = MovingAverage(site.d_model, ema, both_ways=site.role == "encoder")
        self.initialize(self.children())

    def queries(self, query: Tensor, position: Tensor | None = None) -> Tensor:
        """Return q (B, 1, T, s) of rows."""
        q = self.q_proj(query) if self.site.role == "cross" else self.vectors(self._split(query)[2], 0)
        return q.unsqueeze(1)

    def columns(self, memory: Tensor, position: Tensor | None = None) -> dict[str, Tensor]:
        """Return keys (B, 1, S, s) and values (B, 1, S, w) of a memory (B, S, D), or of rows."""
        if self.site.role == "cross":
            k, tokens = self.k_proj(memory), memory
        else:
            tokens, _, z = self._split(memory)
            k = self.vectors(z, 1)
        return {"keys": k.unsqueeze(1), "values": F.silu(self.v_proj(tokens)).unsqueeze(1)}

    def merge_heads(self, heads: Tensor, query: Tensor) -> Tensor:
        """Return u * (h - x) of heads (B, 1, T, w) and rows."""
        x, moved, _ = self._split(query)
        reset, update = F.silu(self.reset_proj(moved)), upcast(self.update_proj(moved)).sigmoid()
        hidden = self.out_proj(reset * heads.transpose(1, 2).flatten(2).type_as(reset))
        if self.site.role != "cross":
            hidden = hidden + self.h_proj(moved)
        return (update * (F.silu(upcast(hidden)) - upcast(x))).type_as(x)

    def attend(self, inputs: Inputs) -> Attended:
        """The equations of the module."""
        if self.site.role == "cross":
            return super().attend(inputs)
        return super().attend(replace(inputs, query=self._rows(inputs.query, self._moved(inputs))))

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        state, carry = super().begin(inputs)
        if self.site.role != "cross":
            state["averages"] = self.average.empty(inputs.batch_size, inputs.hypotheses)
        return state, carry

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """The same for the newest token of each hypothesis."""
        if self.site.role == "cross":
            return super().advance(inputs, state)
        moved, averages = self.average.step(inputs.query, state["averages"])
        attended, state = super().advance(replace(inputs, query=self._rows(inputs.query, moved)), state)
        return attended, {**state, "averages": averages}

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the share of each state in the average that a token keeps, and the mean update gate of the tokens."""
        learned = super().learned_numbers(inputs)
        if self.site.role != "cross":
            for name, kept in zip(("kept share", "kept share from the right"), self.average.kept(), strict=False):
                learned[name] = kept.mean(0, keepdim=True)
        if inputs is not None:
            moved = inputs.query if self.site.role == "cross" else self._moved(inputs)
            gates = upcast(self.update_proj(moved)).sigmoid().mean(-1)
            learned["update gate"] = token_means(gates.unsqueeze(1), inputs.query_valid)
        return learned

    def _moved(self, inputs: Inputs) -> Tensor:
        """Return x' (B, T, D)."""
        moved: Tensor = self.average(inputs.query, inputs.query_valid)
        return moved

    def _rows(self, x: Tensor, moved: Tensor) -> Tensor:
        """Return x, x' and z of the same tokens as one tensor (..., D + D + s), which other methods get as rows."""
        return torch.cat([x, moved, F.silu(self.z_proj(moved)).type_as(x)], -1)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, x' and z of rows; in the cross role, whose rows are the queries x, x for all three."""
        if self.site.role == "cross":
            return rows, rows, rows
        width = self.site.d_model
        x, moved, z = rows.split([width, width, rows.shape[-1] - 2 * width], -1)
        return x, moved, z

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Compute the equations token by token."""
        x, memory, valid = inputs.query, inputs.context, inputs.context_valid
        cross, encoder = self.site.role == "cross", self.site.role == "encoder"
        moved = x if cross else self._literal_average(x, valid)
        if cross:
            q, k = self.q_proj(x), self.k_proj(memory)
        else:
            z = F.silu(self.z_proj(moved))
            q, k = (z * self.vectors.kappa[which] + self.vectors.mu[which] for which in range(2))
        v, chunk, segments = F.silu(self.v_proj(memory)), self.chunk or memory.shape[1] + x.shape[1], []
        for b in range(len(x)):
            real = memory.shape[1] if valid is None else int(valid[b].sum())
            sums = []
            for i in range(x.shape[1]):
                keys = [j for j in range(real) if cross or (i // chunk == j // chunk and (encoder or j <= i))]
                n = self.projection.key_width**0.5 if self.activation == "softmax" else max(len(keys), 1)
                b_ij = self.table[torch.tensor(keys, dtype=torch.long) - i + self.reach - 1]
                scores = k[b, keys] @ q[b, i] / n + b_ij
                weights = scores.softmax(-1) if self.activation == "softmax" else ELEMENTWISE[self.activation](scores)
                sums.append(weights @ v[b, keys])
            segments.append(torch.stack(sums))
        hidden = self.out_proj(F.silu(self.reset_proj(moved)) * torch.stack(segments))
        hidden = hidden if cross else hidden + self.h_proj(moved)
        return Attended(self.update_proj(moved).sigmoid() * (F.silu(hidden) - x))

    def _literal_average(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Return silu(e + omega x) by the recurrence itself."""
        average = self.average
        x = x if valid is None else x * valid.unsqueeze(-1)
        total = average.omega * x
        for way in range(len(average.alpha)):
            p, d = average.alpha[way].sigmoid(), average.delta[way].sigmoid()
            states, outputs = x.new_zeros(len(x), *p.shape), []
            for token in (x.flip(1) if way else x).unbind(1):
                states = (1 - p * d) * states + p * average.beta[way] * token.unsqueeze(-1)
                outputs.append((average.eta[way] * states).sum(-1) / p.shape[-1] ** 0.5)
            e = torch.stack(outputs, 1)
            total = total + (e.flip(1) if way else e)
        return F.silu(total)
