"""The interface of every translation network, for the search and the training loop, and the logits of next pieces."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mtkit.attention import Attention, State, build
from mtkit.attention.marks import marks_from, marks_of
from mtkit.attention.mixed_heads import as_full
from mtkit.attention.slots import SLOTS
from mtkit.model.embedding import Embedding
from mtkit.model.layers import Weights
from mtkit.recipe import ModelSettings
from mtkit.text.tokenizer import BREAK

TOGETHER = 64
"""Hypotheses whose logits are computed at a time, at most, unless one segment has more."""


@runtime_checkable
class InUnits(Protocol):
    """A projection that computes its result in units per row; leaving it in them saves a pass over it."""

    def in_units(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., I) to sums (..., O), units (...) and an addend (O,): sums * units + addend is the result."""


@dataclass(frozen=True)
class Logits:
    """The logits (B, N, V) of the pieces after each hypothesis, computed in parts that fit a cache when read."""

    hidden: Tensor
    """(B, N, D), the input of the projection."""
    project: Callable[[Tensor], Tensor]
    """hidden (..., D) to new logits (..., V) in float32."""
    pieces: int
    """V."""
    repeat: Callable[..., Any] | None = None
    """repeat(name, compute, *tensors) is compute(*tensors), which a GPU repeats from a record at each step; the name
    identifies everything else that the function depends on. None: nothing is recorded."""

    @classmethod
    def known(cls, logits: Tensor) -> "Logits":
        """Wrap computed logits (B, N, V)."""
        return cls(logits, lambda computed: computed, logits.shape[2])

    def whole(self) -> Tensor:
        """All logits (B, N, V) in float32; the caller may overwrite them."""
        return self.project(self.hidden)

    def parts(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield the logits of some segments at a time: their slice, and `InUnits`' sums (B', N, V), units, addend."""
        segments, hypotheses = self.hidden.shape[:2]
        most = max(TOGETHER // hypotheses, 1)
        in_units = self.project.in_units if isinstance(self.project, InUnits) else self._in_ones
        for first in range(0, segments, most):
            part = slice(first, first + most)
            yield part, *in_units(self.hidden[part])

    def _in_ones(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.project(hidden)
        return logits, logits.new_ones(hidden.shape[:2]), logits.new_zeros(self.pieces)


class Model(Protocol):
    """The interface that a search needs, of a `Network` or an ensemble. The search overwrites logits that it reads."""

    has_weights: bool
    training: bool

    @property
    def longest_source(self) -> int | None: ...
    @property
    def longest_target(self) -> int | None: ...
    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> Any: ...
    def start(self, encoded: Any, *, hypotheses: int = 1, pieces: Tensor | None = None) -> Any: ...
    def step(self, token: Tensor, state: Any, *, need_weights: bool = False) -> tuple[Logits, Any, Tensor | None]: ...
    def fixed_state(self, state: Any, segments: int, hypotheses: int, steps: int) -> Any: ...
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
    """The last layer's carry."""
    task: Tensor | None = None
    """(B,) the direction of each segment."""
    marks: Tensor | None = None
    """(B, S) the marks of the source, if an attention reads them."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    log_prob: Tensor | None = None
    states: Any = None
    """The initial states of a recurrent decoder."""


@dataclass
class Output:
    """The decoder's vectors before the output projection, and the attentions' terms of the training loss."""

    hidden: Tensor
    """(B, T, D)."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    log_prob: Tensor | None = None


@dataclass(frozen=True)
class Shortlist:
    """The only pieces that a batch may contain; during decoding, pieces are indices into them."""

    pieces: Tensor
    """(K,) ids."""
    logits: Callable[[Tensor], Tensor]
    """hidden (..., D) to their logits (..., K) in float32."""


@dataclass(frozen=True)
class Adopted:
    """Names of weights that `Network.adopt` did not load."""

    unfit: list[str]
    """The other network's weights that do not fit. Of attentions, only those in slots that this network lacks."""
    unset: set[str]
    """The names of this network's parameters that nothing was written to, which keep their initial values."""


class Network(nn.Module):
    """Translation network: token ids to vectors whose products with `output_weight` are the next token's logits.

    An architecture is a subclass with the layers between `source_embedding` and the output, and with `encode`,
    `decode`, `start` and `step`.
    """

    has_weights: bool
    """Whether `step` can return the attention weights to the source."""
    reads_marks: bool
    """Whether an attention reads marks, so that they are computed."""
    checkpoints_activations = False
    """Whether the backward pass computes layers again instead of keeping their activations."""

    def __init__(self, settings: ModelSettings, source: Embedding, target: Embedding) -> None:
        """`source` and `target` embed the tokens of the two sides."""
        super().__init__()
        self.settings = settings
        self.source_embedding = source
        self.target_embedding = target
        vocabulary, width = len(target.tokens.weight), settings.d_model
        self.output = nn.Linear(width, vocabulary, bias=False) if settings.tie == "none" else None
        if self.output is not None:
            nn.init.normal_(self.output.weight, std=width**-0.5)
        self.output_bias = nn.Parameter(torch.zeros(vocabulary)) if settings.output_bias else None
        """(V,), added to the logits."""
        self.longest_source = settings.max_length
        """Maximum number of source pieces, the end mark included."""
        self.longest_target = settings.max_length
        """Maximum number of target pieces, the end mark included."""

    @property
    def output_weight(self) -> Tensor:
        """The output projection (V, D): logits are `hidden @ output_weight.T`, plus `output_bias` if there is one."""
        return self.target_embedding.tokens.weight if self.output is None else self.output.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (..., D) to the logits (..., V) of the next piece, in float32."""
        return nn.functional.linear(hidden, self.output_weight, self.output_bias).float()

    def next_logits(self, hidden: Tensor, shortlist: Shortlist | None) -> Logits:
        """The logits of the next piece, from hidden (B, N, D); only of the pieces on the shortlist, if there is one."""
        if shortlist is None:
            return Logits(hidden, self.logits, len(self.output_weight))
        return Logits(hidden, shortlist.logits, len(shortlist.pieces))

    def logits_of(self, pieces: Tensor) -> Callable[[Tensor], Tensor]:
        """A function from hidden (..., D) to the logits (..., K) of these pieces (K,), in float32."""
        weight, bias = self.output_weight[pieces], None if self.output_bias is None else self.output_bias[pieces]
        return lambda hidden: nn.functional.linear(hidden, weight, bias).float()

    def factors(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (N, D') and a matrix (V, D') whose product is the logits of hidden (N, D).

        Without a bias D' is D. The bias is a further column, padded with zeros to a multiple of 8 for tensor cores.
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

        source_valid (B, S) and target_valid (B, T) are True at real tokens; task (B,) is the direction. `weights`
        has an empty list for each role whose layers' weights are to be gathered. source_lengths (B,), on the CPU, are
        the sums of source_valid: without them, the rnn copies them from the device, and the host waits.
        """
        encoded = self.encode(source, source_valid, source_lengths=source_lengths, task=task, weights=weights)
        return self.decode(encoded, target_in, target_valid, weights)

    def encode(
        self,
        source: Tensor,
        source_valid: Tensor | None = None,
        *,
        source_lengths: Tensor | None = None,
        task: Tensor | None = None,
        weights: Weights | None = None,
    ) -> Encoded:
        """The encoded source of a batch; arguments as in `forward`."""
        raise NotImplementedError

    def decode(
        self, encoded: Encoded, target_in: Tensor, target_valid: Tensor | None, weights: Weights | None = None
    ) -> Output:
        """The decoder's vectors for all target positions; arguments as in `forward`."""
        raise NotImplementedError

    def start(self, encoded: Encoded, *, hypotheses: int = 1, pieces: Tensor | None = None) -> State:
        """The decoder's state before the first token of each segment's hypotheses.

        With `pieces` (K,), only these are possible: `step` takes and returns indices into them (V is K).
        """
        raise NotImplementedError

    def step(self, token: Tensor, state: State, *, need_weights: bool = False) -> tuple[Logits, State, Tensor | None]:
        """The logits (B, N, V) of the token after `token` (B, N), and the next state.

        With `need_weights`, also the last layer's attention to the source, (B, N, S), averaged over the heads.
        """
        raise NotImplementedError

    def fixed_state(self, state: State, segments: int, hypotheses: int, steps: int) -> State | None:
        """The state of B segments after a step in the form of `Attention.fixed_state`; None if there is none."""
        return None

    def marks(self, pieces: Tensor) -> Tensor | None:
        """The marks of pieces (B, T), in which a break piece begins a sentence; None if no attention reads them."""
        return marks_from(pieces == BREAK) if self.reads_marks else None

    def first_sentence(self, segments: int, hypotheses: int) -> Tensor | None:
        """The sentence number (B, N) of each hypothesis before its first piece, for `next_marks`."""
        device = self.target_embedding.tokens.weight.device
        return torch.zeros(segments, hypotheses, dtype=torch.long, device=device) if self.reads_marks else None

    def next_marks(self, token: Tensor, sentence: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The sentence numbers (B, N) after pieces `token` (B, N), and the marks of these pieces; None if not read."""
        if sentence is None:
            return None, None
        breaks = token == BREAK
        sentence = sentence + breaks
        return sentence, marks_of(sentence, breaks)

    def attentions(self) -> Iterator[tuple[str, Attention]]:
        """Every attention sub-layer with its name among the modules."""
        for name, module in self.named_modules():
            if isinstance(module, Attention):
                yield name, module

    def after_update(self, update: int, total_updates: int) -> None:
        """Call `after_update` of every attention; the training loop calls this after each optimiser update."""
        for _, attention in self.attentions():
            attention.after_update(update, total_updates)

    def adopt(self, weights: Mapping[str, Tensor]) -> Adopted:
        """Load the weights of another network, whose attention may differ.

        Attention sub-layers convert theirs by the mechanism's `adopt`. All other weights must have the same shape.
        """
        state = self.state_dict()
        versions = {name: parameter._version for name, parameter in self.named_parameters()}
        prefixes = [f"{name}." for name, _ in self.attentions()]
        outside = {name: value for name, value in weights.items() if not name.startswith(tuple(prefixes))}
        fitting = {name: value for name, value in outside.items() if name in state and state[name].shape == value.shape}
        self.load_state_dict(fitting, strict=False)
        unfit = set(outside) - set(fitting)
        for name, attention in self.attentions():
            start = len(name) + 1
            of_attention = {key[start:]: value for key, value in weights.items() if key.startswith(f"{name}.")}
            attention.adopt(as_full(of_attention))
            slots = {key for key in of_attention if key.partition(".")[0] in SLOTS}
            unfit |= {f"{name}.{key}" for key in slots - attention.state_dict().keys()}
        unset = {name for name, parameter in self.named_parameters() if parameter._version == versions[name]}
        return Adopted(sorted(unfit), unset)


@dataclass(frozen=True)
class Choice:
    """One layer's mechanism with its options and slots."""

    name: str
    options: Mapping[str, Any]


def build_stack(
    role: str,
    choices: list[Choice],
    model: ModelSettings,
    seed: int,
    shared: MutableMapping[Any, nn.Module] | None = None,
) -> list[Attention]:
    """The attention of each layer; adjacent layers with the same mechanism and options are one run of layers.

    `shared` holds the modules that attentions of a model share: pass the same one for all its stacks.
    """
    shared = {} if shared is None else shared
    built: list[Attention] = []
    for choice, run in groupby(choices):
        layers = len(list(run))
        built += [
            build_attention(choice, role, model, seed, layer=layer, layers=layers, shared=shared)
            for layer in range(layers)
        ]
    return built


def build_attention(choice: Choice, role: str, model: ModelSettings, seed: int, **site: Any) -> Attention:
    """One attention in a model of these settings; `site` has further arguments of `mtkit.attention.build`."""
    return build(
        choice.name,
        role=role,
        d_model=model.d_model,
        heads=model.heads,
        max_length=model.max_length,
        dropout=model.attention_dropout,
        seed=seed,
        **site,
        **choice.options,
    )
