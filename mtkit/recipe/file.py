"""Find a recipe file by path or by the name of a shipped recipe, and read it."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mtkit.errors import RecipeError, cut_words, did_you_mean, shown
from mtkit.yaml_text import load_yaml

FOLDER = Path(__file__).parents[1] / "recipes"
"""Folder of the recipes that come with mtkit."""

LARGEST = 1_000_000
"""Maximum characters of a recipe."""

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def shipped_recipes() -> dict[str, Path]:
    """Return the paths of the recipes that come with mtkit, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stem)}


def shipped_recipe(name: str) -> Path:
    """Return the path of a recipe that comes with mtkit. Raises: RecipeError with the nearest name if it is unknown."""
    paths = shipped_recipes()
    if name not in paths:
        raise RecipeError(
            f"no recipe {shown(name)} comes with mtkit{did_you_mean(name, list(paths))}; there are: {', '.join(paths)}"
        )
    return paths[name]


def find_recipe(path: Path) -> Path:
    """Return `path`, or the shipped recipe of this name if `path` is a plain name and no such file exists.

    Raises: RecipeError if no shipped recipe has this name.
    """
    plain = path.name == str(path) and not path.suffix
    return shipped_recipe(path.name) if plain and not path.is_file() else path


def read_text(path: Path) -> str:
    """Read a recipe file. Raises: RecipeError if it cannot be read, is larger than LARGEST, or is not UTF-8."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise RecipeError(f"cannot read recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not a YAML recipe: its bytes are not UTF-8") from error
    if len(text) > LARGEST:
        raise RecipeError(f"{path}: larger than a recipe may be ({LARGEST:,} characters); give another file")
    return text


def read_settings(path: Path) -> dict[str, Any]:
    """Read the nested settings in a YAML file, without any check of their values.

    Raises: RecipeError with the file, and the line if it is known.
    """
    try:
        given = load_yaml(read_text(path))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "bad text"
        raise RecipeError(f"{where}: not a YAML recipe: {cut_words(problem)}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of settings, as in `training: {{max_updates: 1000}}`")
    return given


def with_variables(settings: Mapping[str, Any], origin: Path) -> dict[str, Any]:
    """Return the settings with environment variables ($MTKIT_DATA or ${MTKIT_DATA}) expanded in the paths of `data`.

    Column names are not expanded: they may contain a dollar. Raises: RecipeError for a variable that is not set.
    """

    def filled(name: str) -> str:
        if not os.environ.get(name):
            raise RecipeError(
                f"{origin}: the environment variable {name} is not set; the recipe's first lines describe the "
                f"corpora in its folder; set it first, as in `export {name}=~/corpora`"
            )
        return os.environ[name]

    return {**settings, "data": _filled(settings["data"], filled)} if "data" in settings else dict(settings)


def _filled(given: Any, value_of: Callable[[str], str]) -> Any:
    if isinstance(given, str):
        return _VARIABLE.sub(lambda match: value_of(match[1] or match[2]), given)
    if isinstance(given, list):
        return [_filled(each, value_of) for each in given]
    if isinstance(given, dict):
        columns = ("source", "target", "documents") if "file" in given or "dataset" in given else ()
        return {key: each if key in columns else _filled(each, value_of) for key, each in given.items()}
    return given
