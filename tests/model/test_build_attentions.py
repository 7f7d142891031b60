"""From a recipe's words to which mechanism stands in which layer."""

from typing import Any

import pytest
import torch

from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.kernels.pattern import Band
from mtkit.attention.sparse.band import BandAttention
from mtkit.errors import MtkitError
from mtkit.model.build import build_model, choose, describe_attention, label_attention
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


@pytest.mark.parametrize(
    ("options", "radius"),
    [
        ({"window_radius": 3}, (3, 3)),
        ({"band.window_radius": 4, "window_radius": 3}, (4, 4)),
        ({"decoder.window_radius": 5, "window_radius": 3}, (3, 5)),
        ({"decoder.band.window_radius": 6, "band.window_radius": 4}, (4, 6)),
    ],
)
def test_options_of_one_kind_of_heads(options: dict[str, object], radius: tuple[int, int]) -> None:
    recipe = make_recipe({"attention": {"name": "full:2+band:2", "options": options}})
    model = build_model(recipe, source_vocabulary=9, target_vocabulary=9)
    for role, expected in zip(("encoder", "decoder"), radius, strict=True):
        bands = [one for _, one in model.attentions() if one.site.role == role and isinstance(one, BandAttention)]
        assert len(bands) == 2
        assert all(band.groups[0].pattern == Band(expected, expected) for band in bands)


def test_slots_of_one_kind_of_heads_and_of_all() -> None:
    options = {"full.positions": "rotary", "band.merge": "gated", "projection": "multi-query"}
    recipe = make_recipe({"attention": {"encoder": "full:2+band:2", "options": options}})
    model = build_model(recipe, source_vocabulary=9, target_vocabulary=9)
    parts = [one for _, one in model.attentions() if one.site.role == "encoder" and isinstance(one, HeadAttention)]
    assert [part.positions is None for part in parts] == [False, True] * 2
    assert [part.merge is None for part in parts] == [True, False] * 2
    assert [part.projection.key_heads for part in parts] == [1] * 4


def test_a_mix_with_other_heads_than_the_model_is_refused_before_it_is_built() -> None:
    with pytest.raises(MtkitError, match=r"'full:4\+band:4' has 8 heads, and the model 4"):
        label_attention(make_recipe({"attention": {"name": "full:4+band:4"}}))
    recipe = make_recipe({"attention": {"name": "full:4 + band:4"}, "model": {"heads": 8}})
    assert label_attention(recipe) == "full-4+band-4"
    assert describe_attention(recipe) == "encoder full:4+band:4, decoder full:4+band:4, cross full"


def test_weights_pass_between_full_and_a_mix() -> None:
    full, mix, back = (
        build_model(make_recipe({"attention": {"name": name}, "seed": seed}), source_vocabulary=9, target_vocabulary=9)
        for seed, name in enumerate(("full", "full:1+full:3", "full"))
    )
    assert mix.adopt(full.state_dict()).unfit == []
    source, target = torch.tensor([[4, 5, 6, 2]]), torch.tensor([[1, 5, 7]])
    with torch.no_grad():
        hidden = [model.eval().decode(model.encode(source), target, None).hidden for model in (full, mix)]
    torch.testing.assert_close(hidden[0], hidden[1], atol=1e-5, rtol=1e-5)
    assert back.adopt(mix.state_dict()).unfit == []
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in full.state_dict().items())


def test_weights_of_a_slot_that_the_other_attention_does_not_have_are_listed() -> None:
    settings: list[dict[str, Any]] = [{"options": {"nearby": "convolution"}}, {}, {"name": "nystrom"}]
    first, without, within = (
        build_model(make_recipe({"attention": each}), source_vocabulary=9, target_vocabulary=9) for each in settings
    )
    assert without.adopt(first.state_dict()).unfit == [f"encoder.{layer}.attention.nearby.weight" for layer in (0, 1)]
    assert within.adopt(first.state_dict()).unfit == []


def test_a_slot_that_cannot_play_a_role_is_refused_before_anything_is_built() -> None:
    for options in ({"decoder.nearby": "convolution"}, {"cross.nearby": "convolution"}):
        with pytest.raises(MtkitError, match="nearby 'convolution' cannot play the role"):
            label_attention(make_recipe({"attention": {"options": options}}))
    mix = {"name": "full:2+band:2", "options": {"decoder.band.nearby": "convolution"}}
    with pytest.raises(MtkitError, match="nearby 'convolution' cannot play the role 'decoder'"):
        label_attention(make_recipe({"attention": mix}))


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
    with pytest.raises(MtkitError, match=words) as raised:
        choose(AttentionSettings(options={option: "rotary"}), {"encoder": 0, "decoder": 0, "cross": 1})
    assert f"did you mean '{option.rpartition('.')[2]}'" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "bandd"}, ["bandd", "did you mean 'band'"]),
        ({"encoder": "average"}, ["average", "encoder", "decoder"]),
        ({"encoder": ["full"]}, ["attention.encoder", "1", "3 layers"]),
        ({"name": "band", "options": {"window_radus": 3}}, ["window_radus", "did you mean 'window_radius'"]),
        ({"options": {"decodr.positions": "rotary"}}, ["decodr", "did you mean 'decoder'"]),
        ({"options": {"foo.positions": "rotary"}}, ["foo.positions", "there are: encoder, decoder, cross"]),
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
