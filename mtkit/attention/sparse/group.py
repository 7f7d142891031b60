"""Group attention: each sentence of a document attends to itself, or to its source sentence; upper layers also to all.

Paper: Bao, Zhang, Teng, Chen and Luo, "G-Transformer for Document-level Machine Translation", ACL 2021, arXiv
2105.14761, section 4, and the authors' code, baoguangsheng/g-transformer. Lower layers have group attention: a query
sees the keys of its own sentence, in the cross role of the source sentence with its number. The top `context_layers`
add full attention with projections of its own: y = g * local + (1 - g) * full with g = sigmoid(W [local; full] + b),
after both output projections. The paper's text was not at hand; the equations are the code's.
Departures: sentences are counted from break pieces by `mtkit.attention.marks`; there is no tag for tokens outside
sentences. A target sentence beyond the last source sentence reads the last one (the authors' code gives NaN).
Regularizers read the group attention.
Cost: O(T²). On the CPU, group attention over a context of `LONG` tokens or more costs O(T L) for sentences of up to L
tokens, and a step of the decoder O(L); otherwise a mask hides the other sentences, and a step costs O(t).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from mtkit.attention.bases.layers import xavier_linear
from mtkit.attention.bases.product_attention import ProductAttention
from mtkit.attention.bases.score_attention import Pairs
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing, token_means
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.kernels.sentence_rows import attend_within
from mtkit.attention.marks import sentences
from mtkit.attention.options import Natural, Within

LONG = 1_000
"""Smallest context, in tokens, that the CPU computes in rows of sentences. A mask is as fast for shorter ones."""


class Group(ProductAttention):
    """Attention within each sentence of a document; upper layers mix it with full attention.

    context_layers: number of layers, from the top, that also attend to all sentences. gate_bias: initial bias of the
    gate between the two; a positive one favours the own sentence.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
    paper = "Bao et al. 2021, arXiv 2105.14761"
    small: ClassVar[dict[str, Any]] = {"context_layers": 1}
    variants = ({"context_layers": 0}, {"context_layers": 2, "gate_bias": 1.0})
    reads_marks = True
    keeps_shapes = False

    def __init__(
        self, site: Site, *, context_layers: Natural = 2, gate_bias: Annotated[float, Within(-30.0, 30.0)] = 0.0
    ) -> None:
        super().__init__(site)
        self.context: ProductAttention | None = None
        if site.layer >= site.layers - context_layers:
            self.context = ProductAttention(replace(site, regularizer=None, nearby=None))
            self.gate = xavier_linear(2 * site.d_model, site.d_model, gate_bias)

    def attend(self, inputs: Inputs) -> Attended:
        """Group attention; in context layers mixed with full attention, whose weights are returned."""
        if self.context is None:
            return self._within(inputs)
        local = self._within(replace(inputs, need_weights=False))
        wide = self.context.attend(inputs)
        return self._mixed(local, wide)

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return the states of both attentions; of the past, a query sees what begins at "first" (B, N)."""
        local, _ = super().begin(inputs)
        if inputs.memory is None:
            zeros = torch.zeros(
                inputs.batch_size, inputs.hypotheses, dtype=torch.long, device=self.q_proj.weight.device
            )
            local |= {"sentence": zeros, "first": zeros.clone()}
        elif inputs.memory_marks is not None:
            source = sentences(inputs.memory_marks)
            local["source"] = {"shared": {"sentence": source, "last": _last(source, inputs.memory_valid)}}
        if self.context is None:
            return {"local": local}, None
        return {"local": local, "context": self.context.begin(inputs)[0]}, None

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """The same for the newest token of each hypothesis, whose sentence is in `inputs.query_marks`."""
        local_state = self._in_sentence(state["local"], inputs)
        if self.context is None:
            attended, local = super().advance(inputs, local_state)
            return attended, {"local": local}
        attended, local = super().advance(replace(inputs, need_weights=False), local_state)
        wide, context = self.context.advance(inputs, state["context"])
        return self._mixed(attended, wide), {"local": local, "context": context}

    def _within(self, inputs: Inputs) -> Attended:
        """Group attention, in rows of sentences if the context is long and nobody reads the weights."""
        read = inputs.need_weights or self.regularizes_weights or self.positions is not None
        short = inputs.context_marks is None or inputs.context.shape[1] < LONG
        if read or short or inputs.query.device.type != "cpu":
            return super().attend(inputs)
        query_sentence, key_sentence = self._sentences(inputs)
        q, (k, v) = self.queries(inputs.query), self.keys_values(inputs.context)
        masks, causal = (inputs.query_valid, inputs.context_valid), self.site.causal
        heads = attend_within(
            q, k, v, query_sentence, key_sentence, *masks, scale=self.scale, causal=causal, dropout=self.dropout
        )
        return self.result(inputs, heads, v)

    def _mixed(self, local: Attended, wide: Attended) -> Attended:
        """The gated sum of both outputs, with the losses of the first and the weights of the second."""
        gate = self._gate(local.output, wide.output)
        output = gate * local.output + (1 - gate) * wide.output
        return Attended(output, weights=wide.weights, losses=local.losses)

    def _gate(self, local: Tensor, wide: Tensor) -> Tensor:
        """The share (..., D) of the group attention."""
        return upcast(self.gate(torch.cat([local, wide], -1))).sigmoid().type_as(local)

    def seen(self, inputs: Inputs) -> Tensor | None:
        """Return which real keys are in the query's sentence, (B, T, S)."""
        if inputs.context_marks is None:  # the context is one sentence
            return inputs.context_valid
        query_sentence, key_sentence = self._sentences(inputs)
        same = query_sentence.unsqueeze(2) == key_sentence.unsqueeze(1)
        return same if inputs.context_valid is None else same & inputs.context_valid.unsqueeze(1)

    def _sentences(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the sentence numbers of queries, (B, T), and of keys, (B, S); the context has marks."""
        assert inputs.context_marks is not None
        key_sentence = sentences(inputs.context_marks)
        if inputs.memory is None:
            return key_sentence, key_sentence
        query_sentence = (
            key_sentence.new_zeros(inputs.query.shape[:2])
            if inputs.query_marks is None
            else sentences(inputs.query_marks)
        )
        return query_sentence.minimum(_last(key_sentence, inputs.memory_valid)), key_sentence

    def shown(self, pairs: Pairs) -> Tensor | None:
        """Return the keys of the query's sentence as regularizers read them, (B, 1, T, S)."""
        return None if pairs.valid is None or pairs.valid.dim() == 2 else pairs.valid.unsqueeze(1)

    def _in_sentence(self, state: State, inputs: Inputs) -> State:
        """Return the state of the group attention with the sentences of the newest tokens."""
        state = {**state, "weighs": inputs.need_weights}
        if inputs.query_marks is None:
            return state
        sentence = sentences(inputs.query_marks)
        if self.site.role == "cross":
            return {**state, "sentence": sentence}
        first = torch.where(sentence == state["sentence"], state["first"], state["count"])
        return {**state, "sentence": sentence, "first": first}

    def newest(self, query: Tensor, state: State) -> tuple[Pairs, State]:
        """Return the pairs of a step, limited to the sentences that `_in_sentence` and `begin` wrote into the state."""
        pairs, after = super().newest(query, state)
        if self.site.role == "cross":
            if "source" in state:
                source = state["source"]["shared"]
                query_sentence = state.get("sentence", torch.zeros_like(source["last"])).minimum(source["last"])
                same = query_sentence.unsqueeze(2) == source["sentence"].unsqueeze(1)
                pairs = pairs._replace(valid=same if pairs.valid is None else same & pairs.valid.unsqueeze(1))
            return pairs, after
        first = state["first"]
        after = {**after, "sentence": state["sentence"], "first": first}
        shared = "seen" in after
        position = (
            after["shared"]["position"][:, None, : after["rows"]] if shared else pairs.key_position.view(1, 1, -1)
        )
        if self._skips_earlier(pairs, state) and len(first):
            begin = int(torch.searchsorted(position[0, 0], first.amin()))
            columns = {name: x[:, :, begin:] for name, x in pairs.columns.items()}
            pairs = pairs._replace(columns=columns, valid=None if pairs.valid is None else pairs.valid[:, :, begin:])
            position = position[:, :, begin:]
        visible = position >= (first.unsqueeze(2) if shared else first.view(-1, 1, 1))  # (B, N, M) or (B*N, 1, t)
        return pairs._replace(valid=visible if pairs.valid is None else visible & pairs.valid, state=after), after

    def _skips_earlier(self, pairs: Pairs, state: State) -> bool:
        """Whether a step skips the keys before the first visible one; on an accelerator, the host would wait for it."""
        long = pairs.keys.shape[2] >= LONG
        return long and self.positions is None and not state["weighs"] and pairs.q.device.type == "cpu"

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        """The same with a loop over queries for the sentences, and the gate written literally."""
        local = self.literal(inputs, self._literal_groups(inputs))
        if self.context is None:
            return local
        wide = self.context.literal(inputs)
        gate = torch.sigmoid(torch.cat([local.output, wide.output], -1) @ self.gate.weight.T + self.gate.bias)
        return Attended(gate * local.output + (1 - gate) * wide.output, weights=wide.weights)

    def _literal_groups(self, inputs: Inputs) -> Tensor:
        """Return P_i = {j : n_j = n_i}, with n_i = min(n_i, last real source sentence) in the cross role."""
        seen = torch.zeros(*inputs.query.shape[:2], inputs.context.shape[1], dtype=torch.bool)
        for segment, rows in enumerate(seen):
            own, key = (
                [0] * x.shape[1] if marks is None else [mark // 2 for mark in marks[segment].tolist()]
                for x, marks in ((inputs.query, inputs.query_marks), (inputs.context, inputs.context_marks))
            )
            real = key
            if inputs.memory_valid is not None:
                real = [n for n, valid in zip(key, inputs.memory_valid[segment].tolist(), strict=True) if valid]
            for i, row in enumerate(rows):
                sentence = min(own[i], max(real, default=0)) if self.site.role == "cross" else own[i]
                row[[j for j, n in enumerate(key) if n == sentence]] = True
        return seen

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the mean share of the group attention in a context layer."""
        learned = super().learned_numbers(inputs)
        if inputs is not None and self.context is not None:
            inputs = replace(inputs, need_weights=False)
            gate = self._gate(super().attend(inputs).output, self.context.attend(inputs).output)
            learned["own sentence"] = token_means(gate.mean(-1)[:, None], inputs.query_valid)
        return learned

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        """Load the weights of `full` into both attentions."""
        super().adopt(full_state)
        if self.context is not None and not any(name.startswith("context.") for name in full_state):
            self.context.adopt(full_state)


def _last(sentence: Tensor, valid: Tensor | None) -> Tensor:
    """Return the last real sentence (B, 1) of sentence numbers (B, S); 0 if all tokens are padding."""
    real = sentence if valid is None else sentence.masked_fill(~valid, 0)
    return real.amax(1, keepdim=True)
