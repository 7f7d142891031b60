"""Options of mechanisms and slots: one declaration of each, which the check, the help and the tests read.

An option is a keyword-only argument of a constructor, and its annotation declares the values it takes:

    def __init__(self, site: Site, *, rank: Positive = 128, share: Annotated[str, OneOf(SHARE)] = "head") -> None:

`check` holds given values against it before anything is built. A rule that needs the site (a divisor of the heads)
stands in the constructor and raises `refused`.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

from mtkit.attention.contract import Site
from mtkit.errors import MtkitError, did_you_mean, shown

MOST = 2**30
"""The largest whole number that an option takes unless it declares less: a product of two fits into 64 bits."""

T = TypeVar("T")


class OptionValueError(MtkitError):
    """A value that a declared option does not take."""


class Limit(Protocol):
    """What an annotation demands beside the type."""

    def holds(self, value: Any) -> bool:
        """Whether a value of the right type is allowed."""

    def rule(self, kind: str) -> str:
        """The allowed values, for people; `kind` says the type: "a whole number"."""

    def extremes(self, kind: type) -> Sequence[Any]:
        """The smallest and largest allowed values, or every allowed name, for tests."""


@dataclass(frozen=True)
class Within:
    """A number from `least` to `most`, both allowed."""

    least: float
    most: float = MOST

    def holds(self, value: Any) -> bool:
        """False for no number (NaN) too."""
        return bool(self.least <= value <= self.most)

    def rule(self, kind: str) -> str:
        """ "a whole number from 1 to 2^30"."""
        return f"{kind} from {self.least:g} to {'2^30' if self.most == MOST else f'{self.most:,.10g}'}"

    def extremes(self, kind: type) -> Sequence[Any]:
        """The limits as values of type `kind`."""
        return kind(self.least), kind(self.most)


@dataclass(frozen=True)
class OneOf:
    """A value that must be one of `names`."""

    names: Iterable[str]

    def holds(self, value: Any) -> bool:
        """Whether it is one of the names."""
        return value in self.names

    def rule(self, kind: str) -> str:
        """ "one of kv, head, none"."""
        return f"one of {', '.join(self.names)}"

    def extremes(self, kind: type) -> Sequence[Any]:
        """Every allowed name."""
        return tuple(self.names)


@dataclass(frozen=True)
class SomeOf:
    """One or several of some names, as a list or with commas between them."""

    names: Iterable[str]

    def holds(self, value: Any) -> bool:
        """Whether each part is one of the names, and there is one."""
        return bool(value) and all(each in self.names for each in parts(value))

    def rule(self, kind: str) -> str:
        """ "one or more of subspace, position, output"."""
        return f"one or more of {', '.join(self.names)}"

    def extremes(self, kind: type) -> Sequence[Any]:
        """Each name alone, and all."""
        return *self.names, ",".join(self.names)


@dataclass(frozen=True)
class CountsOf:
    """Some of some names, each with a count, as text: "next:1,first:4" (`counts`)."""

    names: Iterable[str]

    def holds(self, value: Any) -> bool:
        """Whether each part is a name and a count from 1 on, and no name comes twice."""
        found = [re.fullmatch(r"([\w-]+):([1-9]\d{0,8})", part, re.ASCII) for part in parts(value)]
        names = [match[1] for match in found if match]
        return len(names) == len(found) == len(set(names)) and all(name in self.names for name in names)

    def rule(self, kind: str) -> str:
        """ "counts of self, next, prev, as in self:1,next:1"."""
        some = [f"{name}:1" for name in self.names][:2]
        return f"counts of {', '.join(self.names)}, as in {','.join(some)}"

    def extremes(self, kind: type) -> Sequence[Any]:
        """One of each name alone, and of all."""
        one = [f"{name}:1" for name in self.names]
        return *one, ",".join(one)


@dataclass(frozen=True)
class ListOf:
    """A list of whole numbers, also as text (`numbers`): of `count` if that is given, each within limits."""

    each: Within
    meaning: str
    """What the numbers are: "rows and columns"."""
    count: int | None = None

    def holds(self, value: Any) -> bool:
        """Whether there are as many numbers as there have to be, all within the limits."""
        if isinstance(value, str) and not re.fullmatch(r"-?\d{1,12}([,x]-?\d{1,12})+", value, re.ASCII):
            return False
        found = numbers(value)
        return self.count in (None, len(found)) and all(self.each.holds(number) for number in found)

    def rule(self, kind: str) -> str:
        """ "a list of 2 whole numbers from 1 to 2^30, rows and columns"."""
        numbers = "whole numbers" if self.count is None else f"{self.count} whole numbers"
        return f"a list of {self.each.rule(numbers)}, {self.meaning}"

    def extremes(self, kind: type) -> Sequence[Any]:
        """The limits for all numbers alike; None where their count is left open."""
        return [] if self.count is None else [[limit] * self.count for limit in self.each.extremes(int)]


@dataclass(frozen=True)
class Null:
    """What a default of None means: `Annotated[Natural | None, Null("1 in the encoder, 0 in the decoder")] = None`."""

    meaning: str


Natural = Annotated[int, Within(0)]
Positive = Annotated[int, Within(1)]
Share = Annotated[float, Within(0.0, 1.0)]
LossWeight = Annotated[float, Within(0.0, 1e6)]
"""Weight of a training loss."""
NaturalByLayer = Natural | Sequence[Natural]
PositiveByLayer = Positive | Sequence[Positive]
"""One number, or a list with one for each layer; `of_layer` picks it."""
PositiveByHead = (
    Positive | Annotated[str | Sequence[int], ListOf(Within(1), "one for each head or for equal shares of them")]
)
"""One number, or a list for equal shares of the heads, one for each at most; `of_head` gives those of all."""


@dataclass(frozen=True)
class Option:
    """One option as its constructor declares it."""

    default: Any
    hint: Any
    """Type annotation of the constructor's argument."""
    null: str = "null"
    """What a default of None means, for people."""

    def allows(self, value: Any) -> bool:
        """Whether the value has the type and keeps the limits."""
        return _allows(self.hint, value)

    @property
    def rule(self) -> str:
        """The allowed values, for people."""
        *rules, last = _rules(self.hint)
        if last == TYPES[NoneType] and any(rule.endswith(f", {last}") for rule in rules):
            *rules, last = rules  # the word is among the names already
        return f"{', '.join(rules)} or {last}" if rules else last

    @property
    def extremes(self) -> list[Any]:
        """The values at the limits, each name and each switch; none of lists."""
        return list(_extremes(self.hint))


def declared(kind: Callable[..., Any]) -> dict[str, Option]:
    """The options of a mechanism or slot by name."""
    parameters = inspect.signature(kind).parameters.values()
    options = [each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    constructor: Any = kind.__init__ if isinstance(kind, type) else kind  # type: ignore[misc]
    hints = get_type_hints(constructor, include_extras=True) if options else {}
    return {each.name: _option(each.default, hints[each.name]) for each in options}


def _option(default: Any, hint: Any) -> Option:
    kind, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    meanings = [each.meaning for each in limits if isinstance(each, Null)]
    return Option(default, kind, meanings[0]) if meanings else Option(default, hint)


def options_of(kind: Callable[..., Any]) -> dict[str, Any]:
    """The options of a mechanism or slot, {name: default}."""
    return {name: option.default for name, option in declared(kind).items()}


def check(owner: str, kind: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raises: MtkitError for an option that `kind` does not declare, OptionValueError for a value it does not take.

    `owner` is what messages call it: "attention 'linformer'".
    """
    known = declared(kind)
    for name, value in values.items():
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise MtkitError(
                f"{owner} has no option {shown(name)}{did_you_mean(str(name), list(known))}; its options: {names}"
            )
        if not known[name].allows(value):
            hint = _nearest(known[name].hint, value)
            raise OptionValueError(f"{owner}: {name} = {shown(value)} must be {known[name].rule}{hint}")


def refused(option: str, value: Any, rule: str) -> MtkitError:
    """The error for a value that breaks a rule of its site: "kv_heads = 3 must divide the 4 heads"."""
    return MtkitError(f"{option} = {shown(value)} must {rule}")


def of_layer(option: str, value: T | Sequence[T], site: Site) -> T:
    """The value of an option that is one for all layers, or a list with one for each.

    Raises: MtkitError where their count is not that of the layers.
    """
    values = value if isinstance(value, Sequence) else [value] * site.layers
    if len(values) != site.layers:
        raise refused(option, value, f"have one value for each of the {site.layers} layers, or be one for all")
    return values[site.layer]


def of_head(option: str, value: int | str | Sequence[int], site: Site) -> list[int]:
    """The values for all heads of an option that is one for all, or a list for equal shares of them.

    Raises: MtkitError where their count does not divide the heads.
    """
    values = numbers(value) if isinstance(value, Sequence) else [value]
    if not values or site.heads % len(values):
        raise refused(option, value, f"have one value for each of the {site.heads} heads, or for equal shares of them")
    return [each for each in values for _ in range(site.heads // len(values))]


def root_of_length(value: int | None, site: Site) -> int:
    """The value of an option that is, unless it is given, the square root of the longest length, rounded.

    In the cross role that is the memory's.
    Never that of a batch: what a position sees must not depend on what stands behind it.
    """
    longest = (site.memory_length if site.role == "cross" else None) or site.max_length
    return max(1, round(math.sqrt(longest))) if value is None else value


def parts(value: str | Sequence[str]) -> list[str]:
    """The names of a `SomeOf` option."""
    return [each.strip() for each in value.split(",")] if isinstance(value, str) else list(value)


def counts(value: str) -> dict[str, int]:
    """The counts by name of a `CountsOf` option, in the order given."""
    return {name: int(count) for name, _, count in (part.partition(":") for part in parts(value))}


def numbers(value: str | Sequence[int]) -> list[int]:
    """The numbers of a `ListOf` option: [8, 16] of "8,16" or "8x16" as well."""
    return [int(each) for each in re.split("[,x]", value)] if isinstance(value, str) else list(value)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _allows(hint: Any, value: Any) -> bool:
    if len(alternatives := _alternatives(hint)) > 1:
        return any(_allows(each, value) for each in alternatives)
    if get_origin(hint) is Annotated:
        kind, *limits = get_args(hint)
        return _allows(kind, value) and all(limit.holds(value) for limit in limits)
    if get_origin(hint) is Sequence:
        return isinstance(value, list | tuple) and all(_allows(get_args(hint)[0], each) for each in value)
    if hint is int or hint is float:  # a bool is an int of Python, but no number of ours
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return isinstance(value, hint)


TYPES = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", NoneType: "null"}


def _rules(hint: Any) -> list[str]:
    if len(alternatives := _alternatives(hint)) > 1:
        return [rule for each in alternatives for rule in _rules(each)]
    if get_origin(hint) is Annotated:
        kind, *limits = get_args(hint)
        return [limit.rule(TYPES.get(kind, "")) for limit in limits]
    if get_origin(hint) is Sequence:
        return ["a list of such, one for each layer"]
    return [TYPES[hint]]


def _extremes(hint: Any) -> Sequence[Any]:
    if len(alternatives := _alternatives(hint)) > 1:
        return [value for each in alternatives for value in _extremes(each)]
    if get_origin(hint) is Annotated:
        kind, *limits = get_args(hint)
        return [value for limit in limits for value in limit.extremes(kind)]
    return [False, True] if hint is bool else [None] if hint is NoneType else []


def _nearest(hint: Any, value: Any) -> str:
    """A did-you-mean for the first name that is none, where the option takes names."""
    limits = [limit for each in _alternatives(hint) if get_origin(each) is Annotated for limit in get_args(each)[1:]]
    names = [name for limit in limits if isinstance(limit, OneOf | SomeOf | CountsOf) for name in limit.names]
    words = parts(value) if isinstance(value, str | list | tuple) else []
    words = [str(word).partition(":")[0] for word in words]  # of a count
    return next((did_you_mean(word, names) for word in words if names and word not in names), "")
