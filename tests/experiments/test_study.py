from pathlib import Path
from typing import Any

import pytest

from mtkit.errors import MtkitError
from mtkit.experiments.entries import Entry
from mtkit.experiments.study import at_share, check_limits, make_study, with_point

TWO = {"entries": ["full", "band"]}


def test_settings_of_file_and_recipe_stay_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOWHERE", "/there")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "preset: small\nseed: 7\npromises: []\nattention: {name: luna, options: {window_radius: 5}}\n"
        "data: {train: {source: $NOWHERE/a, target: b}, valid: {source: c, target: d}}\ntraining: {max_updates: 9}\n"
    )
    study = make_study({"recipe": str(recipe), "settings": {"training": {"peak_rate": 1e-3}}, "entries": ["band"]})
    assert study.base["training"] == {"max_updates": 9, "peak_rate": 1e-3}
    assert study.base["data"]["train"]["source"] == "$NOWHERE/a"
    assert not {"attention", "promises", "seed"} & set(study.base)
    assert study.seeds == (7,)
    assert study.entries[0].settings["attention"] == {"name": "band", "options": {"window_radius": 5}}


def test_environment_variables_are_read_when_they_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": {"source": "$CORPORA/a", "target": "b"}, "valid": {"source": "c", "target": "d"}}
    monkeypatch.setenv("CORPORA", "/there")
    study = make_study({"settings": {"data": data}, **TWO})
    assert study.recipe(study.entries[0]).data.train[0].source == "/there/a"
    monkeypatch.delenv("CORPORA")
    with pytest.raises(MtkitError, match="CORPORA is not set"):
        study.recipe(study.entries[0])


def test_a_written_limit_replaces_the_presets() -> None:
    limits = [
        make_study({**TWO, "settings": {"training": training}}).recipe(Entry("full")).training.limits
        for training in ({"max_tokens": 500}, {"max_tokens": 500, "max_updates": 9}, {})
    ]
    assert limits == [{"max_tokens": 500}, {"max_tokens": 500, "max_updates": 9}, {"max_updates": 1000}]


def test_seeds_are_a_number_or_a_list() -> None:
    assert make_study({**TWO, "seeds": 3}).seeds == (1, 2, 3)
    assert make_study({**TWO, "seeds": [5, 1]}).seeds == (5, 1)
    assert make_study({**TWO, "settings": {"seed": 4}, "seeds": 1}).seeds == (1,)


def test_a_grid_has_every_combination() -> None:
    search = {"settings": {"peak_rate": [1e-3, 2e-3], "optimizer": ["adamw", "muon"]}}
    found = make_study({**TWO, "search": search}).settings.search
    assert found is not None
    assert found.grid() == [
        {"training.peak_rate": 1e-3, "training.optimizer": "adamw"},
        {"training.peak_rate": 1e-3, "training.optimizer": "muon"},
        {"training.peak_rate": 2e-3, "training.optimizer": "adamw"},
        {"training.peak_rate": 2e-3, "training.optimizer": "muon"},
    ]
    assert with_point({"training": {"clip_norm": 1.0}}, found.grid()[0])["training"] == {
        "clip_norm": 1.0, "peak_rate": 1e-3, "optimizer": "adamw",
    }  # fmt: skip


def test_a_share_of_the_budget_is_of_every_limit() -> None:
    training = {"max_updates": 9, "max_minutes": 3.0, "max_epochs": None, "peak_rate": 1.0}
    assert at_share(training, 0.25) == {"max_updates": 2, "max_minutes": 0.75}
    assert at_share({"max_updates": 1}, 0.1) == {"max_updates": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entires": ["full"]}, "did you mean 'entries'"),
        ({"attention": ["full"]}, "unknown setting 'attention' of a study; there are: recipe, settings, "),
        ({**TWO, "seeds": 0}, "seeds"),
        ({**TWO, "seeds": [1, 1]}, "a seed twice"),
        ({**TWO, "match": "size"}, "match"),
        ({**TWO, "settings": {"trainig": {}}}, "did you mean 'training'"),
        ({**TWO, "settings": {"training": {"peak_rate": -1}}}, "peak_rate"),
        ({"entries": ["full+norm=past"]}, "the entry full\\+norm=past: .*norm"),
        ({**TWO, "search": {"settings": {"peak_rat": [1]}}}, "did you mean 'peak_rate'"),
        ({**TWO, "search": {"settings": {"peak_rate": [-1]}}}, "peak_rate"),
        ({**TWO, "search": {"settings": {"peak_rate": []}}}, "peak_rate"),
        ({**TWO, "search": {"settings": {}}}, "settings"),
        ({**TWO, "search": {"settings": {"peak_rate": {"low": 1e-4, "high": 1e-2}}}}, "grid needs a list"),
        ({**TWO, "search": {"settings": {"peak_rate": [1]}, "trials": 3}}, "every combination"),
        ({**TWO, "search": {"settings": {"peak_rate": [1]}, "method": "random"}}, "needs trials"),
        (
            {**TWO, "search": {"settings": {"peak_rate": {"low": 2, "high": 1}}, "method": "random", "trials": 1}},
            "below",
        ),
        ({**TWO, "search": {"settings": {"peak_rate": [1]}, "share": 0}}, "share"),
        ({}, "no entries"),
        ({**TWO, "search": {"settings": {"peak_rate": [1e-3], "training.peak_rate": [2e-3]}}}, "peak_rate twice"),
        ({**TWO, "search": {"settings": {"peak_rate": [1e-3, 2e-3, 1e-3]}}}, "a value twice"),
        ({**TWO, "search": {"settings": {"seed": [1, 2]}}}, "same seeds"),
        ({**TWO, "search": {"settings": {"peak_rate": [1]}, "trails": 3}}, "'search.trails'.*'trials'"),
        ({**TWO, "search": {"settings": {"peak_rate": {"low": 1, "top": 2}}}}, "high is missing"),
        ({**TWO, "search": {"settings": {"attention.options.window_radius": [3]}}}, "the entry full: .*window_radius"),
        ({"entries": ["full+d_model=36"], "search": {"settings": {"heads": [4, 8]}}}, "entry full.d_model=36: .*heads"),
        (
            {**TWO, "search": {"settings": {"peak_rate": 3}}},
            "settings.training.peak_rate = 3: should be a list$",
        ),
        ({**TWO, "search": {"settings": {"peak_rate": []}}}, "search.settings.training.peak_rate = ..: is empty$"),
        ({"entries": 3}, "entries = 3: should be a list$"),
        ({"entries": [3]}, "entries.0 = 3: should be a valid string"),
        ({**TWO, "settings": {"attention": {"options": 3}}}, "attention.options = 3: should be a mapping"),
        ({**TWO, "settings": {"seed": "x"}}, "seeds.0 = 'x'"),
        ({**TWO, "settings": {"seed": -1}}, "seeds.0 = -1"),
        ({"entries": ["full+seed=3"]}, "'full\\+seed=3': all entries have the same seeds"),
        ({**TWO, "search": {"settings": {"dropout": [0, 0.0]}}}, "a value twice"),
        (
            {**TWO, "search": {"settings": {"dropout": {"low": 10**400, "high": 1}}, "method": "random", "trials": 1}},
            "low = 1000.* must be below high = 1",
        ),
        ({**TWO, "match": "flops", "search": {"settings": {"d_model": [32, 64]}}}, "leave model.d_model out"),
        (
            {"entries": [{"name": "x", "attention": ["band"]}], "settings": {"attention": {"options": {"a": 1}}}},
            "attention",
        ),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MtkitError, match=message) as raised:
        make_study(settings)
    assert "\n" not in str(raised.value)


def test_a_training_without_a_limit_is_refused() -> None:
    check_limits(make_study({**TWO, "settings": {"training": {"max_updates": 1}}}))
    with pytest.raises(MtkitError, match="no limit; give --max-updates"):
        check_limits(make_study({**TWO, "settings": {"training": {"max_updates": None, "patience": None}}}))
