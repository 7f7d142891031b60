from collections.abc import Callable

import pytest

from mtkit.attention import mechanisms
from mtkit.errors import MtkitError
from mtkit.experiments.entries import entries
from mtkit.model.build import describe_attention
from mtkit.recipe import Recipe

Tiny = Callable[..., Recipe]


def test_each_fills_the_roles_of_its_paper_and_nothing_else_differs(tiny: Tiny) -> None:
    recipe = tiny(attention={"name": "band", "cross": "full", "decoder": "average"})
    found = entries(recipe, ["full", "longformer", "em-routing", "multi-query", "full"])
    assert list(found) == ["full", "longformer", "em-routing", "multi-query"]
    assert describe_attention(found["longformer"]) == "encoder longformer, decoder longformer, cross full"
    assert describe_attention(found["em-routing"]) == "encoder em-routing, decoder em-routing, cross em-routing"
    assert len({each.model_copy(update={"attention": None}).model_dump_json() for each in found.values()}) == 1


def test_all_are_every_mechanism_full_first(tiny: Tiny) -> None:
    found = entries(tiny(), ["all"])
    assert next(iter(found)) == "full"
    assert set(found) == set(mechanisms())


def test_options_reach_those_that_have_them(tiny: Tiny) -> None:
    options = {"window_radius": 3, "decoder.window_radius": 2, "positions": "rotary"}
    found = entries(tiny(attention={"options": options}), ["full", "longformer"], options)
    assert found["longformer"].attention.options == options
    assert found["full"].attention.options == {"positions": "rotary"}


def test_a_slot_is_left_out_for_what_is_its_filling(tiny: Tiny) -> None:
    options = {"projection": "multi-query", "merge": "em-routing"}
    found = entries(tiny(attention={"options": options}), ["full", "multi-query", "em-routing"], options)
    assert found["full"].attention.options == options
    assert found["multi-query"].attention.options == {"merge": "em-routing"}
    assert found["em-routing"].attention.options == {"projection": "multi-query"}


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["full", "longfromer"], {}, "did you mean 'longformer'"),
        (["full", "longformer"], {"window_radis": 3}, "did you mean 'window_radius'"),
        (["full", "longformer"], {"decodr.window_radius": 3}, "did you mean 'decoder'"),
        (["full", "longformer"], {"window_radius": -3}, "longformer': window_radius = -3 must be"),
        ([], {}, "no mechanism"),
    ],
)
def test_mistakes_are_named(tiny: Tiny, names: list[str], options: dict[str, int], message: str) -> None:
    with pytest.raises(MtkitError, match=message):
        entries(tiny(attention={"options": options}), names, options)


def test_options_of_the_recipe_that_nobody_has_are_left_out(tiny: Tiny) -> None:
    found = entries(tiny(attention={"name": "longformer", "options": {"window_radius": 3}}), ["full"])
    assert found["full"].attention.options == {}


def test_a_training_without_an_end_is_refused(tiny: Tiny) -> None:
    with pytest.raises(MtkitError, match="no limit"):
        entries(tiny(training={"max_updates": None}), ["full"])
