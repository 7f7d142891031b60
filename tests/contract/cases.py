"""Every mechanism in every role it declares, as the contract tests build it; no name of a mechanism stands here.

The registry lists the mechanisms. Each is built with small options, so that a short sequence crosses every border of a
window or block, at its defaults, and with small options around every slot value that it takes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mtkit.attention import ROLES, Attention, build, mechanisms
from mtkit.attention.options import options_of
from mtkit.attention.positions import POSITIONS
from mtkit.attention.registry import Mechanism
from mtkit.errors import MtkitError

SMALL = {
    "window": 3, "radius": 3, "block": 4, "chunk": 5, "landmark": 3,
    "rank": 5, "size": 4, "feature": 5, "token": 2, "clip": 3,
}  # fmt: skip
"""Small values by the word in an option's name; a mechanism that needs others declares `small`."""
LONG = 135
"""Long enough that the engines' own blocks, of 32 positions at least, have neighbours on both sides."""
SMALL_LENGTH, DEFAULT_LENGTH = 200, 1100


@dataclass(frozen=True)
class Case:
    """One mechanism in one role with one set of options."""

    name: str
    role: str
    setting: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the mechanism and slots around it."""

    @property
    def mechanism(self) -> Mechanism:
        """Its entry in the registry."""
        return mechanisms()[self.name]

    @property
    def small(self) -> bool:
        """Whether it is built with small options."""
        return self.setting != "default"

    @property
    def layers(self) -> int:
        """Small cases are stacks of two, so that what one layer carries to the next is under test too."""
        return 2 if self.small else 1

    @property
    def memory_width(self) -> int | None:
        """Small cases in the cross role read a memory of a width of its own."""
        return 24 if self.small and self.role == "cross" else None

    @property
    def blocks(self) -> list[int]:
        """The sizes of its options, around which borders lie; the largest alone at the defaults."""
        values = {**self.mechanism.options, **self.options}.values()
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
            "layers": self.layers,
        }
        return build(self.name, **(here | site), **self.options)

    def __str__(self) -> str:
        return f"{self.name}-{self.role}-{self.setting}"


def all_cases() -> Iterator[Case]:
    """Each mechanism and role: small, default, small in every variant and in every combination with one slot."""
    for mechanism in mechanisms().values():
        small = small_options(mechanism.kind)
        for role in sorted(mechanism.roles, key=ROLES.index):
            yield Case(mechanism.name, role, "small", small)
            yield Case(mechanism.name, role, "default")
            for options in variants(mechanism.kind):
                if can_build(case := Case(mechanism.name, role, label(options), {**small, **options})):
                    yield case
            for slot, value in combinations(mechanism, role):
                yield Case(mechanism.name, role, f"{slot}={value['name']}", {**small, slot: value})


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


def combinations(mechanism: Mechanism, role: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The slots that a mechanism takes in a role, each with everything it can hold, at small options."""
    positions = {kind: name for name, kind in POSITIONS.items()}  # one of the names of each
    holds: list[tuple[str, str, type]] = [("positions", name, kind) for kind, name in positions.items()]
    if mechanism.name != "full":  # `full` with these is what their own names build
        holds += [(other.slot, other.name, other.kind) for other in mechanisms().values() if other.slot is not None]
    takes = getattr(mechanism.kind, "slots", {})
    for slot, name, kind in holds:
        if role in kind.roles and slot in takes and (takes[slot] is None or name in takes[slot]):
            yield slot, {"name": name, **small_options(kind)}


def each(choose: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """Runs a test with `case` set to every case chosen."""
    return pytest.mark.parametrize("case", [case for case in all_cases() if choose(case)], ids=str)


def small(case: Case) -> bool:
    """Small options, plain or with a slot filled."""
    return case.small


def plain(case: Case) -> bool:
    """No slot filled."""
    return case.setting in ("small", "default")


def steps(case: Case) -> bool:
    """A role in which a model decodes step by step."""
    return case.role != "encoder"


def valid_mask(lengths: list[int], width: int) -> torch.Tensor:
    """(B, width), True at the first `lengths` positions of each segment."""
    return torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
