"""The recurrent encoder-decoder with attention, in the form of its paper and in the textbook form.

Paper: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and Translate", ICLR 2015,
arXiv 1409.0473, appendix A.
Departures: embeddings, states and the maxout layer have one width, so that the output projection can be the
embedding. There may be several layers; the first reads the context. The attention is a sub-layer as in the
Transformer, with projections of values and output, and any mechanism that has a cross role.

The decoder multiplies inputs that are known beforehand for all positions at once; a unit computes only what depends on
the previous state. Gates and states are float32 in every precision.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mtkit.attention import State
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.registry import find
from mtkit.errors import MtkitError
from mtkit.model.embedding import Embedding, token_table
from mtkit.model.layers import Weights
from mtkit.model.network import Choice, Encoded, Logits, Network, Output, Shortlist, build_attention
from mtkit.model.sublayers import Dropout
from mtkit.recipe import ModelSettings

CellState = tuple[Tensor, ...]
"""(B, N, D) each; the first is the unit's output."""


class GatedUnit(nn.Module):
    """The gated recurrent unit of Bahdanau et al., 2015, appendix A.1.1: the reset gate is applied before the product.

    z and r are sigmoids of their inputs + U s; s' = (1 - z) s + z tanh(input + U_c (r s)). (In PyTorch's `nn.GRU`, z is
    1 - z here, and r is applied after the product.)
    """

    parts = 3
    """Vectors of width D that a projected input consists of."""
    states = 1
    """Tensors of the state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 2 * width, bias=False)
        self.candidate = nn.Linear(width, width, bias=False)
        _orthogonal(self.gates.weight)
        _orthogonal(self.candidate.weight)

    def forward(self, inputs: Tensor, state: CellState) -> CellState:
        """inputs (..., 3D), its update, reset and candidate parts with their biases; state of (..., D)."""
        (old,) = state
        width = old.shape[-1]
        gates = upcast(inputs[..., : 2 * width] + self.gates(old)).sigmoid()
        update, reset = gates.chunk(2, -1)
        candidate = upcast(inputs[..., 2 * width :] + self.candidate(reset * old)).tanh()
        return (torch.lerp(old, candidate, update),)

    @staticmethod
    def start_bias(bias: Tensor) -> None:
        """Set the bias of an input (3D,): zero."""
        nn.init.zeros_(bias)


class LongShortTerm(nn.Module):
    """The LSTM unit (Hochreiter and Schmidhuber, 1997) with a forget gate, whose bias starts at 1."""

    parts = 4
    states = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 4 * width, bias=False)
        _orthogonal(self.gates.weight)

    def forward(self, inputs: Tensor, state: CellState) -> CellState:
        """inputs (..., 4D), its input, forget, output and candidate parts; state (output, cell) of (..., D)."""
        output, cell = state
        width = cell.shape[-1]
        sums = upcast(inputs + self.gates(output))
        enter, forget, leave = sums[..., : 3 * width].sigmoid().chunk(3, -1)
        cell = forget * cell + enter * sums[..., 3 * width :].tanh()
        return leave * cell.tanh(), cell

    @staticmethod
    def start_bias(bias: Tensor) -> None:
        """Set the bias of an input (4D,): one for the forget gate, else zero."""
        nn.init.zeros_(bias)
        width = len(bias) // 4
        nn.init.ones_(bias[width : 2 * width])


CELLS: dict[str, type[GatedUnit] | type[LongShortTerm]] = {"gru": GatedUnit, "lstm": LongShortTerm}
"""Units by the name in `model.cell`."""


def _orthogonal(weight: Tensor) -> None:
    """Make each square part of a recurrent matrix (P*D, D) orthogonal (Bahdanau et al., 2015, appendix B.1)."""
    for part in weight.split(weight.shape[1]):
        nn.init.orthogonal_(part)


class RecurrentEncoder(nn.Module):
    """Layers of gated or LSTM units over the source, in one or both directions; float32 in every precision.

    Sequences are packed, so padding is not read and does not change a segment's states.
    """

    unrounded = True
    """Rounded weights would not fit `nn.GRU`, whose biases stay in float32."""

    def __init__(self, cell: str, width: int, layers: int, dropout: float, *, both_ways: bool) -> None:
        """`cell` is "gru" or "lstm"; `width` is the width of the tokens and of each direction's states."""
        super().__init__()
        kind = {"gru": nn.GRU, "lstm": nn.LSTM}[cell]
        between = dropout if layers > 1 else 0.0
        self.layers = kind(width, width, layers, batch_first=True, dropout=between, bidirectional=both_ways)
        for name, parameter in self.layers.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
                if cell == "lstm" and name.startswith("bias_ih"):
                    nn.init.ones_(parameter.detach()[width : 2 * width])
            else:
                start = nn.init.orthogonal_ if name.startswith("weight_hh") else nn.init.xavier_uniform_
                for part in parameter.detach().split(width):
                    start(part)

    def forward(self, x: Tensor, valid: Tensor | None, lengths: Tensor | None = None) -> tuple[Tensor, list[CellState]]:
        """x (B, S, D) and valid (B, S) to annotations (B, S, D), 2D both ways, and each layer's last states (B, D).

        Annotations of padding are zero. Last states are the forward direction's. `lengths` (B,), on the CPU: the real
        tokens of each segment; if None, they are copied from the device, for which the host waits.
        """
        with torch.autocast(x.device.type, enabled=False):
            if valid is None:
                annotations, last = self.layers(upcast(x))
                states = last if isinstance(last, tuple) else (last,)
            else:
                counts = valid.sum(1).clamp(min=1)
                lengths = counts.cpu() if lengths is None else lengths.clamp(min=1)
                # longest first, in an order computed on the device: PyTorch would copy it to the host and wait
                order = counts.argsort(descending=True)
                sorted_lengths = lengths.sort(descending=True).values
                packed = pack_padded_sequence(upcast(x).index_select(0, order), sorted_lengths, batch_first=True)
                annotations, last = self.layers(packed)
                annotations, _ = pad_packed_sequence(annotations, batch_first=True, total_length=x.shape[1])
                back = order.argsort()
                annotations = annotations.index_select(0, back)
                states = last if isinstance(last, tuple) else (last,)
                states = tuple(state.index_select(1, back) for state in states)
        directions = 2 if self.layers.bidirectional else 1
        return annotations, list(zip(*(state[::directions].unbind(0) for state in states), strict=True))


class Recurrent(Network):
    """A recurrent decoder that attends to the source once per token, with its previous state as the query.

    Paper's form: the encoder reads both ways, the decoder starts from the backward state at the first word, and a
    maxout layer over state, token and context predicts. Textbook form: the encoder reads one way, each decoder layer
    starts from the last state of its encoder layer, and the top layer's new state predicts.
    """

    def __init__(
        self,
        settings: ModelSettings,
        attention: Choice,
        *,
        source_vocabulary: int,
        target_vocabulary: int,
        seed: int = 1,
    ) -> None:
        """`attention` is the attention to the source (`mtkit.model.build.choose`).

        Raises: MtkitError for an attention that cannot be trained by steps.
        """
        width, layers = settings.d_model, settings.decoder_layers
        target = token_table(target_vocabulary, width)
        source = target if settings.tie == "all" else token_table(source_vocabulary, width)
        super().__init__(settings, Embedding(source, None, settings.dropout), Embedding(target, None, settings.dropout))
        self.as_in_paper = settings.form == "paper"
        kind = CELLS[settings.cell]
        self.encoder = RecurrentEncoder(
            settings.cell, width, settings.encoder_layers, settings.dropout, both_ways=self.as_in_paper
        )
        annotation = width * (2 if self.as_in_paper else 1)
        self.attention = build_attention(attention, "cross", settings, seed, memory_width=annotation)
        if not self.attention.learns_by_steps:
            raise MtkitError(
                f"the rnn attends step by step, and attention '{attention.name}', as it is set, learns from passes "
                "over whole sequences: take another, or a regularizer out"
            )
        self.cells = nn.ModuleList(kind(width) for _ in range(layers))
        self.from_token = nn.Linear(width, kind.parts * width)
        self.from_context = nn.Linear(width, kind.parts * width, bias=False)
        self.from_below = nn.ModuleList(nn.Linear(width, kind.parts * width) for _ in range(layers - 1))
        for linear in (self.from_token, *self.from_below):
            kind.start_bias(linear.bias)
        self.first_states = nn.Linear(width, kind.states * layers * width) if self.as_in_paper else None
        self.maxout = nn.Linear(3 * width, 2 * width) if self.as_in_paper else None
        self.dropout = Dropout(settings.dropout)
        self.longest_source = min(settings.max_length, self.attention.longest or settings.max_length)
        self.has_weights = find(attention.name).weights
        self.reads_marks = self.attention.reads_marks

    def encode(
        self,
        source: Tensor,
        source_valid: Tensor | None = None,
        *,
        source_lengths: Tensor | None = None,
        task: Tensor | None = None,
        weights: Weights | None = None,
    ) -> Encoded:
        annotations, last = self.encoder(self.source_embedding(source), source_valid, source_lengths)
        states, marks = self._first(annotations, last), self.marks(source)
        return Encoded(annotations, source_valid, task=task, marks=marks, states=states)

    def decode(
        self, encoded: Encoded, target_in: Tensor, target_valid: Tensor | None, weights: Weights | None = None
    ) -> Output:
        state = self.start(encoded)
        tokens = self.target_embedding(target_in)
        read: list[tuple[Tensor, Tensor]] = []
        rows: list[Tensor] = []
        wanted = weights is not None and "cross" in weights
        for token, inputs in zip(target_in.split(1, dim=1), self.from_token(tokens).split(1, dim=1), strict=True):
            # the query is the previous state
            previous, context, state, row = self._advanced(token, inputs, state, need_weights=wanted)
            rows += [] if row is None else [row]
            read.append((_top(state) if self.maxout is None else previous, context))
        if weights is not None and wanted:
            weights["cross"] += [torch.cat(rows, dim=2) if rows else None]
        tops, contexts = (torch.cat(parts, dim=1) for parts in zip(*read, strict=True))
        return Output(self._hidden(tops, tokens, contexts))

    def start(self, encoded: Encoded, *, hypotheses: int = 1, pieces: Tensor | None = None) -> State:
        segments = encoded.memory.shape[0]
        attention, _ = self.attention.start(
            segments,
            encoded.memory,
            encoded.valid,
            hypotheses=hypotheses,
            task=encoded.task,
            memory_marks=encoded.marks,
        )
        cells = [tuple(state[:, None].expand(-1, hypotheses, -1) for state in layer) for layer in encoded.states]
        shortlist = None if pieces is None else Shortlist(pieces, self.logits_of(pieces))
        sentence = self.first_sentence(segments, hypotheses)
        return {"cells": cells, "attention": attention, "shortlist": shortlist, "sentence": sentence}

    def step(self, token: Tensor, state: State, *, need_weights: bool = False) -> tuple[Logits, State, Tensor | None]:
        shortlist: Shortlist | None = state["shortlist"]
        token = token if shortlist is None else shortlist.pieces[token]
        embedded = self.target_embedding.at(token, 0)
        inputs = self.from_token(embedded)
        previous, context, state, weights = self._advanced(token, inputs, state, need_weights=need_weights)
        hidden = self._hidden(_top(state) if self.maxout is None else previous, embedded, context)
        return self.next_logits(hidden, shortlist), state, None if weights is None else weights.mean(1)

    def _first(self, annotations: Tensor, last: Sequence[CellState]) -> list[CellState]:
        """The decoder's initial states, (B, D) each: tanh(W_s b_0) with b_0 the backward state at the first word."""
        if self.first_states is None:
            return list(last)
        backward = annotations[:, 0, self.settings.d_model :]
        layers = upcast(self.first_states(backward)).tanh().chunk(len(self.cells), -1)
        return [layer.chunk(layer.shape[-1] // backward.shape[-1], -1) for layer in layers]

    def _advanced(
        self, token: Tensor, inputs: Tensor, state: State, *, need_weights: bool = False
    ) -> tuple[Tensor, Tensor, State, Tensor | None]:
        """The previous top state, the context that it attends to, the new state, and the attention weights.

        token (B, N) is the newest piece, inputs (B, N, P*D) its part of the first unit's input.
        """
        previous = _top(state)
        sentence, marks = self.next_marks(token, state["sentence"])
        attended, attention = self.attention.step(
            previous, state["attention"], need_weights=need_weights, query_marks=marks
        )
        inputs = inputs + self.from_context(attended.output)
        cells: list[CellState] = []
        for number, (cell, old) in enumerate(zip(self.cells, state["cells"], strict=True)):
            if number:
                inputs = self.from_below[number - 1](self.dropout(cells[-1][0]))
            cells.append(cell(inputs, old))
        after = {**state, "cells": cells, "attention": attention, "sentence": sentence}
        return previous, attended.output, after, attended.weights

    def _hidden(self, top: Tensor, token: Tensor, context: Tensor) -> Tensor:
        """The decoder's output (B, T, D) from top states, token vectors and contexts (B, T, D) each."""
        if self.maxout is None:
            return self.dropout(top)
        first, second = self.maxout(torch.cat([part.type_as(token) for part in (top, token, context)], -1)).chunk(2, -1)
        return self.dropout(torch.maximum(first, second))


def _top(state: State) -> Tensor:
    top: Tensor = state["cells"][-1][0]
    return top
