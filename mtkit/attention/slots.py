"""The slots of a mechanism over projected heads: replaceable parts before, inside and after its equation.

`positions` changes scores by relative position, `projection` makes queries, keys and values from the tokens, `nearby`
adds a term of the neighbouring tokens' values to the heads' outputs, `merge` turns these into one vector, `regularizer`
adds a training loss. An empty slot means the plain Transformer.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from mtkit.attention.contract import Inputs, Site
from mtkit.attention.options import refused
from mtkit.errors import MtkitError

OWN_VECTORS = frozenset({"fixed-head-size", "grouped-query", "multi-query"})
"""Projections whose scores are products of one query vector and one key vector of each head. Mechanisms that transform
queries and keys separately support only these."""

SLOTS = ("positions", "projection", "merge", "regularizer", "nearby")

SLOT_ROLES: Mapping[str, tuple[str, ...]] = {"positions": ("encoder", "decoder"), "nearby": ("encoder",)}
"""The roles that a slot has if an option sets it for all roles, by slot; other slots: all. Positions of target and
source are not comparable, so they have the cross role only if the option names it."""


def combining(*slots: str, **some: Iterable[str]) -> Mapping[str, frozenset[str] | None]:
    """Return the `slots` of a mechanism: `slots` combine with every name, `some` only with the names given."""
    return dict.fromkeys(slots) | {slot: frozenset(names) for slot, names in some.items()}


WITHOUT_SCORES: dict[str, frozenset[str] | None] = {
    "projection": None,
    "merge": None,
    "regularizer": frozenset({"disagreement"}),
    "nearby": None,
}
"""The slots of a mechanism without a matrix of scores, which most positions change and most regularizers read."""


class Slot(nn.Module):
    """The content of one slot; a subclass in a family's folder is also a mechanism name: `full` with that slot set."""

    roles: ClassVar[frozenset[str]] = frozenset({"encoder", "decoder", "cross"})
    published: ClassVar[frozenset[str]] = frozenset({"encoder", "decoder", "cross"})
    paper: ClassVar[str]
    complexity: ClassVar[str] = "O(T²)"
    growth: ClassVar[float] = 2
    sequential_operations: ClassVar[str | None] = "O(1)"
    longest_path: ClassVar[str | None] = "O(1)"
    weights: ClassVar[bool] = True
    apart_from: ClassVar[frozenset[str]] = frozenset()
    """Names in other slots that it cannot combine with."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def after_update(self, update: int, total_updates: int) -> None:
        """Called after each optimiser update by the attention that owns the slot."""

    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Return learned numbers by name, as `Attention.learned_numbers` does."""
        return {}


class Projection(Slot):
    """Makes queries, keys and values of the heads from the tokens; this base class is the plain multi-head projection.

    The linear maps themselves are the attention's `q_proj`, `k_proj` and `v_proj`; a projection defines their widths
    and splits their outputs into heads. Keys and values may have fewer heads than queries (G instead of H, in groups of
    neighbours), and keys and values may have different widths.
    """

    def __init__(self, site: Site, width: int | None = None) -> None:
        """`width` of each head; None: an equal share of the model's width."""
        super().__init__(site)
        if width is None:
            heads = site.layer_heads or site.heads
            if site.d_model % heads:
                raise MtkitError(f"{heads} heads do not divide the width {site.d_model}")
            width = site.head_width
        self.heads = site.heads
        self.key_heads = site.heads
        self.value_heads = site.heads
        self.key_width = width
        self.value_width = width

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.key_width**-0.5)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Output widths of `q_proj`, `k_proj` and `v_proj`."""
        return (self.heads * self.key_width, self.key_heads * self.key_width, self.value_heads * self.value_width)

    @property
    def joined_width(self) -> int:
        """Width of the concatenated outputs of the heads."""
        return self.site.heads * self.value_width

    def initialize(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Initialise the maps of queries and keys, if not by Xavier's rule, which has been applied before."""

    def queries(self, projected: Tensor) -> Tensor:
        """Map (B, T, H*K) to (B, H, T, K)."""
        return projected.unflatten(-1, (self.heads, self.key_width)).transpose(1, 2)

    def keys(self, projected: Tensor) -> Tensor:
        """Map (B, S, G*K) to (B, G, S, K)."""
        return projected.unflatten(-1, (self.key_heads, self.key_width)).transpose(1, 2)

    def values(self, projected: Tensor) -> Tensor:
        """Map (B, S, G*V) to (B, G, S, V)."""
        return projected.unflatten(-1, (self.value_heads, self.value_width)).transpose(1, 2)

    def adopted(self, full_state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state_dict of `full`, its entries converted to the shapes of this attention's state `own` if
        possible.
        """
        return {
            name: value if name in own and own[name].shape == value.shape else self.converted(name, value)
            for name, value in full_state.items()
        }

    def converted(self, name: str, value: Tensor) -> Tensor:
        """Return one entry of another shape, converted if it can be converted by itself."""
        return value


class KeyValueGroups(Projection):
    """Keys and values with fewer heads than queries: query head a reads key-value head a // (heads / kv_heads)."""

    def __init__(self, site: Site, kv_heads: int) -> None:
        super().__init__(site)
        if site.heads % kv_heads:
            raise refused("kv_heads", kv_heads, f"divide the {site.heads} heads")
        self.key_heads = kv_heads
        self.value_heads = kv_heads

    def converted(self, name: str, value: Tensor) -> Tensor:
        """Take the mean over each group's heads (Ainslie et al., 2023, section 2.1)."""
        if not name.startswith(("k_proj", "v_proj")) or value.shape[0] != self.heads * self.key_width:
            return value
        group = self.heads // self.key_heads
        return value.unflatten(0, (self.key_heads, group, self.key_width)).mean(1).flatten(0, 1)


class Merge(Slot):
    """Makes one vector from the heads' outputs, before `out_proj`; the plain Transformer concatenates them.

    `width` is the width of one head's output.
    """

    reads_query: ClassVar[bool] = False
    """Whether the result depends on the query."""

    def __init__(self, site: Site, width: int) -> None:
        super().__init__(site)
        self.width = width

    def forward(self, heads: Tensor, query: Tensor) -> Tensor:
        """Map (B, H, T, V) to (B, T, H*V); query: the vectors that the queries are projected from, B * T of them."""
        raise NotImplementedError


class HeadResults(NamedTuple):
    """Results of an attention over whole sequences, by head; regularizers read them."""

    inputs: Inputs
    heads: Tensor
    """(B, H, T, V) outputs of the heads before merging, with the term of the slot `nearby`."""
    values: Tensor
    """(B, G, S, V)."""
    weights: Tensor | None = None
    """(B, H, T, S) before dropout, at least of `Regularizer.weighed_heads`; None if they were not needed."""
    visible: Tensor | None = None
    """True for the keys that the mechanism shows to a query, broadcastable to `weights`; None if it hides only padding
    and the future."""


class Regularizer(Slot):
    """A training loss on the values, weights or outputs of the heads."""

    needs_weights: bool = False
    """Whether it reads the attention weights, so that they must be computed."""
    weighed_heads: int | None = None
    """Number of heads, from the first, whose weights it reads; None: all."""
    reads_marks: bool = False
    """Whether it reads `inputs.context_marks`, so that the marks must be computed."""

    def forward(self, results: HeadResults) -> dict[str, Tensor]:
        """Return weighted losses, means per real token."""
        raise NotImplementedError


class Positions(Slot):
    """Relative positions in self-attention.

    In all methods q and k are (B, H, ..., K) with any block axes between, and positions are integers over the block
    axes and the length, (..., T) and (..., S); key positions may differ between heads, (B or 1, H, ..., S).
    """

    roles: ClassVar[frozenset[str]] = frozenset({"encoder", "decoder"})
    on_scores: ClassVar[bool] = True
    """Whether `bias` returns a tensor."""
    on_values: ClassVar[bool] = False
    """Whether `values` returns a tensor, so that weights must be computed."""

    def __init__(self, site: Site, width: int, value_width: int | None = None) -> None:
        """`width` is the width of a head's queries and keys, `value_width` the width of its values; None: the same."""
        super().__init__(site)
        if site.role not in self.roles:
            raise MtkitError("relative positions need one axis for queries and keys: the cross role has none")
        self.width = width
        self.value_width = value_width or width

    @property
    def learned(self) -> bool:
        """Whether there are parameters, which need gradients."""
        return any(True for _ in self.parameters())

    def of_heads(self, some: range) -> "Positions":
        """Return the same positions for some of the heads; methods then get only the queries of these heads."""
        return self

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Return queries or keys (..., T, K) as they enter the score."""
        return x

    def bias(self, q: Tensor, query_position: Tensor, key_position: Tensor, scale: float) -> Tensor | None:
        """Return a term to add to the scaled scores, broadcastable to (B, H, ..., T, S), or None."""
        return None

    def values(self, weights: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor | None:
        """Return a term to add to the heads' outputs, (B, H, ..., T, V), or None."""
        return None


class Nearby(Slot):
    """A function of neighbouring tokens' values, added to the heads' outputs over whole sequences."""

    roles: ClassVar[frozenset[str]] = frozenset({"encoder"})

    def forward(self, values: Tensor, valid: Tensor | None) -> Tensor:
        """Map values (B, G, T, V), with valid (B, T) or None, to the term (B, H, T, V)."""
        raise NotImplementedError

    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the weights of another attention's slot; without them the term is zero."""
        raise NotImplementedError


class Placed(NamedTuple):
    """Relative positions with the positions of the queries and keys of one call."""

    positions: Positions
    query_position: Tensor
    key_position: Tensor

    def bias(self, q: Tensor, scale: float) -> Tensor | None:
        """Return `Positions.bias` of these positions."""
        return self.positions.bias(q, self.query_position, self.key_position, scale)

    def values(self, weights: Tensor) -> Tensor | None:
        """Return `Positions.values` of these positions."""
        return self.positions.values(weights, self.query_position, self.key_position)


def slot_kind(kind: type) -> str | None:
    """Return the slot that a class fills, or None for a mechanism proper."""
    for slot, base in (("projection", Projection), ("merge", Merge), ("regularizer", Regularizer)):
        if issubclass(kind, base):
            return slot
    return None
