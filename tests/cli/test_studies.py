"""`mtkit studies`, as typed."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.errors import RecipeError
from mtkit.experiments.study import make_study, read_study
from mtkit.recipe.file import STUDIES, shipped


def typed(*arguments: str) -> str:
    return CliRunner().invoke(app, ["studies", *arguments], catch_exceptions=False).stdout


def test_every_study_is_listed_valid_and_fits_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTKIT_DATA", "/there")
    listed = typed()
    schema = json.loads(typed("schema"))
    assert shipped(STUDIES)
    for name in shipped(STUDIES):
        assert name in listed
        text = typed("show", name)
        assert text == (STUDIES / f"{name}.yaml").read_text()
        jsonschema.validate(yaml.safe_load(text), schema)
        settings, origin = read_study(Path(name))
        assert len(make_study(settings, origin=origin).entries) > 1
        assert f"mtkit compare --study {name}" in text


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="no study 'prebes' comes with mtkit \\(did you mean 'probes'"):
        typed("show", "prebes")
