"""The settings that a training takes over from the run that it begins with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtkit.recipe.file import read_settings
from mtkit.recipe.settings import run_folder_of

ROLES = ("name", "encoder", "decoder", "cross")


def with_beginning(given: Mapping[str, Any], begun: Path | None = None) -> dict[str, Any]:
    """Nested settings over those of the run that `training.init_from` names, as far as they are taken over.

    A training that goes on in the folder `begun` has taken them over: it needs the other run no more.
    The model is, unless a preset is named: otherwise the weights would not fit. The attentions are where none is named.
    Without such a run the settings stay as they are.
    """
    settings, training = dict(given), given.get("training")
    named = training.get("init_from") if isinstance(training, Mapping) else None
    path = (begun or run_folder_of(Path(str(named)))) / "recipe.yaml"
    if named is None or not path.is_file():
        return settings  # said where the run is opened
    model, attention = given.get("model") or {}, given.get("attention") or {}
    options: Any = attention.get("options", {}) if isinstance(attention, Mapping) else None
    if not all(isinstance(each, Mapping) for each in (model, attention, options)):
        return settings  # said where settings are checked
    theirs = read_settings(path)
    if "preset" not in given:
        settings["model"] = {**theirs.get("model", {}), **model}
    if all(attention.get(role) is None for role in ROLES):
        options = {**theirs.get("attention", {}).get("options", {}), **options}
        settings["attention"] = {**theirs.get("attention", {}), "options": options}
    return settings
