"""The encoder-decoder Transformer, with any attention mechanism in each role and layer.

Paper: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv 1706.03762.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtkit.attention import State
from mtkit.attention.registry import find
from mtkit.model.checkpointed_layers import run_checkpointed
from mtkit.model.embedding import Embedding, absolute_positions, token_table
from mtkit.model.layers import Context, DecoderLayer, EncoderLayer, StackPass, Weights
from mtkit.model.network import Choice, Encoded, Logits, Network, Output, Shortlist, build_stack
from mtkit.model.reversible import refuse_carry, run_reversibly
from mtkit.model.sublayers import LayerNorm, from_stream, to_stream
from mtkit.recipe import ModelSettings
from mtkit.text.tokenizer import BREAK

TOGETHER = 1024
"""Padded source pieces per thread that are encoded at a time."""


class Transformer(Network):
    """Encoder and decoder layers of attention and feed-forward."""

    def __init__(
        self,
        settings: ModelSettings,
        attention: Mapping[str, list[Choice]],
        *,
        source_vocabulary: int,
        target_vocabulary: int,
        seed: int = 1,
    ) -> None:
        """`attention` has the choice of each layer for each role (`mtkit.model.build.choose`)."""
        width, longest = settings.d_model, settings.max_length
        concatenated = settings.position_width
        target = token_table(target_vocabulary, width - concatenated)
        source = target if settings.tie == "all" else token_table(source_vocabulary, width - concatenated)
        positions = [absolute_positions(settings.positions, longest, concatenated or width) for _ in range(2)]
        super().__init__(
            settings,
            Embedding(source, positions[0], settings.dropout, concatenated=concatenated > 0),
            Embedding(target, positions[1], settings.dropout, concatenated=concatenated > 0),
        )
        shared: dict[Any, nn.Module] = {}
        encoder = build_stack("encoder", attention["encoder"], settings, seed, shared)
        decoder = build_stack("decoder", attention["decoder"], settings, seed, shared)
        cross = build_stack("cross", attention["cross"], settings, seed, shared)
        if settings.reversible:
            for role, stack in (("encoder", encoder), ("decoder", decoder), ("cross", cross)):
                for choice, sublayer in zip(attention[role], stack, strict=True):
                    refuse_carry(choice.name, sublayer)
        self.encoder = nn.ModuleList(EncoderLayer(sublayer, settings) for sublayer in encoder)
        self.decoder = nn.ModuleList(DecoderLayer(*pair, settings) for pair in zip(decoder, cross, strict=True))
        # pre-norm layers do not normalise their output
        self.encoder_norm = LayerNorm(width) if settings.norm == "pre" else nn.Identity()
        self.decoder_norm = LayerNorm(width) if settings.norm == "pre" else nn.Identity()
        self.longest_source = min([longest, *(sublayer.longest for sublayer in (*encoder, *cross) if sublayer.longest)])
        self.longest_target = min([longest, *(sublayer.longest for sublayer in decoder if sublayer.longest)])
        self.has_weights = find(attention["cross"][-1].name).weights
        self.reads_marks = any(sublayer.reads_marks for sublayer in (*encoder, *decoder, *cross))

    def encode(
        self,
        source: Tensor,
        source_valid: Tensor | None = None,
        *,
        source_lengths: Tensor | None = None,
        task: Tensor | None = None,
        weights: Weights | None = None,
    ) -> Encoded:
        encoded = None if weights is not None else encoded_in_parts(self._encode, source, source_valid, task)
        encoded = encoded or self._encode(source, source_valid, task, weights)
        encoded.marks = self.marks(source)
        return encoded

    def _encode(
        self, source: Tensor, source_valid: Tensor | None, task: Tensor | None, weights: Weights | None = None
    ) -> Encoded:
        x, marks = self.source_embedding(source, self.places(source)), self.marks(source)
        stack_pass = StackPass(weights=weights)
        layers = [cast(EncoderLayer, layer) for layer in self.encoder]
        if self._runs_reversibly(weights):
            sublayers = [part for layer in layers for part in layer.sublayers(source_valid, task, marks)]
            stream = run_reversibly(sublayers, x, stack_pass)
        else:
            stream = to_stream(x, self.settings)
            run_layer = self._layer_runner(weights)
            for layer in layers:
                stream = run_layer(layer, stream, stack_pass, valid=source_valid, task=task, marks=marks)
        memory = self.encoder_norm(from_stream(stream))
        losses, log_prob = stack_pass.losses or {}, stack_pass.log_prob
        return Encoded(memory, source_valid, stack_pass.self_carry, task, losses=losses, log_prob=log_prob)

    def decode(
        self, encoded: Encoded, target_in: Tensor, target_valid: Tensor | None, weights: Weights | None = None
    ) -> Output:
        stack_pass = StackPass(losses=encoded.losses, log_prob=encoded.log_prob, weights=weights)
        marks = self.marks(target_in), encoded.marks
        context = Context(encoded.memory, encoded.valid, encoded.carry, target_valid, encoded.task, *marks)
        x = self.target_embedding(target_in, self.places(target_in))
        if self._runs_reversibly(weights):
            sublayers = [part for layer in self._decoder_layers for part in layer.sublayers(context)]
            stream = run_reversibly(sublayers, x, stack_pass, encoded.memory)
        else:
            stream = to_stream(x, self.settings)
            run_layer = self._layer_runner(weights)
            for layer in self.decoder:
                stream = run_layer(layer, stream, stack_pass, context)
        return Output(self.decoder_norm(from_stream(stream)), stack_pass.losses or {}, stack_pass.log_prob)

    def start(self, encoded: Encoded, *, hypotheses: int = 1, pieces: Tensor | None = None) -> State:
        batch_size, self_carry, cross_carry = encoded.memory.shape[0], None, None
        shortlist = None if pieces is None else Shortlist(pieces, self.logits_of(pieces))
        sentence = self.first_sentence(batch_size, hypotheses)
        position: int | Tensor = 0
        if self.settings.sentence_positions:
            position = torch.zeros(batch_size, hypotheses, dtype=torch.long, device=encoded.memory.device)
        state: State = {"position": position, "shortlist": shortlist, "sentence": sentence}
        for number, layer in enumerate(self._decoder_layers):
            self_state, self_carry = layer.self_attention.start(
                batch_size, hypotheses=hypotheses, carry=self_carry, memory_carry=encoded.carry, task=encoded.task
            )
            cross_state, cross_carry = layer.cross_attention.start(
                batch_size,
                encoded.memory,
                encoded.valid,
                hypotheses=hypotheses,
                carry=cross_carry,
                memory_carry=encoded.carry,
                task=encoded.task,
                memory_marks=encoded.marks,
            )
            state[f"layer{number}"] = {"self": self_state, "cross": cross_state}
        return state

    def step(self, token: Tensor, state: State, *, need_weights: bool = False) -> tuple[Logits, State, Tensor | None]:
        shortlist: Shortlist | None = state["shortlist"]
        token = token if shortlist is None else shortlist.pieces[token]
        position = state["position"]
        if self.settings.sentence_positions:
            position = position.masked_fill(token == BREAK, 0)
        x = to_stream(self.target_embedding.at(token, position), self.settings)
        sentence, marks = self.next_marks(token, state["sentence"])
        stack_pass, weights = StackPass(marks=marks), None
        after: State = {"position": position + 1, "shortlist": shortlist, "sentence": sentence}
        last = len(self.decoder) - 1
        for number, layer in enumerate(self._decoder_layers):
            name = f"layer{number}"
            wanted = need_weights and number == last
            x, after[name], weights = layer.step(x, state[name], stack_pass, need_weights=wanted)
        logits = self.next_logits(self.decoder_norm(from_stream(x)), shortlist)
        return logits, after, None if weights is None else weights.mean(1)

    def fixed_state(self, state: State, segments: int, hypotheses: int, steps: int) -> State | None:
        after: State = dict(state)
        for number, layer in enumerate(self._decoder_layers):
            parts = state[f"layer{number}"]
            self_state = layer.self_attention.fixed_state(parts["self"], hypotheses, steps)
            cross_state = layer.cross_attention.fixed_state(parts["cross"], hypotheses, steps)
            if self_state is None or cross_state is None:
                return None
            after[f"layer{number}"] = {"self": self_state, "cross": cross_state}
        if not isinstance(state["position"], Tensor):
            device = self.target_embedding.tokens.weight.device
            after["position"] = torch.full((segments, hypotheses), state["position"], device=device)
        return after

    def places(self, pieces: Tensor) -> Tensor | None:
        """The positions (B, T) of pieces, counted from the last break if the model counts them so; None: from 0."""
        if not self.settings.sentence_positions:
            return None
        index = torch.arange(pieces.shape[1], device=pieces.device)
        return index - ((pieces == BREAK) * index).cummax(1).values

    def _runs_reversibly(self, weights: Weights | None) -> bool:
        return self.settings.reversible and torch.is_grad_enabled() and weights is None

    def _layer_runner(self, weights: Weights | None) -> Callable[..., Any]:
        """The function that runs a layer; with checkpointing, passes that gather weights do not use it."""
        if self.checkpoints_activations and torch.is_grad_enabled() and weights is None:
            return run_checkpointed
        return nn.Module.__call__

    @property
    def _decoder_layers(self) -> list[DecoderLayer]:
        return [cast(DecoderLayer, layer) for layer in self.decoder]


def encoded_in_parts(
    encode: Callable[..., Encoded], source: Tensor, valid: Tensor | None, task: Tensor | None
) -> Encoded | None:
    """Encode a large batch (B, S) on the CPU in parts that fit caches, each as wide as its longest segment.

    Segments are sorted longest first, so that parts omit most of the padding. Returns None if parts save nothing, or if
    the attentions return a carry, losses or samples, which would have to be joined.
    """
    room = TOGETHER * torch.get_num_threads()
    if valid is None or source.device.type != "cpu" or source.numel() < 2 * room or torch.is_grad_enabled():
        return None
    lengths, memory, first = valid.sum(1).tolist(), None, 0
    while first < len(lengths):
        count = max(1, room // max(lengths[first], 1))
        rows, longest = slice(first, first + count), max(1, *lengths[first : first + count])
        part = encode(source[rows, :longest], valid[rows, :longest], task=None if task is None else task[rows])
        if part.carry is not None or part.losses or part.log_prob is not None:
            return None
        if memory is None:
            memory = part.memory.new_zeros(*source.shape, part.memory.shape[2])
        memory[rows, :longest] = part.memory
        first += count
    return None if memory is None else Encoded(memory, valid, None, task)
