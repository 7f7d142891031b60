"""Options of mechanisms and slots: declared once in a constructor; the check, the help and the tests read the
declaration.

An option is a keyword-only argument of a constructor, and its annotation declares the values it accepts:

    def __init__(self, site: Site, *, rank: Positive = 128, share: Annotated[str, OneOf(SHARE)] = "head") -> None:

`check` checks values against it before anything is built. A rule that depends on the site (a divisor of the heads) is
checked in the constructor, which raises `refused`.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from mtkit.attention.contract import Site
from mtkit.errors import MtkitError, did_you_mean, shown

MOST = 2**30
"""The largest whole number that an option accepts unless it declares less: a product of two fits into 64 bits."""

T = TypeVar("T")


class OptionValueError(MtkitError):
    """A value that a declared option does not accept."""


@dataclass(frozen=True)
class Within:
    """A number from `least` to `most`, both allowed; not NaN."""

    least: float
    most: float = MOST

    def holds(self, value: Any) -> bool:
        """Return whether a value of the right type is allowed."""
        return bool(self.least <= value <= self.most)

    def rule(self, kind: str) -> str:
        """Return the allowed values for messages; `kind` names the type: "a whole number from 1 to 2^30"."""
        return f"{kind} from {self.least:g} to {'2^30' if self.most == MOST else f'{self.most:,.10g}'}"


@dataclass(frozen=True)
class OneOf:
    """A value that must be one of `names`."""

    names: Iterable[str]

    def holds(self, value: Any) -> bool:
        return value in self.names

    def rule(self, kind: str) -> str:
        return f"one of {', '.join(self.names)}"


@dataclass(frozen=True)
class SomeOf:
    """One or more of some names, as a list or as text with commas."""

    names: Iterable[str]

    def holds(self, value: Any) -> bool:
        return bool(value) and all(name in self.names for name in parts(value))

    def rule(self, kind: str) -> str:
        return f"one or more of {', '.join(self.names)}"


@dataclass(frozen=True)
class CountsOf:
    """Some of some names, each once and with a count from 1 on, as text: "next:1,first:4" (`counts`)."""

    names: Iterable[str]

    def holds(self, value: Any) -> bool:
        matches = [re.fullmatch(r"([\w-]+):([1-9]\d{0,8})", part, re.ASCII) for part in parts(value)]
        names = [match[1] for match in matches if match]
        return len(names) == len(matches) == len(set(names)) and all(name in self.names for name in names)

    def rule(self, kind: str) -> str:
        """Example: "counts of self, next, prev, as in self:1,next:1"."""
        some = [f"{name}:1" for name in self.names][:2]
        return f"counts of {', '.join(self.names)}, as in {','.join(some)}"


@dataclass(frozen=True)
class ListOf:
    """A list of whole numbers within limits, also as text (`numbers`); `count` of them, if that is given."""

    limits: Within
    meaning: str
    """Meaning of the numbers: "rows and columns"."""
    count: int | None = None

    def holds(self, value: Any) -> bool:
        if isinstance(value, str) and not re.fullmatch(r"-?\d{1,12}([,x]-?\d{1,12})+", value, re.ASCII):
            return False
        values = numbers(value)
        return self.count in (None, len(values)) and all(self.limits.holds(number) for number in values)

    def rule(self, kind: str) -> str:
        """Example: "a list of 2 whole numbers from 1 to 2^30, rows and columns"."""
        numbers = "whole numbers" if self.count is None else f"{self.count} whole numbers"
        return f"a list of {self.limits.rule(numbers)}, {self.meaning}"


@dataclass(frozen=True)
class Null:
    """Meaning of the default None: `Annotated[Natural | None, Null("1 in the encoder, 0 in the decoder")] = None`."""

    meaning: str


Natural = Annotated[int, Within(0)]
Positive = Annotated[int, Within(1)]
Share = Annotated[float, Within(0.0, 1.0)]
LossWeight = Annotated[float, Within(0.0, 1e6)]
"""Weight of a training loss."""
NearRoot = Annotated[Positive | None, Null("the square root of model.max_length, rounded")]
"""A number that is near the square root of the longest length by default; `root_of_length` returns it."""
NaturalByLayer = Natural | Sequence[Natural]
PositiveByLayer = Positive | Sequence[Positive]
"""One number, or a list with one for each layer; `of_layer` picks the layer's."""
PositiveByHead = (
    Positive | Annotated[str | Sequence[int], ListOf(Within(1), "one for each head or for equal shares of them")]
)
"""One number, or a list with one for each head or for equal shares of the heads; `of_head` expands it to all heads."""


@dataclass(frozen=True)
class Option:
    """One option as its constructor declares it."""

    default: Any
    hint: Any
    """Type annotation of the constructor's argument."""
    null: str = "null"
    """Meaning of the default None, for messages."""

    def allows(self, value: Any) -> bool:
        """Return whether the value has the type and keeps the limits."""
        return _allows(self.hint, value)

    @property
    def rule(self) -> str:
        """The allowed values, for messages."""
        *rules, last = _rules(self.hint)
        if last == TYPES[NoneType] and any(rule.endswith(f", {last}") for rule in rules):
            *rules, last = rules  # null is already one of the names
        return f"{', '.join(rules)} or {last}" if rules else last


def declared(kind: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a mechanism or slot by name.

    A constructor may pass some on to its base class as `**shared: Unpack[Names]`, with a TypedDict Names: they
    have the base class's defaults.

    Raises: TypeError for an option without an annotation or without a default.
    """
    parameters = inspect.signature(kind).parameters.values()
    options = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    passed_on = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    constructor: Any = kind.__init__ if isinstance(kind, type) else kind  # type: ignore[misc]
    hints = get_type_hints(constructor, include_extras=True) if options or passed_on else {}
    for parameter in options:
        if parameter.name not in hints or parameter.default is parameter.empty:
            raise TypeError(f"the option {parameter.name} of {kind.__name__} needs an annotation and a default")
    known = {parameter.name: _option(parameter.default, hints[parameter.name]) for parameter in options}
    if passed_on and get_origin(hint := hints.get(passed_on[0].name)) is Unpack:
        base: Any = kind.__base__  # type: ignore[attr-defined]
        defaults = inspect.signature(base).parameters
        for name, shared in get_type_hints(get_args(hint)[0], include_extras=True).items():
            known[name] = _option(defaults[name].default, shared)
    return known


def _option(default: Any, hint: Any) -> Option:
    kind, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    meanings = [limit.meaning for limit in limits if isinstance(limit, Null)]
    return Option(default, kind, meanings[0]) if meanings else Option(default, hint)


def options_of(kind: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a mechanism or slot, {name: default}."""
    return {name: option.default for name, option in declared(kind).items()}


def check(owner: str, kind: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Check option values before anything is built; `owner` is the mechanism's name in messages: "attention
    'linformer'".

    Raises: MtkitError for an option that `kind` does not declare, OptionValueError for a value it does not accept.
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
    """Return the error for a value that breaks a rule of its site: "kv_heads = 3 must divide the 4 heads"."""
    return MtkitError(f"{option} = {shown(value)} must {rule}")


def of_layer(option: str, value: T | Sequence[T], site: Site) -> T:
    """Return this layer's value of an option that is one for all layers, or a list with one for each.

    Raises: MtkitError if a list has another length than the number of layers, and for a layer that is not one of them.
    """
    if site.layer >= site.layers:
        raise refused("layer", site.layer, f"be less than layers = {site.layers}")
    values = value if isinstance(value, Sequence) else [value] * site.layers
    if len(values) != site.layers:
        raise refused(option, value, f"have one value for each of the {site.layers} layers, or one for all")
    return values[site.layer]


def of_head(option: str, value: int | str | Sequence[int], site: Site) -> list[int]:
    """Return all heads' values of an option that is one for all, or a list for equal shares of the heads.

    Raises: MtkitError if the length of the list does not divide the number of heads.
    """
    values = numbers(value) if isinstance(value, Sequence) else [value]
    if not values or site.heads % len(values):
        raise refused(option, value, f"have one value for each of the {site.heads} heads, or for equal shares of them")
    return [head_value for head_value in values for _ in range(site.heads // len(values))]


def root_of_length(value: int | None, site: Site) -> int:
    """Return the option's value; None becomes the rounded square root of the longest length (in the cross role the
    memory's).

    It is never the length of a batch: what a position sees must not depend on later positions.
    """
    longest = (site.memory_length if site.role == "cross" else None) or site.max_length
    return max(1, round(math.sqrt(longest))) if value is None else value


def parts(value: str | Sequence[str]) -> list[str]:
    """Return the names of a `SomeOf` option."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)


def counts(value: str) -> dict[str, int]:
    """Return the counts of a `CountsOf` option by name, in the given order."""
    return {name: int(count) for name, _, count in (part.partition(":") for part in parts(value))}


def numbers(value: str | Sequence[int]) -> list[int]:
    """Return the numbers of a `ListOf` option: [8, 16] for "8,16" and "8x16"."""
    return [int(number) for number in re.split("[,x]", value)] if isinstance(value, str) else list(value)


def _kinds(hint: Any) -> list[tuple[Any, list[Any]]]:
    """Return the alternative types of a type hint, each with its limits."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    pairs = (get_args(kind) if get_origin(kind) is Annotated else (kind,) for kind in alternatives)
    return [(kind, limits) for kind, *limits in pairs]


def _allows(hint: Any, value: Any) -> bool:
    return any(_is_a(kind, value) and all(limit.holds(value) for limit in limits) for kind, limits in _kinds(hint))


def _is_a(kind: Any, value: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return _allows(kind, value)
    if get_origin(kind) is Sequence:
        return isinstance(value, list | tuple) and all(_allows(get_args(kind)[0], item) for item in value)
    if kind is int or kind is float:  # a bool is an int in Python, but not an allowed number
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


TYPES = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", NoneType: "null"}


def _rules(hint: Any) -> list[str]:
    rules: list[str] = []
    for kind, limits in _kinds(hint):
        base = "a list of such, one for each layer" if get_origin(kind) is Sequence else TYPES.get(kind, "")
        rules += [limit.rule(TYPES.get(kind, "")) for limit in limits] or [base]
    return rules


def _nearest(hint: Any, value: Any) -> str:
    """Return a did-you-mean for the first unknown name, if the option accepts names."""
    limits = [limit for _, limits in _kinds(hint) for limit in limits]
    names = [name for limit in limits if isinstance(limit, OneOf | SomeOf | CountsOf) for name in limit.names]
    words = parts(value) if isinstance(value, str | list | tuple) else []
    words = [str(word).partition(":")[0] for word in words]  # the name in NAME:COUNT
    return next((did_you_mean(word, names) for word in words if names and word not in names), "")
