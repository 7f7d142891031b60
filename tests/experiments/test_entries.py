from typing import Any

import pytest

from mtkit.attention import mechanisms
from mtkit.errors import MtkitError
from mtkit.experiments.entries import Entry, family, parse_entries, split, with_common_options
from mtkit.model.build import describe_attention
from mtkit.recipe import make_recipe


def settings(text: Any) -> Any:
    (entry,) = parse_entries([text])
    return entry.settings


def test_an_entry_is_mechanism_options_roles_and_settings() -> None:
    assert settings("full") == {"attention": {"name": "full"}}
    assert settings("band[window_radius=16]") == {"attention": {"name": "band", "options": {"window_radius": 16}}}
    assert settings("linear@encoder@cross") == {"attention": {"encoder": "linear", "cross": "linear"}}
    found = settings("reformer[hashes=2, decoder.hashes=4]@decoder+reversible+norm=pre+preset=small+peak_rate=3e-3")
    assert found == {
        "attention": {"decoder": "reformer", "options": {"hashes": 2, "decoder.hashes": 4}},
        "model": {"reversible": True, "norm": "pre"},
        "preset": "small",
        "training": {"peak_rate": 3e-3},
    }


def test_roles_that_are_not_named_are_full() -> None:
    recipe = make_recipe(settings("linear@encoder"))
    assert describe_attention(recipe) == "encoder linear, decoder full, cross full"
    assert (
        describe_attention(make_recipe(settings("longformer"))) == "encoder longformer, decoder longformer, cross full"
    )


def test_a_plus_before_a_kind_of_heads_is_no_setting() -> None:
    assert settings("full:2+band:2") == {"attention": {"name": "full:2+band:2"}}
    found = settings("full:2 + band:2[band.window_radius=16]@encoder+norm=post+heads=4")
    assert found == {
        "attention": {"encoder": "full:2+band:2", "options": {"band.window_radius": 16}},
        "model": {"norm": "post", "heads": 4},
    }
    entries = parse_entries(split("full:2+band:2,linear:1+full:3+reversible"))
    assert [entry.name for entry in entries] == ["full:2+band:2", "linear:1+full:3+reversible"]
    assert entries[1].settings["model"] == {"reversible": True}
    assert family(make_recipe(entries[0].settings)) == "heads"


def test_commas_in_brackets_do_not_split() -> None:
    assert split("full, band[window_radius=3,positions=rotary],linear@cross,") == [
        "full", "band[window_radius=3,positions=rotary]", "linear@cross",
    ]  # fmt: skip
    assert settings("band[dilations=[1, 2]]")["attention"]["options"] == {"dilations": [1, 2]}
    nearby = {"nearby": {"name": "convolution", "kernel": 9}}
    assert settings("full[nearby={name: convolution, kernel: 9}]")["attention"]["options"] == nearby


def test_a_mapping_sets_anything_and_has_a_name() -> None:
    written = {"name": "wide", "attention": "band", "model": {"d_model": 256}}
    assert parse_entries([written]) == [Entry("wide", {"attention": {"name": "band"}, "model": {"d_model": 256}})]
    (unnamed,) = parse_entries([{"entry": "band@encoder", "model": {"norm": "post"}}])
    assert unnamed == Entry("band@encoder norm=post", {"attention": {"encoder": "band"}, "model": {"norm": "post"}})


def test_all_are_every_mechanism_full_first_and_the_same_twice_is_one() -> None:
    found = [entry.name for entry in parse_entries(["all"])]
    assert found[0] == "full"
    assert sorted(found) == sorted(mechanisms())
    assert len(parse_entries(["full", "band", "full", "band[window_radius=3]"])) == 3


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("longfromer", "did you mean 'longformer'"),
        ("band@encodr", "did you mean 'encoder'"),
        ("full@foo", "no role 'foo'; the roles are encoder, decoder, cross"),
        ("linformer@decoder", "encoder"),
        ("band[window_radius]", "OPTION=VALUE"),
        ("band[", "cannot understand the entry 'band\\['"),
        ("band+nrom=post", "did you mean 'norm'"),
        ("band+name=x", "no setting 'name'"),
        ("full:2+band", "'full:2' must have two kinds or more"),
        ("full:2+bnd:2", "did you mean 'band'"),
        ("full:2+average:2", "attention 'average' is a whole layer"),
        ("band+dropout=[1", "not a YAML value"),
        ("band[window_radius=3,window_radius=5]", "sets window_radius twice"),
        ("full+norm=pre+model.norm=post", "sets model.norm twice"),
        ({"seed": 3}, "cannot set 'seed'"),
        ({"modle": {}}, "did you mean 'model'"),
        ({"name": 3}, "the name 3"),
        ({"name": "a\nb"}, r"the name 'a\\nb' of an entry has a line end or a control character"),
        ({"name": "\x1b[31mred"}, r"the name '\\x1b\[31mred' of an entry has a line end"),
        ([], "no entries"),
        ([{"name": "a", "preset": "tiny"}, {"name": "a", "preset": "small"}], "two entries have the name 'a'"),
    ],
)
def test_mistakes_are_named(written: Any, message: str) -> None:
    with pytest.raises(MtkitError, match=message) as raised:
        parse_entries(written if isinstance(written, list) else [written])
    assert "\n" not in str(raised.value)


def test_common_options_reach_those_that_have_them_and_do_not_set_them() -> None:
    entries = parse_entries(["full", "longformer", "longformer[window_radius=9]"])
    options = {"window_radius": 3, "positions": "rotary"}
    found = with_common_options(entries, {}, options, options)
    assert [entry.settings["attention"].get("options") for entry in found] == [
        {"positions": "rotary"}, options, {"window_radius": 9, "positions": "rotary"},
    ]  # fmt: skip
    assert [entry.name for entry in found] == ["full", "longformer", "longformer[window_radius=9]"]


def test_a_slot_is_left_out_for_what_is_its_filling() -> None:
    options = {"projection": "multi-query", "merge": "em-routing"}
    found = with_common_options(parse_entries(["full", "multi-query", "em-routing"]), {}, options)
    assert [entry.settings["attention"].get("options") for entry in found] == [
        options, {"merge": "em-routing"}, {"projection": "multi-query"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_radis": 3}, "did you mean 'window_radius'"),
        ({"decodr.window_radius": 3}, "did you mean 'decoder'"),
        ({"window_radius": -3}, "longformer': window_radius = -3 must be"),
    ],
)
def test_wrong_common_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MtkitError, match=message):
        with_common_options(parse_entries(["full", "longformer"]), {}, options, options)


def test_the_family_of_what_is_not_full() -> None:
    assert family(make_recipe(settings("linear@encoder"))) == "linear"
    assert family(make_recipe(settings("full"))) == "scoring"
    mixed = {"attention": {"encoder": "linear", "decoder": "band"}}
    assert family(make_recipe(mixed)) is None
