"""From a recipe's words to which mechanism stands in which layer."""

from typing import Any

import pytest

from mtkit.errors import MtkitError
from mtkit.model.build import choose, describe_attention, label_attention
from mtkit.model.network import build_stack
from mtkit.recipe import AttentionSettings, ModelSettings, Recipe, make_recipe

LAYERS = {"encoder": 3, "decoder": 2, "cross": 2}


def names(**settings: object) -> dict[str, list[str]]:
    chosen = choose(AttentionSettings.model_validate(settings), LAYERS)
    return {role: [choice.name for choice in choices] for role, choices in chosen.items()}


def test_a_name_fills_its_published_roles_only() -> None:
    assert names(name="band") == {"encoder": ["band"] * 3, "decoder": ["band"] * 2, "cross": ["full"] * 2}
    assert names(name="average")["encoder"] == ["full"] * 3


def test_a_role_can_be_set_alone_and_layer_by_layer() -> None:
    assert names(encoder=["band", "full", "full"], decoder="average") == {
        "encoder": ["band", "full", "full"],
        "decoder": ["average"] * 2,
        "cross": ["full"] * 2,
    }


def test_layers_count_inside_a_run_of_neighbours() -> None:
    settings = AttentionSettings(encoder=["full", "band", "band"])
    stack = build_stack("encoder", choose(settings, LAYERS)["encoder"], ModelSettings(), seed=1)
    assert [(each.site.layer, each.site.layers) for each in stack] == [(0, 1), (0, 2), (1, 2)]


def test_options_reach_the_roles_that_declare_them() -> None:
    settings = AttentionSettings(name="band", options={"window_radius": 5, "decoder.window_radius": 3})
    chosen = choose(settings, LAYERS)
    assert [chosen[role][0].options for role in LAYERS] == [{"window_radius": 5}, {"window_radius": 3}, {}]


@pytest.mark.parametrize("window", ["window_radius", "encoder.window_radius"])
def test_layers_of_other_mechanisms_in_a_role_go_without_its_options(window: str) -> None:
    chosen = choose(AttentionSettings(encoder=["full", "band", "full"], options={window: 5}), LAYERS)
    assert [choice.options for choice in chosen["encoder"]] == [{}, {"window_radius": 5}, {}]


@pytest.mark.parametrize(("option", "one", "all_"), [("window_radius", 3, 5), ("positions", "alibi", "rotary")])
def test_what_is_set_for_one_role_holds_there_in_any_order(option: str, one: object, all_: object) -> None:
    for given in ({f"decoder.{option}": one, option: all_}, {option: all_, f"decoder.{option}": one}):
        chosen = choose(AttentionSettings(name="band", options=given), LAYERS)
        assert [chosen[role][0].options.get(option) for role in LAYERS] == [all_, one, None]


def test_positions_across_are_for_who_names_that_role() -> None:
    chosen = choose(AttentionSettings(options={"positions": "rotary", "cross.positions": "shaw"}), LAYERS)
    assert [chosen[role][0].options["positions"] for role in LAYERS] == ["rotary", "rotary", "shaw"]


def test_the_number_of_tasks_reaches_those_that_are_conditioned_on_one_unless_the_recipe_sets_it() -> None:
    settings = AttentionSettings(name="camtl", options={"decoder.tasks": 5})
    chosen = choose(settings, LAYERS, tasks=3)
    assert [chosen[role][0].options for role in LAYERS] == [{"tasks": 3}, {"tasks": 5}, {}]
    assert choose(settings, LAYERS)["encoder"][0].options == {"tasks": 1}
    with pytest.raises(MtkitError, match="'camtl' has tasks = 5, and there are 6 directions"):
        choose(settings, LAYERS, tasks=6)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("positions", "there is no encoder or decoder attention to have an attention option 'positions'"),
        ("encoder.projection", "there is no encoder attention to have an attention option 'projection'"),
        ("decoder.window_radius", "there is no decoder attention to have an attention option 'window_radius'"),
        ("window_radius", "'full' has no attention option 'window_radius'"),
    ],
)
def test_where_a_role_has_no_layers_its_options_are_refused(option: str, words: str) -> None:
    with pytest.raises(MtkitError, match=words):
        choose(AttentionSettings(options={option: "rotary"}), {"encoder": 0, "decoder": 0, "cross": 1})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "bandd"}, ["bandd", "did you mean 'band'"]),
        ({"encoder": "average"}, ["average", "encoder", "decoder"]),
        ({"encoder": ["full"]}, ["attention.encoder", "1", "3 layers"]),
        ({"name": "band", "options": {"window_radus": 3}}, ["window_radus", "did you mean 'window_radius'"]),
        ({"options": {"decodr.positions": "rotary"}}, ["decodr", "did you mean 'decoder'"]),
        ({"name": "band", "options": {"encoder.global_tokens": 3}}, ["band", "global_tokens", "window_radius"]),
        (
            {"name": "band", "options": {"encoder.window_radius": 3, "encoder.positons": "rotary"}},
            ["'band' has no attention option 'positons'", "did you mean 'positions'"],
        ),
        ({"name": "band", "options": {"cross.window_radius": 3}}, ["'full' has no attention option 'window_radius'"]),
    ],
)
def test_mistakes_are_named(settings: dict, words: list[str]) -> None:
    with pytest.raises(MtkitError) as error:
        choose(AttentionSettings.model_validate(settings), LAYERS)
    for word in words:
        assert word in str(error.value)


def recipe(**attention: Any) -> Recipe:
    """A recipe with these attentions and the layers of `LAYERS`."""
    layers = {f"{role}_layers": LAYERS[role] for role in ("encoder", "decoder")}
    return make_recipe({"model": layers, "attention": attention})


def test_the_one_line_description_says_where_each_went() -> None:
    assert describe_attention(recipe(name="band")) == "encoder band, decoder band, cross full"
    mixed = recipe(encoder=["band", "full", "full"])
    assert describe_attention(mixed) == "encoder band x 1 + full x 2, decoder full, cross full"


def test_a_run_is_named_after_its_attentions() -> None:
    assert label_attention(recipe(name="band")) == "band"
    mixed = recipe(encoder=["band", "full", "full"], decoder="average")
    assert label_attention(mixed) == "band+full-average-full"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_radius": "wide"}, "window_radius = 'wide' must be a whole number from 0"),
        ({"decoder.window_radius": [3, True]}, "must be a whole number"),
        ({"positions": 42}, "positions = 42 must be a name"),
        ({"positions": {"name": "shaw", "clip": -1}}, "positions 'shaw': clip = -1 must be"),
        ({"cross.projection": True}, "projection = True must be a name"),
        ({"encoder.merge": "averaging"}, "no merge 'averaging'"),
    ],
)
def test_values_of_options_are_checked_before_anything_is_built(options: dict[str, object], message: str) -> None:
    with pytest.raises(MtkitError, match=message):
        names(name="band", options=options)
