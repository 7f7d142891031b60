"""The logits of the next pieces, computed when they are read, and as many at a time as the cache holds.

What every translation network has, whatever its architecture: what a search and the training loop ask of it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mtkit.attention import Attention, State
from mtkit.model.embedding import Embedding
from mtkit.model.layers import Weights
from mtkit.recipe import ModelSettings

TOGETHER = 64
"""Hypotheses whose logits are computed at a time, at most, unless one segment has more."""


@runtime_checkable
class InUnits(Protocol):
    """A projection that has its result in units of each row first; to leave it there saves a pass over it."""

    def in_units(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., I) to sums (..., O), units (...) and what is added (O,): sums * units + added is the result."""


@dataclass(frozen=True)
class Logits:
    """The logits (B, N, V) of the pieces that may follow each hypothesis."""

    hidden: Tensor
    """(B, N, D), what they are computed from."""
    project: Callable[[Tensor], Tensor]
    """hidden (..., D) to new logits (..., V) in float32."""
    pieces: int
    """V."""

    @classmethod
    def known(cls, logits: Tensor) -> "Logits":
        """Logits (B, N, V) that have been computed."""
        return cls(logits, lambda known: known, logits.shape[2])

    def whole(self) -> Tensor:
        """All logits (B, N, V) in float32, which may be overwritten."""
        return self.project(self.hidden)

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """The logits of some segments after the others: which they are, and as `InUnits` has them, sums (B', N, V)."""
        segments, hypotheses = self.hidden.shape[:2]
        most = max(TOGETHER // hypotheses, 1)
        in_units = self.project.in_units if isinstance(self.project, InUnits) else self._in_ones
        for first in range(0, segments, most):
            some = slice(first, first + most)
            yield some, *in_units(self.hidden[some])

    def _in_ones(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.project(hidden)
        return logits, logits.new_ones(hidden.shape[:2]), logits.new_zeros(self.pieces)


class Model(Protocol):
    """What a search needs: a `Network` has it, and so has an ensemble of them.

    The search writes over logits that it has read.
    """

    has_weights: bool
    training: bool

    @property
    def longest_source(self) -> int | None: ...
    @property
    def longest_target(self) -> int | None: ...
    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> Any: ...
    def start(self, encoded: Any, *, hypotheses: int = 1, pieces: Tensor | None = None) -> Any: ...
    def step(self, token: Tensor, state: Any, *, need_weights: bool = False) -> tuple[Logits, Any, Tensor | None]: ...
    def parameters(self) -> Iterator[Any]: ...
    def train(self, mode: bool = True) -> Any: ...


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
    """(B,) the direction of each segment."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    log_prob: Tensor | None = None
    states: Any = None
    """The first states of a recurrent decoder."""


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


class Network(nn.Module):
    """Translation network: token ids in, vectors whose products with `output_weight` are the next token's logits out.

    An architecture is a subclass that builds the layers between `source_embedding` and the output, with `forward`,
    `encode`, `start` and `step`.
    """

    has_weights: bool
    """Whether `step` can give the attention to the source."""

    def __init__(
        self,
        settings: ModelSettings,
        source: Embedding,
        target: Embedding,
    ) -> None:
        """`source` and `target` embed the tokens of the two sides."""
        super().__init__()
        self.settings = settings
        self.source_embedding = source
        self.target_embedding = target
        vocabulary, width = target.tokens.weight.shape
        self.output = nn.Linear(width, vocabulary, bias=False) if settings.tie == "none" else None
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=width**-0.5)
        self.output_bias = nn.Parameter(torch.zeros(vocabulary)) if settings.output_bias else None
        """(V,), what is added to the logits."""
        self.longest_source = settings.max_length
        """Source pieces that the network takes at most, the end mark counted."""
        self.longest_target = settings.max_length
        """Target pieces, likewise."""

    @property
    def output_weight(self) -> Tensor:
        """The output projection (V, D): logits are `hidden @ output_weight.T`, and `output_bias` where there is one."""
        return self.target_embedding.tokens.weight if self.output is None else self.output.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) to the logits (..., V) of the next piece, in float32."""
        return nn.functional.linear(hidden, self.output_weight, self.output_bias).float()

    def next_logits(self, hidden: Tensor, shortlist: Shortlist | None) -> Logits:
        """The logits of the next piece, from hidden (B, N, D); those on the shortlist alone where there is one."""
        if shortlist is None:
            return Logits(hidden, self.logits, len(self.output_weight))
        return Logits(hidden, shortlist.logits, len(shortlist.pieces))

    def logits_of(self, pieces: Tensor) -> Callable[[Tensor], Tensor]:
        """What gives the logits of these pieces (K,) alone: hidden (..., D) to (..., K), in float32."""
        weight, bias = self.output_weight[pieces], None if self.output_bias is None else self.output_bias[pieces]
        return lambda hidden: nn.functional.linear(hidden, weight, bias).float()

    def factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (N, D') and a matrix (V, D') whose product is the logits of hidden (N, D): a bias is further columns.

        D' is D without a bias. Zeros fill it up to a multiple of 8, for the sake of tensor cores.
        """
        weight, bias = self.output_weight, self.output_bias
        if bias is None:
            return hidden, weight
        ones = nn.functional.pad(hidden.new_ones(len(hidden), 1), (0, 7))
        columns = nn.functional.pad(bias.to(weight.dtype).unsqueeze(1), (0, 7))
        return torch.cat([hidden, ones], 1), torch.cat([weight, columns], 1)

    def forward(
        self,
        source: Tensor,
        target_in: Tensor,
        *,
        source_valid: Tensor | None = None,
        source_lengths: Tensor | None = None,
        target_valid: Tensor | None = None,
        task: Tensor | None = None,
        weights: Weights | None = None,
    ) -> Output:
        """source (B, S) with the end mark, target_in (B, T) with the start mark; hidden (B, T, D) predicts the next.

        source_valid (B, S) and target_valid (B, T) are True at real tokens; task (B,) is the direction. `weights`,
        with an empty list for each role wanted, gathers those of its layers. source_lengths (B,), on the CPU, are the
        sums of source_valid: the rnn takes them from the device if they are not given, and the host waits.
        """
        raise NotImplementedError

    def encode(
        self,
        source: Tensor,
        source_valid: Tensor | None = None,
        *,
        task: Tensor | None = None,
        weights: Weights | None = None,
    ) -> Encoded:
        """source (B, S) ids with the end mark; source_valid (B, S); task (B,); `weights` as in `forward`."""
        raise NotImplementedError

    def start(self, encoded: Encoded, *, hypotheses: int = 1, pieces: Tensor | None = None) -> State:
        """The decoder's state before the first token of each segment's hypotheses.

        With `pieces` (K,), no others may come: `step` takes and gives places among them (V is K).
        """
        raise NotImplementedError

    def step(self, token: Tensor, state: State, *, need_weights: bool = False) -> tuple[Logits, State, Tensor | None]:
        """The logits (B, N, V) of the token after `token` (B, N), and the next state.

        With `need_weights`, also the last layer's attention to the source, (B, N, S), averaged over the heads.
        """
        raise NotImplementedError

    def attentions(self) -> Iterator[tuple[str, Attention]]:
        """Every attention sub-layer with its name among the modules."""
        for name, module in self.named_modules():
            if isinstance(module, Attention):
                yield name, module

    def after_update(self, update: int, total_updates: int) -> None:
        """Call `after_update` of every attention; the training loop calls this after each optimiser update."""
        for _, attention in self.attentions():
            attention.after_update(update, total_updates)

    def adopt(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Take over the weights of another network, whose attention may be another; gives the names that did not fit.

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
