"""The encoder-decoder Transformer, with any attention mechanism in each role and layer.

Paper: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, arXiv 1706.03762.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtkit.attention import Attention, State
from mtkit.attention.registry import find
from mtkit.model.attentions import Choice, build_stack
from mtkit.model.embedding import Embedding, absolute_positions, token_table
from mtkit.model.layers import Context, DecoderLayer, EncoderLayer, Side
from mtkit.model.residual import closed, opened
from mtkit.model.reversible import decoder_sublayers, encoder_sublayers, refuse_carry, run_reversibly
from mtkit.recipe import ModelSettings


@dataclass
class Encoded:
    """A batch of encoded sources."""

    memory: Tensor
    """(B, S, D)."""
    valid: Tensor | None
    """(B, S)."""
    carry: Any = None
    """What the last layer's attention carried out."""
    task: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    log_prob: Tensor | None = None


@dataclass
class Output:
    """The decoder's vectors before the output projection, with what the attentions add to the training loss."""

    hidden: Tensor
    """(B, T, D)."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    log_prob: Tensor | None = None


@dataclass(frozen=True)
class Shortlist:
    """The only pieces that may come in a batch; while it is decoded, a piece is called by its place among them."""

    pieces: Tensor
    """(K,) ids."""
    logits: Callable[[Tensor], Tensor]
    """hidden (..., D) to their logits (..., K) in float32."""


class Transformer(nn.Module):
    """Translation model: token ids in, vectors whose products with `output_weight` are the next token's logits out."""

    def __init__(
        self,
        settings: ModelSettings,
        attention: Mapping[str, list[Choice]],
        *,
        source_vocabulary: int,
        target_vocabulary: int,
        seed: int = 1,
    ) -> None:
        """`attention` names the choice of each layer for each role (`mtkit.model.attentions.choose`)."""
        super().__init__()
        width, longest = settings.d_model, settings.max_length
        self.settings = settings
        target = token_table(target_vocabulary, width)
        source = target if settings.tie == "all" else token_table(source_vocabulary, width)
        positions = [absolute_positions(settings.positions, longest, width) for _ in range(2)]
        self.source_embedding = Embedding(source, positions[0], settings.dropout)
        self.target_embedding = Embedding(target, positions[1], settings.dropout)
        self.output = nn.Linear(width, target_vocabulary, bias=False) if settings.tie == "none" else None
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=width**-0.5)
        shared: dict[Any, nn.Module] = {}
        encoder = build_stack("encoder", attention["encoder"], settings, seed, shared)
        decoder = build_stack("decoder", attention["decoder"], settings, seed, shared)
        cross = build_stack("cross", attention["cross"], settings, seed, shared)
        if settings.reversible:
            for role, stack in (("encoder", encoder), ("decoder", decoder), ("cross", cross)):
                for choice, each in zip(attention[role], stack, strict=True):
                    refuse_carry(choice.name, each)
        self.encoder = nn.ModuleList(EncoderLayer(each, settings) for each in encoder)
        self.decoder = nn.ModuleList(DecoderLayer(*pair, settings) for pair in zip(decoder, cross, strict=True))
        # the pre-norm residual stream is not normalised by the layers themselves
        self.encoder_norm = nn.LayerNorm(width) if settings.norm == "pre" else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if settings.norm == "pre" else nn.Identity()
        limits = {
            role: [a.longest for a in stack if a.longest] for role, stack in (("s", [*encoder, *cross]), ("t", decoder))
        }
        self.longest_source = min([longest, *limits["s"]])
        self.longest_target = min([longest, *limits["t"]])
        self.has_weights = find(attention["cross"][-1].name).weights

    @property
    def output_weight(self) -> Tensor:
        """The output projection (V, D): logits are `hidden @ output_weight.T`."""
        return self.target_embedding.tokens.weight if self.output is None else self.output.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) to the logits (..., V) of the next piece, in float32."""
        return nn.functional.linear(hidden, self.output_weight).float()

    def logits_of(self, pieces: Tensor) -> Callable[[Tensor], Tensor]:
        """What gives the logits of these pieces (K,) alone: hidden (..., D) to (..., K), in float32."""
        weight = self.output_weight[pieces]
        return lambda hidden: nn.functional.linear(hidden, weight).float()

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> Encoded:
        """source (B, S) ids with the end mark; source_valid (B, S); task (B,)."""
        x, side = self.source_embedding(source), Side()
        if self.settings.reversible and torch.is_grad_enabled():
            layers = [cast(EncoderLayer, layer) for layer in self.encoder]
            sublayers = [each for layer in layers for each in encoder_sublayers(layer, source_valid, task)]
            stream = run_reversibly(sublayers, x, side)
        else:
            stream = opened(x, self.settings)
            for layer in self.encoder:
                stream = layer(stream, side, valid=source_valid, task=task)
        memory = self.encoder_norm(closed(stream))
        return Encoded(memory, source_valid, side.self_carry, task, side.losses or {}, side.log_prob)

    def forward(
        self,
        source: Tensor,
        target_in: Tensor,
        *,
        source_valid: Tensor | None = None,
        target_valid: Tensor | None = None,
        task: Tensor | None = None,
    ) -> Output:
        """source (B, S) with the end mark, target_in (B, T) with the start mark; hidden (B, T, D) predicts the next."""
        encoded = self.encode(source, source_valid, task=task)
        side = Side(losses=encoded.losses, log_prob=encoded.log_prob)
        context = Context(encoded.memory, source_valid, encoded.carry, target_valid, task)
        x = self.target_embedding(target_in)
        if self.settings.reversible and torch.is_grad_enabled():
            sublayers = [each for layer in self._decoder_layers for each in decoder_sublayers(layer, context)]
            stream = run_reversibly(sublayers, x, side, encoded.memory)
        else:
            stream = opened(x, self.settings)
            for layer in self.decoder:
                stream = layer(stream, side, context)
        return Output(self.decoder_norm(closed(stream)), side.losses or {}, side.log_prob)

    def start(self, encoded: Encoded, *, hypotheses: int = 1, pieces: Tensor | None = None) -> State:
        """The decoder's state before the first token of each segment's hypotheses.

        With `pieces` (K,), no others may come: `step` takes and gives places among them (V is K).
        """
        batch_size, self_carry, cross_carry = encoded.memory.shape[0], None, None
        shortlist = None if pieces is None else Shortlist(pieces, self.logits_of(pieces))
        state: State = {"position": 0, "shortlist": shortlist}
        for number, layer in enumerate(self._decoder_layers):
            self_state, self_carry = layer.self_attention.start(
                batch_size,
                hypotheses=hypotheses,
                carry=self_carry,
                memory_carry=encoded.carry,
                task=encoded.task,
            )
            cross_state, cross_carry = layer.cross_attention.start(
                batch_size,
                encoded.memory,
                encoded.valid,
                hypotheses=hypotheses,
                carry=cross_carry,
                memory_carry=encoded.carry,
                task=encoded.task,
            )
            state[f"layer{number}"] = {"self": self_state, "cross": cross_state}
        return state

    def step(self, token: Tensor, state: State, *, need_weights: bool = False) -> tuple[Tensor, State, Tensor | None]:
        """Logits (B, N, V) in float32 of the token after `token` (B, N), and the next state.

        With `need_weights`, also the last layer's attention to the source, (B, N, S), averaged over the heads.
        """
        side, weights = Side(), None
        shortlist: Shortlist | None = state["shortlist"]
        token, logits = (token, self.logits) if shortlist is None else (shortlist.pieces[token], shortlist.logits)
        x = opened(self.target_embedding.at(token, state["position"]), self.settings)
        after: State = {"position": state["position"] + 1, "shortlist": shortlist}
        last = len(self.decoder) - 1
        for number, layer in enumerate(self._decoder_layers):
            name = f"layer{number}"
            x, after[name], weights = layer.step(x, state[name], side, need_weights=need_weights and number == last)
        return logits(self.decoder_norm(closed(x))), after, None if weights is None else weights.mean(1)

    @property
    def _decoder_layers(self) -> list[DecoderLayer]:
        return [cast(DecoderLayer, layer) for layer in self.decoder]

    def attentions(self) -> Iterator[tuple[str, Attention]]:
        """Every attention sub-layer with its name among the modules."""
        for name, module in self.named_modules():
            if isinstance(module, Attention):
                yield name, module

    def after_update(self, update: int, total_updates: int) -> None:
        """To be called after each optimiser update."""
        for _, attention in self.attentions():
            attention.after_update(update, total_updates)

    def adopt(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Take over the weights of another model, whose attention may be another; gives the names that did not fit.

        Attention sub-layers adopt theirs as the mechanism knows how; all else must have the same shape.
        """
        own = self.state_dict()
        prefixes = [f"{name}." for name, _ in self.attentions()]
        outside = {name: value for name, value in weights.items() if not name.startswith(tuple(prefixes))}
        fitting = {name: value for name, value in outside.items() if name in own and own[name].shape == value.shape}
        self.load_state_dict(fitting, strict=False)
        for name, attention in self.attentions():
            start = len(name) + 1
            attention.adopt({key[start:]: value for key, value in weights.items() if key.startswith(f"{name}.")})
        return sorted(set(outside) - set(fitting))
