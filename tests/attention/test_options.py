"""Options as they are declared: what each kind of annotation takes, how it reads, and the choice by layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict, Unpack

import numpy as np
import pytest

from mtkit.attention import build
from mtkit.attention.contract import Site
from mtkit.attention.options import (
    Natural,
    NaturalByLayer,
    Null,
    OneOf,
    Positive,
    Share,
    SomeOf,
    Within,
    check,
    declared,
    of_layer,
    options_of,
    root_of_length,
)
from mtkit.errors import MtkitError


class Thing:
    """Something with an option of each kind."""

    def __init__(
        self,
        site: Site,
        *,
        rank: Positive = 4,
        radius: NaturalByLayer = 3,
        inner: Natural | None = None,
        alpha: Share = 0.5,
        eps: Annotated[float, Within(1e-12, 1.0)] = 1e-6,
        mode: Annotated[str, OneOf(("carry", "local"))] = "carry",
        types: Annotated[str | Sequence[str], SomeOf(("position", "output"))] = "output",
        tied: bool = True,
    ) -> None: ...


@pytest.mark.parametrize(
    ("option", "right", "wrong"),
    [
        ("rank", [1, 2**30], [0, 2**30 + 1, 1.0, True, "4", None, [4]]),
        ("radius", [0, [1, 2], (1, 2), []], [-1, [1, -2], [True], "ab", None]),
        ("inner", [0, None], [-1, "", False]),
        ("alpha", [0, 1, 0.3], [-0.1, 1.1, float("nan"), float("inf"), "0.3", True]),
        ("eps", [1e-12, 1], [0, 2]),
        ("mode", ["carry", "local"], ["car", "", 1, None, ["carry"]]),
        ("types", ["output", "output, position", ["position"], ["output", "position"]], ["", [], "o,p", [1], 3, {}]),
        ("tied", [True, False], [1, 0, "true", None]),
    ],
)
def test_an_option_takes_what_its_annotation_says(option: str, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        check("thing", Thing, {option: value})
    for value in wrong:
        with pytest.raises(MtkitError, match=f"^thing: {option} = .* must be ") as refusal:
            check("thing", Thing, {option: value})
        assert declared(Thing)[option].rule in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_rules_read_as_a_person_says_them() -> None:
    assert {name: option.rule for name, option in declared(Thing).items()} == {
        "rank": "a whole number from 1 to 2^30",
        "radius": "a whole number from 0 to 2^30 or a list of such, one for each layer",
        "inner": "a whole number from 0 to 2^30 or null",
        "alpha": "a number from 0 to 1",
        "eps": "a number from 1e-12 to 1",
        "mode": "one of carry, local",
        "types": "one or more of position, output",
        "tied": "true or false",
    }
    assert options_of(Thing)["rank"] == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "locale"}, r"\(did you mean 'local'\?\)"),
        ({"types": "output,positions"}, r"\(did you mean 'position'\?\)"),
        ({"rnk": 3}, r"thing has no option 'rnk' \(did you mean 'rank'\?\); its options: alpha, eps, inner, mode"),
    ],
)
def test_what_is_nearly_right_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(MtkitError, match=message):
        check("thing", Thing, wrong)


def test_an_option_is_one_number_or_one_for_each_layer() -> None:
    site = Site("encoder", 16, 2, layer=1, layers=3)
    assert of_layer("window_radius", 7, site) == 7
    assert of_layer("window_radius", [4, 5, 6], site) == 5
    with pytest.raises(MtkitError, match=r"window_radius = \[4, 5\] must have one value for each of the 3 layers"):
        of_layer("window_radius", [4, 5], site)
    for value in (7, [4, 5, 6]):
        with pytest.raises(MtkitError, match="layer = 3 must be less than layers = 3"):
            of_layer("window_radius", value, replace(site, layer=3))


def test_a_root_follows_the_longest_length_of_what_is_read() -> None:
    assert root_of_length(7, Site("encoder", 32, 4)) == 7
    assert root_of_length(None, Site("encoder", 32, 4, max_length=1000, memory_length=64)) == 32
    assert root_of_length(None, Site("cross", 32, 4, max_length=1000, memory_length=64)) == 8
    assert root_of_length(None, Site("cross", 32, 4, max_length=1)) == 1


@pytest.mark.parametrize("name", [5, None, ["full"]])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(MtkitError, match=r"an attention is named by a text, not (5|None|\['full'\]); `mtkit attent"):
        build(name, role="encoder", d_model=8, heads=2)


def test_numbers_of_numpy_are_numbers() -> None:
    """Whether as options of the mechanism or of a slot."""
    where = {"role": "encoder", "d_model": 8, "heads": 2}
    plain = build("band", window_radius=5, positions={"name": "relative", "clip": 3}, **where)
    mine = build("band", window_radius=np.int64(5), positions={"name": "relative", "clip": np.int64(3)}, **where)
    assert str(mine) == str(plain)
    assert mine.site.positions == plain.site.positions


def test_the_annotation_says_what_a_default_of_null_means() -> None:
    def build(*, globals_: Annotated[Natural | None, Null("1 in the encoder, 0 in the decoder")] = None) -> None: ...

    option = declared(build)["globals_"]
    assert option.null == "1 in the encoder, 0 in the decoder"
    assert option.rule == "a whole number from 0 to 2^30 or null"
    assert option.allows(None)
    assert option.allows(3)
    assert not option.allows(-1)


def test_options_that_are_passed_on_have_the_defaults_of_the_base_class() -> None:
    class Shared(TypedDict, total=False):
        taps: Annotated[int, Within(0, 4)]

    class Base:
        def __init__(self, *, taps: int = 3, hidden: int = 1) -> None:
            self.taps = taps

    class Passing(Base):
        def __init__(self, *, own: Positive = 2, **shared: Unpack[Shared]) -> None:
            super().__init__(**shared)

    assert {name: option.default for name, option in declared(Passing).items()} == {"own": 2, "taps": 3}
    check("it", Passing, {"taps": 4})
    with pytest.raises(MtkitError, match="taps = 5 must be a whole number from 0 to 4"):
        check("it", Passing, {"taps": 5})
    for unknown in ("hidden", "tap"):
        with pytest.raises(MtkitError, match=f"no option '{unknown}'"):
            check("it", Passing, {unknown: 1})
    assert Passing(taps=1).taps == 1
