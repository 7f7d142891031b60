"""A recipe's file: found by its path, or by the name of one that comes with mtkit, and read."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mtkit.errors import RecipeError, cut_words, did_you_mean, shown
from mtkit.yaml_text import load_yaml

FOLDER = Path(__file__).parents[1] / "recipes"
"""The recipes that come with mtkit."""

LARGEST = 1_000_000
"""Characters of a recipe, at most."""

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with mtkit, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"), key=lambda path: path.stem)}


def shipped_recipe(name: str) -> Path:
    """The recipe of this name that comes with mtkit. Raises: RecipeError where there is none; it names the nearest."""
    known = shipped_recipes()
    if name not in known:
        raise RecipeError(
            f"no recipe {shown(name)} comes with mtkit{did_you_mean(name, list(known))}; there are: {', '.join(known)}"
        )
    return known[name]


def find_recipe(path: Path) -> Path:
    """`path`, or, where no such file is there and it is a plain name, the recipe of that name that comes with mtkit.

    Raises: RecipeError for a plain name that is neither.
    """
    plain = path.name == str(path) and not path.suffix
    return shipped_recipe(path.name) if plain and not path.is_file() else path


def read_text(path: Path) -> str:
    """What stands in the file. Raises: RecipeError where it cannot be read, is larger than LARGEST, or is no text."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise RecipeError(f"cannot read recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not a YAML recipe: its bytes are not UTF-8") from error
    if len(text) > LARGEST:
        raise RecipeError(f"{path}: larger than a recipe can be ({LARGEST:,} characters); give another file")
    return text


def read_settings(path: Path) -> dict[str, Any]:
    """The nested settings in a YAML file, as they stand there.

    Raises: RecipeError naming the file, and the line where there is one.
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
    """The settings with environment variables, as $MTKIT_DATA or ${MTKIT_DATA}, filled in where `data` names paths.

    Names of columns stay as they are: a dollar may be part of them. Raises: RecipeError for a variable that is not set.
    """

    def filled(name: str) -> str:
        if not os.environ.get(name):
            raise RecipeError(
                f"{origin}: the environment variable {name} is not set; it names the folder of the corpora that the "
                f"recipe's first lines describe: set it first, as in `export {name}=~/corpora`"
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
