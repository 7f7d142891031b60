"""The attention contract: the inputs, outputs and decoding state of every mechanism.

Shapes in docstrings, here and in every mechanism: B batch, T query length, S memory length, H heads, D model width,
K width of one head, N hypotheses of a segment.

A stack is all layers of the encoder or of the decoder. A carry is what an attention hands to the attention of the next
layer in its stack, such as scores or global nodes. A state is what decoding keeps from step to step, such as keys and
values. Marks are integers per token: its sentence in a document, and whether it is a separator.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention import states
from mtkit.errors import MtkitError

State = states.State
ROLES = ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class Site:
    """The place of one attention in a model: all that a mechanism may depend on in addition to its own options.

    `layer` counts from 0 inside a run of `layers` neighbours with the same mechanism and options, so two such runs,
    separated by another mechanism, draw the same random patterns. `memory_length` and `memory_width` are the memory's
    maximum length and width; None: as the query's. `positions`, `projection`, `merge`, `regularizer` and `nearby` name
    the content of the five slots, None for the plain one; a slot with options of its own is a mapping, {"name":
    "grouped-query", "kv_heads": 2}. `shared` is one dictionary for all attentions of a model. A module that several of
    them use is a sub-module in one of them, so that it is saved once; the others find it here. `layer_heads` is the
    layer's number of heads if this attention computes only `heads` of them (`mtkit.attention.mixed_heads`).
    """

    role: str
    d_model: int
    heads: int
    layer: int = 0
    layers: int = 1
    max_length: int = 1024
    memory_length: int | None = None
    memory_width: int | None = None
    dropout: float = 0.0
    seed: int = 1
    positions: str | Mapping[str, Any] | None = None
    projection: str | Mapping[str, Any] | None = None
    merge: str | Mapping[str, Any] | None = None
    regularizer: str | Mapping[str, Any] | None = None
    nearby: str | Mapping[str, Any] | None = None
    layer_heads: int | None = None
    shared: MutableMapping[Any, nn.Module] = field(default_factory=dict, compare=False, repr=False)

    @property
    def causal(self) -> bool:
        """Whether a query may see only keys at its own position and before."""
        return self.role == "decoder"

    @property
    def head_width(self) -> int:
        """Width of one head: an equal share of the model's width."""
        return self.d_model // (self.layer_heads or self.heads)

    @property
    def heads_width(self) -> int:
        """Width of all heads of this attention: the model's width unless it computes only some of a layer's heads."""
        return self.heads * self.head_width


@dataclass(frozen=True)
class Inputs:
    """Arguments of `Attention.forward`, or of `Attention.step` (query, carry, need_weights and query_marks)."""

    query: Tensor
    memory: Tensor | None = None
    query_valid: Tensor | None = None
    memory_valid: Tensor | None = None
    carry: Any = None
    memory_carry: Any = None
    task: Tensor | None = None
    need_weights: bool = False
    query_marks: Tensor | None = None
    memory_marks: Tensor | None = None

    @property
    def context(self) -> Tensor:
        """The tokens that keys and values are made from: the memory, or the query in the self roles."""
        return self.query if self.memory is None else self.memory

    @property
    def context_valid(self) -> Tensor | None:
        """Mask of the real context tokens, (B, S); None if all are real."""
        return self.query_valid if self.memory is None else self.memory_valid

    @property
    def context_marks(self) -> Tensor | None:
        """Marks of the context tokens, (B, S); None if all are 0."""
        return self.query_marks if self.memory is None else self.memory_marks


@dataclass(frozen=True)
class Beginning:
    """Arguments of `Attention.start`."""

    batch_size: int
    memory: Tensor | None = None
    memory_valid: Tensor | None = None
    hypotheses: int = 1
    carry: Any = None
    memory_carry: Any = None
    task: Tensor | None = None
    memory_marks: Tensor | None = None


@dataclass
class Attended:
    """Result of one call of an attention."""

    output: Tensor
    """(B, T, D); (B, N, D) from a step."""
    carry: Any = None
    """For the attention of the next layer of the same stack, or None."""
    weights: Tensor | None = None
    """(B, H, T, S), or (B, H, N, S) from a step, if requested and if the mechanism has weights; H is the number of
    softmaxes, which can differ from the number of heads."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Scalars to add to the training loss, means per token, already weighted; empty outside training."""
    log_prob: Tensor | None = None
    """(B,) log-probability of the samples drawn, or None; the training loop forms -(reward - baseline) * log_prob."""


class Attention(nn.Module):
    """One attention sub-layer, (B, T, D) in and out, projections inside.

    A mechanism is a subclass in a file of its own in a family's folder. Its constructor takes the `Site` and, as
    keyword-only arguments, its options; the defaults are legal in every role it declares.

    Callers use `forward`, `start` and `step`, which have the same signatures for all mechanisms. These pack their
    arguments into one object and call the methods that a mechanism defines:

    - `attend(inputs)`, for whole sequences, in every role;
    - `begin(inputs)` and `advance(inputs, state)`, for decoding, in the decoder and cross roles;
    - `naive`, for tests: the paper's equation in plain loops, with the arguments of `forward`, if `attend` computes it
      in another way.

    An override calls the base's method with the same object, or with a changed copy (`dataclasses.replace`).
    `attend` and `begin` never get an empty batch, query or memory: `forward` and `start` add a row of padding first.
    """

    roles: ClassVar[frozenset[str]]
    """All roles that the mechanism can play."""
    published: ClassVar[frozenset[str]]
    """The roles that the paper itself gives it."""
    paper: ClassVar[str]
    complexity: ClassVar[str]
    """Shown to users: "O(T w)"."""
    growth: ClassVar[float]
    """Exponent of T in time and memory with fixed options: 1, 1.5 or 2."""
    sequential_operations: ClassVar[str | None] = None
    """Operations of a layer over a whole sequence that must follow each other, shown to users; a product, a softmax, a
    sort and a prefix sum are one operation. None: not declared."""
    longest_path: ClassVar[str | None] = None
    """Layers until every token has reached every other (in the decoder role, every later one), shown to users; "none"
    if some never do, "by content" if the tokens decide. None: not declared."""
    weights: ClassVar[bool] = False
    """Whether it can return attention weights."""
    unrounded: ClassVar[bool] = False
    """Whether rounded weights are too coarse, because outputs depend on choices or on small differences of products.
    Layers of such a mechanism use no 8-bit products and no rounded copies of weights; decoding excepts `roundable`."""
    roundable: ClassVar[frozenset[str]] = frozenset()
    """Names of linear maps of an `unrounded` mechanism whose products decoding may round: no choice reads them."""
    undecayed: ClassVar[tuple[str, ...]] = ()
    """Names of parameters with several dimensions that weight decay skips, as it skips vectors: numbers per head that
    are added, or that scale distances. Any module of a model may declare this."""
    mixes: ClassVar[bool] = False
    """Whether it can have some heads of a layer while other mechanisms have the others; its heads then are as wide as
    the `head_width` of its site."""
    slots: ClassVar[Mapping[str, frozenset[str] | None]] = {}
    """The slots it supports, each with the names it can combine with; None for every name."""

    small: ClassVar[Mapping[str, Any] | None] = None
    """Options at which short sequences cross every border, for the contract tests; None: derived from the options'
    names."""
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Further option values that the contract tests run."""

    reads_query: bool = True
    """Whether outputs depend on the query's content; False in the cross role if weights depend only on positions."""
    learns_by_steps: bool = True
    """Whether steps in the cross role can train it; False if only `forward` has its losses, its samples or its
    statistics."""
    reads_marks: bool = False
    """Whether outputs or losses depend on marks, which a model computes only then."""
    longest: int | None = None
    """Maximum sequence length T; None without a limit."""
    keeps_shapes: bool = False
    """Whether steps keep the shapes of a state, and read no number of it but "count", also as `counted` gives it."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        query_valid: Tensor | None = None,
        memory_valid: Tensor | None = None,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
        need_weights: bool = False,
        query_marks: Tensor | None = None,
        memory_marks: Tensor | None = None,
    ) -> Attended:
        """Attend with whole sequences; padding is on the right only.

        query (B, T, D); memory (B, S, D), None in the self roles; query_valid (B, T) and memory_valid (B, S) are True
        for real tokens, None if all are real. `carry` comes from the layer below of this stack, `memory_carry` from the
        encoder's last layer; task (B,) holds integers for mechanisms that are conditioned on a task. query_marks (B, T)
        and memory_marks (B, S) are the tokens' sentences and separators (`mtkit.attention.marks`), None if all are 0.
        B, T and S may be 0.

        Raises: MtkitError for a mask that is not boolean or has another shape.
        """
        _check_mask("query_valid", query_valid, query)
        _check_mask("memory_valid", memory_valid, memory)
        inputs = Inputs(
            query, memory, query_valid, memory_valid, carry, memory_carry, task, need_weights, query_marks, memory_marks
        )
        if query.shape[0] and query.shape[1] and (memory is None or memory.shape[1]):
            return self.attend(inputs)
        return _without_padding(self.attend(_padded(inputs)), inputs)

    def start(
        self,
        batch_size: int,
        memory: Tensor | None = None,
        memory_valid: Tensor | None = None,
        *,
        hypotheses: int = 1,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
        memory_marks: Tensor | None = None,
    ) -> tuple[State, Any]:
        """Return the state before the first step, and the carry for the next layer's `start`; decoder and cross roles.

        Raises: MtkitError if there is no segment or no hypothesis, and for a mask that is not boolean or has another
        shape.
        """
        _check_mask("memory_valid", memory_valid, memory)
        for name, count in (("batch_size", batch_size), ("hypotheses", hypotheses)):
            if count < 1:
                raise MtkitError(f"{name} = {count} must be at least 1 to start decoding")
        if memory is not None and not memory.shape[1]:
            memory, memory_valid, memory_marks = _pad_empty(memory, memory_valid, memory_marks)
        return self.begin(
            Beginning(batch_size, memory, memory_valid, hypotheses, carry, memory_carry, task, memory_marks)
        )

    def step(
        self,
        query: Tensor,
        state: State,
        *,
        carry: Any = None,
        need_weights: bool = False,
        query_marks: Tensor | None = None,
    ) -> tuple[Attended, State]:
        """Attend with query (B, N, D): the N hypotheses of each segment, all at the same next position.

        query_marks (B, N) are the marks of these tokens; a mechanism that reads marks keeps earlier tokens' marks.
        The given state is consumed: its tensors may be written in place. Callers continue with the returned state.
        """
        inputs = Inputs(query, carry=carry, need_weights=need_weights, query_marks=query_marks)
        return self.advance(inputs, state)

    def attend(self, inputs: Inputs) -> Attended:
        """Attend with whole sequences: `forward` for inputs with at least one segment, query and key."""
        raise NotImplementedError(f"{type(self).__name__} has no attend, which all roles need")

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return the state before the first step: `start` for a memory of at least one token."""
        raise NotImplementedError(f"{type(self).__name__} has no begin, which the decoder and cross roles need")

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Attend with the next token: `step` for inputs with query (B, N, D), carry, need_weights, query_marks."""
        raise NotImplementedError(f"{type(self).__name__} has no advance, which the decoder and cross roles need")

    def fixed_state(self, state: State, hypotheses: int, steps: int) -> State | None:
        """Return the state after a step in a form whose shapes stay the same during the next `steps` steps.

        Steps with it are the same operations each time, because numbers that grow are tensors in it: a GPU can repeat
        them from a record. All steps have this number of hypotheses. None: the mechanism has no such form.
        """
        return states.counted(state, hypotheses) if self.keeps_shapes else None

    def after_update(self, update: int, total_updates: int) -> None:
        """Apply changes between updates: redraws, decays, moving statistics. Called after each optimiser update."""

    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Return what the mechanism has learned that a reader can interpret, by name: (H,), or (H, n) per head.

        Rows are heads (softmaxes, if these have another number); one row: all heads share it; a row of NaN: the head
        has none. If a name ends in "by distance", n is 2 c + 1, and the columns are distances j - i from -c to c.
        Numbers that depend on tokens are means over the real tokens of `inputs`, and left out without inputs.
        """
        return {}

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        """Load the weights of a `full` attention (its `state_dict`) whose names and shapes this mechanism has.

        A subclass may convert other shapes; entries that it does not convert are ignored.
        """
        state = self.state_dict()
        matching = {
            name: value for name, value in full_state.items() if name in state and state[name].shape == value.shape
        }
        self.load_state_dict(matching, strict=False)


def token_means(values: Tensor, valid: Tensor | None) -> Tensor:
    """Return the means (H, ...) of values (B, H, T, ...) over real tokens, valid (B, T); for `learned_numbers`."""
    if valid is None:
        return values.float().mean((0, 2))
    return values.float().transpose(1, 2)[valid].mean(0)


def for_heads(values: Tensor, heads: int, first: int | None = None) -> Tensor:
    """Return values (G, ...) for all heads (H, ...): G groups of neighbours or, with `first`, G heads from this one on.

    The other heads' rows are NaN.
    """
    if first is None:
        return values.repeat_interleave(heads // len(values), 0)
    rows = values.new_full((heads, *values.shape[1:]), float("nan"))
    rows[first : first + len(values)] = values
    return rows


def _check_mask(name: str, mask: Tensor | None, tokens: Tensor | None) -> None:
    """Check a mask of tokens (B, T, D).

    Raises: MtkitError if it is not boolean, because softmaxes would add 0 and 1 to scores, and the complement is never
    0; and if it is not (B, T), because some mechanisms would broadcast it and others misread it.
    """
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise MtkitError(f"{name} is a tensor of {mask.dtype}, not torch.bool; write {name}={name}.bool()")
    if tokens is not None and mask.shape != tokens.shape[:2]:
        shape, expected = tuple(mask.shape), tuple(tokens.shape[:2])
        raise MtkitError(f"{name} has the shape {shape}, not {expected}: a value for each token of each segment")


def _padded(inputs: Inputs) -> Inputs:
    """Return the inputs with one padding row for each axis of size 0.

    A memory without tokens is then a memory of padding, for which every mechanism gives zero before `out_proj`.
    """
    query, query_valid, query_marks = _pad_empty(inputs.query, inputs.query_valid, inputs.query_marks)
    padded = replace(inputs, query=query, query_valid=query_valid, query_marks=query_marks)
    if inputs.memory is not None:
        memory, memory_valid, memory_marks = _pad_empty(inputs.memory, inputs.memory_valid, inputs.memory_marks)
        padded = replace(padded, memory=memory, memory_valid=memory_valid, memory_marks=memory_marks)
    if inputs.task is not None:
        padded = replace(padded, task=F.pad(inputs.task, (0, len(query) - len(inputs.query))))
    return padded


def _pad_empty(tokens: Tensor, valid: Tensor | None, marks: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens (B, T, D), mask (B, T) and marks (B, T), with one row of padding for each axis of size 0."""
    batch, length = tokens.shape[:2]
    more = 0, 1 - min(length, 1), 0, 1 - min(batch, 1)
    if valid is None:
        valid = tokens.new_ones(batch, length, dtype=torch.bool)
    return F.pad(tokens, (0, 0, *more)), F.pad(valid, more), None if marks is None else F.pad(marks, more)


def _without_padding(attended: Attended, inputs: Inputs) -> Attended:
    """Remove the padding rows of `_padded` from the result.

    The carry keeps them, because the next layer's inputs are padded in the same way. Without tokens, losses are zero.
    """
    (batch, length), keys = inputs.query.shape[:2], inputs.context.shape[1]
    attended.output = attended.output[:batch, :length]
    if attended.weights is not None:
        attended.weights = attended.weights[:batch, :, :length, :keys]
    if attended.log_prob is not None:
        attended.log_prob = attended.log_prob[:batch]
    if not (batch and length):
        attended.losses = {name: 0.0 * loss for name, loss in attended.losses.items()}
    return attended


def packing(form: Callable[[Any, Inputs], Attended]) -> Callable[..., Attended]:
    """Wrap a method that takes `Inputs` so that it takes the arguments of `forward`; for `naive`."""

    @wraps(form)
    def packed(self: Attention, *arguments: Any, **named: Any) -> Attended:
        return form(self, Inputs(*arguments, **named))

    return packed


def unrounded_parts(model: nn.Module) -> set[nn.Module]:
    """Return the modules inside attentions, and inside other parts, that are declared `unrounded`."""
    unrounded = (part for part in model.modules() if getattr(part, "unrounded", False))
    return {module for part in unrounded for module in part.modules()}
