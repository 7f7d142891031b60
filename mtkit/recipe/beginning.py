"""Settings that a new run inherits from the run in `training.init_from`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtkit.recipe.file import read_settings
from mtkit.recipe.settings import run_folder_of

ROLES = ("name", "encoder", "decoder", "cross")


def with_beginning(given: Mapping[str, Any], begun: Path | None = None) -> dict[str, Any]:
    """Merge nested settings with the settings that they inherit from the run in `training.init_from`.

    A run that resumes in the folder `begun` reads them from its own recipe.yaml and does not need the other run.
    The model is inherited unless a preset is set, because otherwise the weights would not fit. The attention is
    inherited if no mechanism is set. If there is no such run, the settings do not change.
    """
    settings, training = dict(given), given.get("training")
    run_name = training.get("init_from") if isinstance(training, Mapping) else None
    path = (begun or run_folder_of(Path(str(run_name)))) / "recipe.yaml"
    if run_name is None or not path.is_file():
        return settings  # the caller raises when it opens the run
    model, attention = given.get("model") or {}, given.get("attention") or {}
    options: Any = attention.get("options", {}) if isinstance(attention, Mapping) else None
    if not all(isinstance(section, Mapping) for section in (model, attention, options)):
        return settings  # make_recipe raises
    inherited = read_settings(path)
    if "preset" not in given:
        settings["model"] = {**inherited.get("model", {}), **model}
    if all(attention.get(role) is None for role in ROLES):
        options = {**inherited.get("attention", {}).get("options", {}), **options}
        settings["attention"] = {**inherited.get("attention", {}), "options": options}
    return settings
