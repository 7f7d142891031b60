"""Recipes: presets, overrides, errors, and settings inherited from another run."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtkit.errors import RecipeError
from mtkit.recipe import differences, load_recipe, make_recipe, overridden
from mtkit.text.languages import languages_of


def test_command_line_wins_over_file_over_preset(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("preset: small\nmodel: {feed_forward: 333}\ntraining: {max_updates: 7}\n")
    recipe = load_recipe(path, {"training": {"max_updates": 9}})
    assert recipe.training.max_updates == 9
    assert recipe.model.feed_forward == 333
    assert recipe.model.d_model == 256  # the preset's, not the default


PAIR = {"source": "a", "target": "b"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({1: 1}, ["unknown setting '1'"]),
        ({"trainig": {}}, ["trainig", "did you mean 'training'"]),
        ({"training": {"max_update": 3}}, ["training.max_update", "max_updates"]),
        ({"data": {"tokenizer": {"vocab": 3}}}, ["data.tokenizer.vocab"]),
        ({"data": {"vocabulary": 400}}, ["data.vocabulary' (did you mean 'data.tokenizer.vocabulary'"]),
        ({"seed": -1}, ["seed = -1", "greater than or equal to 0"]),
        ({"training": {"ema": False}}, ["training.ema = False", "should not be true or false"]),
        ({"seed": 2**63}, ["seed = 9223372036854775808", "less than"]),
        ({"decoding": {"seed": -1}}, ["decoding.seed = -1"]),
        ({"data": {"builtin": {"seed": 10**30}}}, ["data.builtin.seed"]),
        ({"data": {"builtin": {"sentences": 99999999999}}}, ["data.builtin.sentences", "less than or equal to 1000"]),
        ({"data": {"tokenizer": {"vocabulary": 10**9}}}, ["data.tokenizer.vocabulary"]),
        ({"training": {"betas": [0.9, 1.0]}}, ["training.betas.1 = 1.0", "less than 1"]),
        ({"training": {"betas": [-0.1, 0.9]}}, ["training.betas.0 = -0.1"]),
        ({"training": {"max_updates": 10**30}}, ["training.max_updates"]),
        ({"training": {"max_minutes": 1e300}}, ["training.max_minutes"]),
        ({"training": {"peak_rate": float("inf")}}, ["training.peak_rate"]),
        ({"decoding": {"beam": 1_000_000}}, ["decoding.beam = 1000000", "less than or equal to 1000"]),
        ({"training": {"peak_rate": -1}}, ["training.peak_rate = -1", "greater than"]),
        ({"training": {"eps": 5e-324}}, ["training.eps = 5e-324", "greater than"]),
        ({"model": {"encoder_layers": 10**9}}, ["model.encoder_layers = 1000000000", "less than or equal to 10000"]),
        ({"model": {"heads": 3}}, ["model.heads = 3", "model.d_model = 128"]),
        ({"model": {"position_width": 128}}, ["model.position_width = 128", "less than model.d_model = 128"]),
        ({"model": {"position_width": -1}}, ["model.position_width = -1"]),
        ({"model": {"position_width": 8, "positions": "none"}}, ["model.positions = none has no positions"]),
        ({"model": {"position_width": 8, "architecture": "rnn"}}, ["the rnn has no positions"]),
        ({"model": {"sentence_positions": True, "positions": "none"}}, ["model.positions = none has no absolute"]),
        ({"model": {"position_width": 8, "tie": "all"}}, ["model.tie = all", "set model.tie = none"]),
        ({"preset": "smal"}, ["smal", "did you mean 'small'"]),
        ({"decoding": {"n_best": 9}}, ["n_best = 9"]),
        ({"decoding": {"method": "greedy", "mbr": "chrf"}}, ["several hypotheses"]),
        ({"decoding": {"method": "sample", "samples": 9}}, ["decoding.samples needs decoding.mbr"]),
        ({"decoding": {"method": "sample", "samples": 9, "mbr": "bleu", "n_best": 10}}, ["n_best = 10"]),
        ({"decoding": {"mbr": "ter"}}, ["'chrf' or 'bleu'"]),
        ({"data": {"train": {"source": "a", "target": "b"}}}, ["data.valid"]),
        (
            {"data": {"train": {"source": "a", "target": "b", "split": "test"}}},
            ["split of a corpus applies to data sets only"],
        ),
        (
            {"data": {"train": {"source": "a.tmx.gz", "target": "a.tmx.gz"}, "valid": PAIR}},
            ["a.tmx.gz is the file of both sides", "{file: a.tmx.gz, source: en, target: ja}"],
        ),
        ({"data": {"train": PAIR, "valid": {**PAIR, "weight": 2}}}, ["the valid side has a weight"]),
        (
            {"data": {"train": PAIR, "valid": PAIR, "test": {"new": {**PAIR, "weight": 2}}}},
            ["the new side has a weight"],
        ),
        ({"data": {"train": PAIR, "valid": PAIR, "test": {"a.reference": PAIR}}}, ["a.reference", "another name"]),
        ({"data": {"train": PAIR, "valid": PAIR, "test": {"テスト": PAIR}}}, ["'テスト' names files; use ASCII"]),
        ({"data": {"train": PAIR, "valid": PAIR, "test": {"news": []}}}, ["the test side news has no text"]),
        ({"data": {"train": PAIR, "valid": PAIR, "test": []}}, ["has no text; leave it out of data.test"]),
        ({"model": {"architecture": "rnn", "activation_dropout": 0.1}}, ["model.activation_dropout; leave it out"]),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(given: dict, words: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        make_recipe(given)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_file_that_is_no_recipe_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("preset: small\nmodel: [1, 2\n")
    with pytest.raises(RecipeError, match=r"broken\.yaml, line"):
        load_recipe(path)
    path.write_text("- a\n- b\n")
    with pytest.raises(RecipeError, match="mapping"):
        load_recipe(path)
    with pytest.raises(RecipeError, match="cannot read"):
        load_recipe(tmp_path / "missing.yaml")


def test_differences_name_each_setting_once() -> None:
    one, other = make_recipe({}), make_recipe({"seed": 2, "training": {"peak_rate": 0.5}})
    assert differences(one.model_dump(), other.model_dump()) == ["seed: 1 -> 2", "training.peak_rate: 0.0015 -> 0.5"]
    assert differences(one.model_dump(), make_recipe({}).model_dump()) == []


def test_numbers_of_numpy_are_numbers_in_options_too() -> None:
    given = {"window_radius": np.int64(5), "decoder.window_radius": [np.int64(5), 6]}
    recipe = make_recipe({"attention": {"name": "band", "options": given}, "model": {"heads": np.int64(2)}})
    assert make_recipe(json.loads(json.dumps(recipe.model_dump(mode="json")))) == recipe
    assert recipe.attention.options == {"window_radius": 5, "decoder.window_radius": [5, 6]}
    assert type(recipe.attention.options["window_radius"]) is int


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("data: corpus", {"data": {"tokenizer": {"vocabulary": 400}}}),
        ("data: corpus", {"data": {}}),
        ("data: {tokenizer: bpe}", {"data": {"tokenizer": {"vocabulary": 400}}}),
        ("training: [max_updates, 3]", {"training": {"max_updates": 1}}),
        ("attention: {options: 3}", {"attention": {"options": {}}}),
    ],
)
def test_a_group_of_a_wrong_type_is_not_dropped_for_an_option(
    tmp_path: Path, text: str, overrides: dict[str, Any]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as alone:
        load_recipe(path)
    with pytest.raises(RecipeError, match=re.escape(str(alone.value))):
        load_recipe(path, overrides)


def test_a_region_of_the_source_language_is_no_target_language() -> None:
    data = make_recipe({"data": {"source_language": "zh-cn", "target_language": "en"}}).data
    assert data.directions == ["zh-CN-en"]
    assert make_recipe({"data": {"source_language": "zh-Hans"}}).data.source_language == "zh-Hans"


@pytest.mark.parametrize(
    ("language", "direction"), [("KO-KR", "en-ko-KR"), ("ko-KR", "en-ko-KR"), ("KO", "en-KO"), ("Korean", "en-Korean")]
)
def test_a_target_language_in_capitals_is_no_region_of_the_source(language: str, direction: str) -> None:
    data = make_recipe({"data": {"target_language": language}}).data
    assert data.directions == [direction]
    assert languages_of(direction)[0] == "en"


@pytest.mark.parametrize("direction", ["th_zh", "en-", "-de", ""])
def test_a_direction_has_two_languages(direction: str) -> None:
    with pytest.raises(RecipeError, match=f"write a direction as en-de, not '{direction}'"):
        make_recipe({"data": {"train": {**PAIR, "direction": direction}, "valid": {**PAIR, "direction": direction}}})


@pytest.mark.parametrize(
    "data",
    [
        {"source_language": "../en"},
        {"target_language": "de/AT"},
        {"train": {**PAIR, "direction": "en-de/AT"}, "valid": {**PAIR, "direction": "en-de/AT"}},
    ],
    ids=["source", "target", "direction"],
)
def test_a_language_is_no_path(data: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=": write it without '/', as zh-CN") as raised:
        make_recipe({"data": data})
    assert "\n" not in str(raised.value)


def test_the_direction_without_training_text_is_that_of_the_languages() -> None:
    data = make_recipe({"data": {"source_language": "de", "target_language": "fr"}}).data
    assert data.directions == ["de-fr"]


@pytest.mark.parametrize("side", ["valid", "new"])
def test_the_directions_of_held_out_sides_are_those_of_the_training_text(side: str) -> None:
    data = {"train": PAIR, "valid": PAIR, "test": {"new": PAIR}}
    other = {**PAIR, "direction": "en-fr"}
    data |= {"valid": other} if side == "valid" else {"test": {"old": PAIR, "new": other}}
    with pytest.raises(RecipeError, match=f"the {side} side has the direction en-fr, which is not among .*en-de"):
        make_recipe({"data": data})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attention": "longformer"}, "attention = 'longformer'"),
        ({"model": "transformer"}, "model = 'transformer'"),
        ({"attention": {"options": "rotary"}}, "attention.options = 'rotary'"),
        ({"attention": ["band"]}, "attention = "),
    ],
)
def test_a_word_in_place_of_a_group_is_named(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    """As it is without such a run."""
    (tmp_path / "recipe.yaml").write_text("model: {d_model: 64}\nattention: {name: band}\n")
    (tmp_path / "run.json").write_text("{}")
    assert load_recipe(None, {"training": {"init_from": str(tmp_path)}}).model.d_model == 64
    with pytest.raises(RecipeError) as alone:
        load_recipe(None, given)
    assert words in str(alone.value)
    with pytest.raises(RecipeError) as begun:
        load_recipe(None, {"training": {"init_from": str(tmp_path)}, **given})
    assert str(begun.value) == str(alone.value)


@pytest.mark.parametrize(
    "damaged", ["model: null", "model: 5", "attention: [1]", "attention: null", "attention: {options: null}"]
)
def test_a_run_with_damaged_settings_is_named(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"{damaged}\n")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"recipe\.yaml is damaged: .* should be a mapping"):
        load_recipe(None, {"training": {"init_from": str(tmp_path)}})


@pytest.mark.parametrize(
    ("given", "attention"),
    [
        ({}, {"name": "band", "options": {"window_radius": 3, "positions": "rotary"}}),
        ({"options": {"window_radius": 5}}, {"name": "band", "options": {"window_radius": 5, "positions": "rotary"}}),
        ({"encoder": "full"}, {"name": None, "encoder": "full", "options": {}}),
    ],
)
def test_options_lie_over_those_of_the_run_unless_a_mechanism_is_named(
    given: dict[str, Any], attention: dict[str, Any], tmp_path: Path
) -> None:
    options = "options: {window_radius: 3, positions: rotary}"
    (tmp_path / "recipe.yaml").write_text(f"attention: {{name: band, {options}}}\n")
    (tmp_path / "run.json").write_text("{}")
    found = load_recipe(None, {"training": {"init_from": str(tmp_path)}, "attention": given}).attention
    assert {name: getattr(found, name) for name in attention} == attention


@pytest.mark.parametrize(
    ("below", "name", "options"),
    [
        ({"name": "group"}, "full", {}),
        ({"name": "group"}, "group", {"gate_bias": 2.0}),
        ({"encoder": "group", "cross": "band"}, "group", {"gate_bias": 2.0}),
        ({"encoder": "group"}, "linear", {}),
        ({}, "group", {"gate_bias": 2.0}),
        ({"name": "group"}, None, {"gate_bias": 2.0}),
    ],
)
def test_another_mechanism_does_not_get_the_options_of_the_recipes(
    below: dict[str, str], name: str | None, options: dict[str, float]
) -> None:
    recipe = {"attention": {**below, "options": {"gate_bias": 2.0}}}
    roles = {} if name is None else {"name": name, "encoder": None, "decoder": None, "cross": None}
    assert make_recipe(overridden(recipe, {"attention": roles})).attention.options == options
    both = make_recipe(overridden(recipe, {"attention": {**roles, "options": {"window_radius": 3}}}))
    assert both.attention.options == {**options, "window_radius": 3}
