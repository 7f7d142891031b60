"""Every mechanism in every role it declares, as the contract tests build it; no name of a mechanism stands here.

The registry lists the mechanisms. Each is built with small options, so that a short sequence crosses every border of a
window or block, at its defaults, and with small options in its variants and around what its slots take.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import pytest
import torch

from mtkit.attention import ROLES, Attention, build, mechanisms
from mtkit.attention.options import options_of
from mtkit.attention.registry import Mechanism, find
from mtkit.errors import MtkitError
from tests.contract.slots import Value, covering, taken, values

SMALL = {
    "window": 3, "radius": 3, "block": 4, "chunk": 5, "landmark": 3,
    "rank": 5, "size": 4, "feature": 5, "token": 2, "clip": 3,
}  # fmt: skip
"""Small values by the word in an option's name; a mechanism that needs others declares `small`."""
LONG = 135
"""Long enough that the engines' own blocks, of 32 positions at least, have neighbours on both sides."""
SMALL_LENGTH, DEFAULT_LENGTH = 200, 1100


MIXES = (
    "full:2+band:2",
    "realformer:2+sink:2",
    "group:2+longformer:2",
    "linear:2+gated-delta:2",
    "multi-query:2+random:2",
    "full:2+moba:2",
    "moba:2+native-sparse:2",
)
"""Mechanisms in the heads of one layer."""


@dataclass(frozen=True)
class Case:
    """One mechanism in one role with one set of options."""

    name: str
    role: str
    setting: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the mechanism and slots around it."""
    slow: bool = False
    """Whether only `pytest -m slow` runs it."""
    repeats: bool = False
    """Whether it is a variant that stands for its options in one role more; `once` leaves it out."""

    @property
    def mechanism(self) -> Mechanism:
        """Its entry in the registry."""
        return find(self.name)

    @property
    def small(self) -> bool:
        """Whether it is built with small options."""
        return self.setting != "default"

    @property
    def layers(self) -> int:
        """Small cases are stacks of two, so that what one layer carries to the next is under test too.

        A variant or a filled slot is one layer if its layers are alike: each mechanism has a stack of two without them.
        """
        return 2 if self.small and (self.setting == "small" or not self.alike) else 1

    @cached_property
    def alike(self) -> bool:
        """Whether layers carry nothing, have the same buffers, and give the same outputs with the same parameters."""
        with torch.random.fork_rng(), torch.no_grad():
            torch.default_generator.manual_seed(1)
            first, second = (self.build(layer=layer).eval() for layer in range(2))
            if _shapes(first) != _shapes(second) or not all(map(torch.equal, first.buffers(), second.buffers())):
                return False
            for parameter in first.parameters():
                parameter.add_(torch.randn_like(parameter))
            second.load_state_dict(first.state_dict())
            query = torch.randn(1, LONG // 2, 32)
            memory = torch.randn(1, LONG // 2, self.memory_width or 32) if self.role == "cross" else None
            attended = first(query, memory)
            return attended.carry is None and torch.equal(second(query, memory).output, attended.output)

    @property
    def memory_width(self) -> int | None:
        """Small cases in the cross role read a memory of a width of its own."""
        return 24 if self.small and self.role == "cross" else None

    @property
    def blocks(self) -> list[int]:
        """The sizes of its options, around which borders lie; the largest alone at the defaults."""
        left = {} if self.small and self.mechanism.kinds else self.mechanism.options  # a mix repeats them by kind
        values = {**left, **self.options}.values()
        sizes = {each for each in values if type(each) is int and 1 < each <= 300}
        return sorted(sizes) if self.small else sorted(sizes)[-1:]

    @property
    def long(self) -> int:
        """A length that crosses every border more than once."""
        return LONG if self.small else 4 * max(self.blocks, default=6) + 3

    def build(self, **site: Any) -> Attention:
        """The attention; `site` overrides arguments of `mtkit.attention.build`."""
        length = SMALL_LENGTH if self.small else DEFAULT_LENGTH
        here = {
            "role": self.role,
            "d_model": 32,
            "heads": 4,
            "max_length": length,
            "memory_width": self.memory_width,
            "layers": 2 if self.small else 1,
        }
        here |= site
        return build(self._name_for(here["heads"]), **here, **self.options)

    def _name_for(self, heads: int) -> str:
        """The name, with the numbers of a mix's heads scaled to another number than four."""
        kinds = self.mechanism.kinds
        return "+".join(f"{kind.name}:{count * heads // 4}" for kind, count in kinds) if kinds else self.name

    def __str__(self) -> str:
        return f"{self.name}-{self.role}-{self.setting}"


def _shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    """Shapes of parameters and buffers by name."""
    return {name: x.shape for name, x in (*module.named_parameters(), *module.named_buffers())}


@cache
def all_cases() -> tuple[Case, ...]:
    """Each mechanism and role: small, default, small in every variant and with slots filled."""
    met: set[Any] = set()
    single = [case for mechanism in mechanisms().values() for case in cases_of(mechanism, met)]
    return (*single, *(case for name in MIXES for case in cases_of_mix(find(name))))


def cases_of_mix(mix: Mechanism) -> Iterator[Case]:
    """The cases of several mechanisms in the heads of one layer: small and default."""
    options = {
        f"{kind.name}.{name}": value for kind, _ in mix.kinds for name, value in small_options(kind.kind).items()
    }
    for role in sorted(mix.roles, key=ROLES.index):
        yield Case(mix.name, role, "small", options)
        yield Case(mix.name, role, "default")


def cases_of(mechanism: Mechanism, met: set[Any]) -> Iterator[Case]:
    """The cases of one mechanism; every value of a slot alone, in every role, is for the slow tests.

    `met` holds the pairs of slot values that mechanisms before it have.
    """
    small, roles = small_options(mechanism.kind), sorted(mechanism.roles, key=ROLES.index)
    for role in roles:
        yield Case(mechanism.name, role, "small", small)
        yield Case(mechanism.name, role, "default")
    for number, options in enumerate(variants(mechanism.kind)):
        turned = roles[number % len(roles) :] + roles[: number % len(roles)]  # so that no role has all of them
        each_role = [Case(mechanism.name, role, label(options), {**small, **options}) for role in turned]
        for times, case in enumerate(filter(can_build, each_role)):
            yield replace(case, repeats=times > 0)
    several = [
        filled(mechanism, role, held)
        for role, held in covering(mechanism, lambda *how: can_build(filled(mechanism, *how)), met)
    ]
    yield from several
    for role in sorted(mechanism.roles, key=ROLES.index):
        for value in taken(mechanism, role):
            case = filled(mechanism, role, (value,), slow=True)
            own = mechanism.name == "full" and value[0] != "positions"  # `full` with it is what its own name builds
            if not own and str(case) not in map(str, several):
                yield case


def filled(mechanism: Mechanism, role: str, held: tuple[Value, ...], slow: bool = False) -> Case:
    """A mechanism with slots filled, at small options."""
    slots = {slot: {"name": name, **small_options(values()[slot, name])} for slot, name in held}
    setting = ",".join(f"{slot}={name}" for slot, name in held)
    return Case(mechanism.name, role, setting, small_options(mechanism.kind) | slots, slow)


def small_options(kind: type) -> dict[str, Any]:
    """Options of 2 to 5 for what has a size: those the class declares, else by the words of their names."""
    declared = getattr(kind, "small", None)
    if declared is not None:
        return dict(declared)
    sized = {
        option: next((small for word, small in SMALL.items() if word in option), None)
        for option, default in options_of(kind).items()
        if type(default) is int and default > 0
    }
    return {option: value for option, value in sized.items() if value is not None}


def variants(kind: type) -> Iterator[dict[str, Any]]:
    """Other values of options: each switch turned over, and the `variants` that the class declares."""
    yield from ({option: not default} for option, default in options_of(kind).items() if type(default) is bool)
    yield from getattr(kind, "variants", ())


def label(options: Mapping[str, Any]) -> str:
    """`share=kv` for a test's name."""
    return ",".join(f"{option}={value}" for option, value in options.items())


def can_build(case: Case) -> bool:
    """Whether the mechanism takes these options in this role; what it refuses, it refuses by name."""
    try:
        case.build()
    except MtkitError:
        return False
    return True


def each(
    choose: Callable[[Case], bool] = lambda case: True, *, slow: Callable[[Case], bool] = lambda case: False
) -> pytest.MarkDecorator:
    """Runs a test with `case` set to every case chosen; `slow` says which of them wait for `pytest -m slow`.

    `parametrize` reads the mark.
    """
    return pytest.mark.cases(choose, slow)


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Sets `case` as `each` says; cases that wait for another run are not made, as they are more than the rest."""
    left_out = "not slow" in metafunc.config.option.markexpr
    whole = metafunc.definition.get_closest_marker("slow") is not None
    for mark in metafunc.definition.iter_markers("cases"):
        choose, slow = mark.args
        chosen = [
            pytest.param(case, id=str(case), marks=[pytest.mark.slow] * waits)
            for case in all_cases()
            if choose(case) and not (((waits := case.slow or slow(case)) or whole) and left_out)
        ]
        metafunc.parametrize("case", chosen)


def small(case: Case) -> bool:
    """Small options, plain or with a slot filled."""
    return case.small


def plain(case: Case) -> bool:
    """No slot filled."""
    return case.setting in ("small", "default")


def once(case: Case) -> bool:
    """Each variant in one of its roles, for what the role changes little."""
    return not case.repeats


def steps(case: Case) -> bool:
    """A role in which a model decodes step by step."""
    return case.role != "encoder"


def valid_mask(lengths: list[int], width: int) -> torch.Tensor:
    """(B, width), True at the first `lengths` positions of each segment."""
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
