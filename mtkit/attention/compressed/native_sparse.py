"""Native sparse attention: a gated sum of attention to compressed blocks, to selected blocks and to a sliding window.

Paper: Yuan et al., "Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention", 2025,
arXiv 2502.11089, equations 5 to 12. The paper was remembered, with code of flash-linear-attention and of lucidrains.
Each branch has its own keys and values, and each head a sigmoid gate per branch, computed from the query.
Compressed: `block` tokens, one block every `stride`, become one key and one value; a query sees the blocks that have
ended. Selected: the `selected` blocks of `selected_block` tokens with the largest importance. This is the weight of the
compressed blocks in them, counted by their overlap and added over the heads that share keys. The first block, the own
one and the one before are always among them. Window: the last `window` tokens, the own one included.
Departures: the encoder role (all blocks are visible, the window extends to both sides, the block after the own one is
always selected) and the cross role (without a window; no block is always selected) are extensions. Of equally important
blocks the earlier one is taken. The default compression is the mean, as in flash-linear-attention; the paper's network
(`compress` = mlp) has about 2 (`block` K)² weights per layer. Its form and the gates' initial values are from
lucidrains' code; the paper states neither. The paper's sizes (`selected` 16, `window` 512) are for contexts of 64k
tokens. Rotary positions turn the keys of selected blocks and the window only.
Cost: O(T (T/d + n l + w)) time and O(T) memory. A step costs O(t/d + n l + w) and keeps all keys and values of selected
blocks. The choice has no gradient; compressed keys learn through their own branch.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.caches import append, picked, places_in_blocks, start_cache, written
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.bases.pattern_attention import PatternGroup
from mtkit.attention.compressed._block_choice import BlockChoice, attend_and_choose
from mtkit.attention.compressed._spans import Pool, Spans, append_row, mean, span_means, start_spans
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing, token_means
from mtkit.attention.kernels.chosen_blocks import Near, attend_chosen
from mtkit.attention.kernels.dot_product import attend, attend_step, expand_heads, safe_softmax, upcast
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.kernels.reproducible import replay_choice
from mtkit.attention.options import OneOf, Positive, refused
from mtkit.attention.slots import OWN_VECTORS

COMPRESS = ("mean", "mlp")
OPEN, CLOSED = 2.0, -2.0
"""First biases of the gates."""


class Compressor(nn.Module):
    """Two-layer network from a block's rows, with learned positions added, to one row; all heads share it."""

    def __init__(self, block: int, width: int, bias: bool) -> None:
        """Store the sizes; a bias of keys, the same in all blocks, would change no weight."""
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(block, width))
        self.inner = nn.Linear(block * width, block * width)
        self.outer = nn.Linear(block * width, width, bias=bias)
        nn.init.xavier_uniform_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)
        nn.init.xavier_uniform_(self.outer.weight)
        if bias:
            nn.init.zeros_(self.outer.bias)

    def forward(self, rows: Tensor, there: Tensor | None = None) -> Tensor:
        """Map rows (B, G, P, block, K) to (B, G, P, K), of the same type; there is no mask: all blocks are complete."""
        compressed: Tensor = self.outer(F.relu(self.inner((rows.type_as(self.positions) + self.positions).flatten(-2))))
        return compressed.type_as(rows)


class NativeSparse(HeadAttention):
    """Gated sum of softmax attention to compressed blocks, selected blocks and a window.

    block, stride: tokens per compressed block, and distance from one to the next. selected_block, selected: tokens per
    selected block, and number of them. window: last tokens that a query sees, its own included; in the encoder role
    also `window` - 1 after it. compress: how a block becomes one key and one value, "mean" or "mlp".
    """

    roles = frozenset({"encoder", "decoder", "cross"})
    published = frozenset({"decoder"})
    paper = "Yuan et al. 2025, arXiv 2502.11089"
    complexity = "O(T (T / d + n l + w))"
    growth = 2
    sequential_operations = "O(1)"
    longest_path = "by content"
    unrounded = True
    roundable = frozenset(
        {"k_proj", "v_proj", "compressed_v_proj", "window_k_proj", "window_v_proj", "gate", "out_proj"}
    )
    undecayed = ("positions",)
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {
        "projection": OWN_VECTORS,
        "merge": None,
        "positions": frozenset({"rotary"}),
        "regularizer": frozenset({"disagreement"}),
        "nearby": None,
    }
    small: ClassVar[Mapping[str, Any]] = {"block": 4, "stride": 2, "selected_block": 4, "selected": 5, "window": 3}
    variants = ({"compress": "mlp"}, {"selected": 1}, {"block": 2, "stride": 1})

    def __init__(
        self,
        site: Site,
        *,
        block: Positive = 32,
        stride: Positive = 16,
        selected_block: Positive = 64,
        selected: Positive = 6,
        window: Positive = 64,
        compress: Annotated[str, OneOf(COMPRESS)] = "mean",
    ) -> None:
        super().__init__(site)
        if block % stride or selected_block % stride:
            raise refused("stride", stride, f"divide block = {block} and selected_block = {selected_block}")
        if block > selected_block:
            raise refused("block", block, f"be at most selected_block = {selected_block}")
        self.spans, self.size, self.selected = Spans(block, stride), selected_block, selected
        self.choice = BlockChoice(self.spans, selected_block, selected, site.causal)
        self.branches = ("compressed", "selected", "window")[: 2 if site.role == "cross" else 3]
        for name in self._copies:
            first = getattr(self, self._copies[name])
            linear = nn.Linear(first.in_features, first.out_features)
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
            self.add_module(name, linear)
        self.gate = nn.Linear(site.d_model, site.heads * len(self.branches))
        nn.init.zeros_(self.gate.weight)
        opened = torch.tensor([CLOSED, OPEN] if site.role == "cross" else [CLOSED, CLOSED, OPEN])
        self.gate.bias.data.copy_(opened.repeat_interleave(site.heads))
        p = self.projection
        self.compress_keys = Compressor(block, p.key_width, bias=False) if compress == "mlp" else None
        self.compress_values = Compressor(block, p.value_width, bias=True) if compress == "mlp" else None
        self.window, around = window, window - 1
        self.near = PatternGroup(range(site.heads), site.heads, Band(around, 0 if site.causal else around))

    @property
    def _copies(self) -> dict[str, str]:
        """The names of each branch's own projections, and the projections of selected blocks, which `full` has too."""
        branches = [branch for branch in self.branches if branch != "selected"]
        return {f"{branch}_{name}": name for branch in branches for name in ("k_proj", "v_proj")}

    @property
    def _pools(self) -> dict[str, Pool]:
        return {"keys": self.compress_keys or mean, "values": self.compress_values or mean}

    @property
    def _forced(self) -> Near | None:
        """The blocks that every query selects."""
        if self.site.role == "cross":
            return None
        return Near(1, 1, 1) if self.selected >= (3 if self.site.causal else 4) else Near()

    def gates(self, query: Tensor) -> list[Tensor]:
        """Return the gates (B, H, T, 1) of each branch from queries (B, T, D)."""
        gates = torch.sigmoid(self.gate(query)).unflatten(-1, (len(self.branches), -1))
        return list(gates.permute(2, 0, 3, 1).unsqueeze(-1))

    def attend(self, inputs: Inputs) -> Attended:
        """Add the branches; blocks are selected by weights if there are more than `selected`."""
        query, valid = inputs.query, inputs.context_valid
        how: dict[str, Any] = {"scale": self.scale, "dropout": self.dropout}
        k, v = self.keys_values(inputs.context)
        unrotated, q = self._both_queries(query)
        q = q.type_as(v)
        keys, values = self._compressed(inputs.context)
        if k.shape[2] > self.selected * self.size:
            over: dict[str, Any] = {"length": k.shape[2], "self_role": inputs.memory is None, "valid": valid}
            compressed, chosen = attend_and_choose(unrotated, keys, values, self.choice, **how, **over)
            compressed = compressed.type_as(v)
            chosen = replay_choice(chosen, -(-k.shape[2] // self.size) + 1)
            how |= {"causal": self.site.causal, "valid": valid}
            selected = attend_chosen(q, k.type_as(v), v, chosen, self.size, near=self._forced, **how)
        else:
            compressed = torch.zeros_like(q)
            if keys.shape[2]:
                seen = self._seen(inputs, keys.shape[2])
                compressed, _ = attend(unrotated.type_as(values), keys.type_as(values), values, valid=seen, **how)
            how |= {"causal": self.site.causal, "valid": valid}
            selected, _ = attend(q, k.type_as(v), v, **how)
        outputs = [compressed, selected]
        if "window" in self.branches:
            outputs.append(self.near.attend(q, *self._window_keys_values(query), **how)[0])
        heads = self._gated(outputs, query)
        return self.result(inputs, heads, v)

    def _gated(self, outputs: list[Tensor], query: Tensor) -> Tensor:
        """Return the sum (B, H, T, V) of the branches' outputs, each times its gate."""
        gates = self.gates(query)
        total = outputs[0] * gates[0]
        for x, gate in zip(outputs[1:], gates[1:], strict=True):
            total = torch.addcmul(total, x, gate)
        return total

    def _both_queries(self, query: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return queries (B, H, T, K) for compressed blocks, in float32 at least and not rotated, and rotated ones."""
        with torch.autocast(query.device.type, enabled=False):
            unrotated = self.projection.queries(self.q_proj(query.type_as(self.q_proj.weight)))
        return upcast(unrotated), self._rotated(unrotated, position)

    def _compressed_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (B, G, T, K), in float32 at least, and values (B, G, T, V) to compress; not rotated."""
        k_proj, v_proj = (self.get_submodule(f"compressed_{name}") for name in ("k_proj", "v_proj"))
        with torch.autocast(tokens.device.type, enabled=False):
            k = upcast(self.projection.keys(k_proj(tokens.type_as(self.q_proj.weight))))
        return k, self.projection.values(v_proj(tokens))

    def _compressed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys (B, G, P, K), in float32 at least, and values (B, G, P, V) of complete blocks of tokens."""
        k, v = self._compressed_rows(tokens)
        if tokens.shape[1] < self.spans.size:
            return k[:, :, :0], v[:, :, :0]
        if self.compress_keys is None:
            return span_means(k, self.spans), span_means(v, self.spans)
        k_rows, v_rows = (x.unfold(2, self.spans.size, self.spans.stride).transpose(-1, -2) for x in (k, v))
        with torch.autocast(tokens.device.type, enabled=False):
            keys = self._pools["keys"](k_rows, None)
        return keys, self._pools["values"](v_rows, None)

    def _window_keys_values(self, tokens: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
        maps = (cast(nn.Linear, self.get_submodule(f"window_{name}")) for name in ("k_proj", "v_proj"))
        k, v = self.projected(tokens, *maps)
        return self._rotated(self.projection.keys(k), position), self.projection.values(v)

    def _seen(self, inputs: Inputs, blocks: int) -> Tensor | None:
        """Return which compressed blocks a query sees, (1, T, P) or (B, P); None if it sees all."""
        device = inputs.query.device
        end = torch.arange(blocks, device=device) * self.spans.stride + self.spans.size
        if self.site.causal:
            return (end <= torch.arange(1, inputs.query.shape[1] + 1, device=device).unsqueeze(1)).unsqueeze(0)
        return None if inputs.context_valid is None else end <= inputs.context_valid.sum(1, keepdim=True)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return empty caches of the branches; in the cross role the keys and values of the source."""
        memory, valid = inputs.memory, inputs.memory_valid
        if memory is not None:
            keys, values = self._compressed(memory)
            k, v = self.keys_values(memory)
            seen = self._seen(Inputs(memory, memory, None, valid), keys.shape[2])
            past = {"keys": k, "values": v, "valid": valid}
            return {"shared": {**past, "compressed": {"keys": keys, "values": values, "valid": seen}}}, None
        batch, hypotheses, like, shapes = inputs.batch_size, inputs.hypotheses, self.q_proj.weight, self.cache_shapes
        compressed = start_spans(batch, hypotheses, like, **shapes)
        near = self.near.start(batch, hypotheses, like, **shapes)
        return {"compressed": compressed, "near": near, **start_cache(batch, hypotheses, like, **shapes)}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Read the compressed blocks, select blocks by their weights, and read these and the window."""
        query = inputs.query
        over_source = "shared" in state
        rows = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
        here = None if over_source else torch.full((1,), state["count"], device=query.device)
        plain, q = (x.squeeze(2).unflatten(0, query.shape[:2]) for x in self._both_queries(rows, here))
        if over_source:
            past = state["shared"]
            blocks, seen = past["compressed"], past["compressed"]["valid"]
        else:
            state = self._with_token(rows, state, query.shape[:2], here)
            past = {"keys": written(state, "keys"), "values": written(state, "values"), "valid": None}
            blocks, seen = {name: written(state["compressed"]["spans"], name) for name in ("keys", "values")}, None
        visible = None if seen is None else seen[:, None, None]
        compressed, weights = torch.zeros_like(plain), None
        if blocks["keys"].shape[-2]:
            with torch.autocast(query.device.type, enabled=False):
                compressed, weights = attend_step(
                    plain, blocks["keys"], blocks["values"], scale=self.scale, visible=visible, need_weights=True
                )
        outputs = [compressed.type_as(past["values"]), self._step_over_selected(q, past, weights)]
        if not over_source:
            k, v = (x.squeeze(2).unflatten(0, query.shape[:2]) for x in self._window_keys_values(rows, here))
            heads, _, state["near"] = self.near.step(state["near"], q, k, v, scale=self.scale)
            outputs.append(heads)
        heads = self._gated([x.transpose(1, 2) for x in outputs], query)
        return Attended(self.merge_heads(heads, query)), state

    def _with_token(self, rows: Tensor, state: State, shape: torch.Size, here: Tensor | None) -> State:
        """Return the state with the newest tokens, (B*N, 1, D), in the caches of compressed and selected blocks."""
        k, v, *block = (
            x.squeeze(2).unflatten(0, shape) for x in (*self.keys_values(rows, here), *self._compressed_rows(rows))
        )
        with torch.autocast(rows.device.type, enabled=False):
            compressed = append_row(state["compressed"], self.spans, self._pools, keys=block[0], values=block[1])
        return {**append(state, keys=k, values=v), "compressed": compressed}

    def _step_over_selected(self, q: Tensor, past: State, weights: Tensor | None) -> Tensor:
        """Return the outputs (B, N, H, V) of queries (B, N, H, K); weights (B, H, N, P) of compressed blocks."""
        keys, values, valid = past["keys"], past["values"], past["valid"]
        length = keys.shape[-2]
        if length <= self.selected * self.size:
            visible = None if valid is None else valid[:, None, None]
            return attend_step(q, keys, values, scale=self.scale, visible=visible)[0]
        assert weights is not None
        position = None
        if keys.dim() == 5:
            position = torch.full((1, 1), length - 1, device=q.device)
        else:
            keys, values = keys.unsqueeze(1), values.unsqueeze(1)
        with torch.autocast(q.device.type, enabled=False):
            importance = self.choice.importance(weights, -(-length // self.size))  # (B, H, N, M)
        importance = importance.unflatten(1, (self.projection.key_heads, -1)).sum(2)
        lengths = None if valid is None else valid.sum(1)
        chosen = self.choice.best(importance, position, lengths).transpose(1, 2)  # (B, N, G, n)
        place, exists = places_in_blocks(chosen, self.size, length, valid)
        keys, values = (picked(x, place) for x in (keys, values))
        visible = exists.repeat_interleave(q.shape[2] // exists.shape[2], 2)
        return attend_step(q, keys, values, scale=self.scale, visible=visible)[0]

    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the mean gate of each head for each branch."""
        numbers = super().learned_numbers(inputs)
        if inputs is not None:
            with torch.no_grad():
                gates = zip(self.branches, self.gates(inputs.query), strict=True)
                numbers |= {f"{name} gate": token_means(gate, inputs.query_valid).squeeze(-1) for name, gate in gates}
        return numbers

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        """Take over the projections of `full`, the same keys and values for all branches."""
        super().adopt(full_state)
        self.adopt_copies(full_state, self._copies)

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """Add the branches query by query, with the blocks listed."""
        query, source, valid = inputs.query, inputs.context, inputs.context_valid
        lengths = [source.shape[1]] * len(query) if valid is None else valid.sum(1).tolist()
        plain, q = self._both_queries(query)
        rows = [*self.keys_values(source), *self._compressed_rows(source)]
        rows += self._window_keys_values(source) if inputs.memory is None else rows[:2]  # in the cross role not read
        k, v, block_k, block_v, near_k, near_v = (expand_heads(x, self.site.heads) for x in rows)
        gates, segments = self.gates(query), []
        for b, length in enumerate(lengths):
            starts = range(0, length - self.spans.size + 1, self.spans.stride)
            spans = [slice(start, start + self.spans.size) for start in starts]
            ended = [[span.stop <= i + 1 or not self.site.causal for span in spans] for i in range(q.shape[2])]
            compressed = []
            for h in range(self.site.heads):
                keys, values = (
                    torch.stack(
                        [x[b, h, :0].sum(0), *(self._pools[name](x[b, h, None, span], None)[0] for span in spans)]
                    )
                    for name, x in (("keys", block_k), ("values", block_v))
                )
                visible = torch.tensor(ended, dtype=torch.bool).view(q.shape[2], len(spans))
                weights = safe_softmax(plain[b, h] @ keys[1:].mT * self.scale, visible)
                compressed.append((weights @ values[1:], weights.tolist()))
            heads = []
            for h in range(self.site.heads):
                group = self.site.heads // self.projection.key_heads
                shared = [weights for _, weights in compressed[h // group * group :][:group]]
                outputs = []
                for i, row in enumerate(q[b, h].unbind()):
                    tokens = self._literal_selection(
                        i, length, [sum(x) for x in zip(*(w[i] for w in shared), strict=True)]
                    )
                    near = [j for j in range(length) if abs(i - j) < self.window and (j <= i or not self.site.causal)]
                    parts = [compressed[h][0][i]]
                    for x, y, seen in ((k, v, tokens), (near_k, near_v, near))[: len(gates) - 1]:
                        parts.append((x[b, h][seen] @ row * self.scale).softmax(0) @ y[b, h][seen])
                    mixed = [gate[b, h, i] * part for gate, part in zip(gates, parts, strict=True)]
                    outputs.append(torch.stack(mixed).sum(0))
                heads.append(torch.stack(outputs))
            segments.append(torch.stack(heads))
        return Attended(self.merge_heads(torch.stack(segments), query))

    def _literal_selection(self, i: int, length: int, weights: list[float]) -> list[int]:
        """Return the selected tokens of query i from the weights of the compressed blocks."""
        inside, of_block = self.size // self.spans.stride, self.spans.size // self.spans.stride
        query_block = i // self.size if self.site.role != "cross" else -9
        blocks = [range(start, min(start + self.size, length)) for start in range(0, length, self.size)]
        ranks = []
        for number in range(min(query_block + 1, len(blocks)) if self.site.causal else len(blocks)):
            inner = [inside * number + m - n for m in range(inside) for n in range(of_block)]
            forced = number in (0, query_block - 1, query_block + 1) and query_block >= 0
            ranks.append(
                (number != query_block, not forced, -sum(weights[m] for m in inner if 0 <= m < len(weights)), number)
            )
        chosen = [blocks[rank[-1]] for rank in sorted(ranks)[: self.selected]]
        return [j for block in chosen for j in block if j <= i or not self.site.causal]
