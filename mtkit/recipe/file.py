"""Recipe files: their YAML, the comment at their head, and their promises.

# Multi30k English-German: captions of photographs             the first line is the description
#
#     mtkit recipes check multi30k-en-de
#
# reached: BLEU 37.42 on flickr2016 after 20 minutes on 2 CPU cores (nrefs:1|...)

promises:                                       # bounds on scores of test sides, after the minutes of training if given
  - BLEU >= 37 on flickr2016 after 20 minutes
  - TER <= 45 on flickr2016 after 75 minutes
"""

import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field

from mtkit.errors import RecipeError, cut_words, did_you_mean, reason, shown
from mtkit.storage.yaml_text import load_yaml

FOLDER = Path(__file__).parents[1] / "recipes"
"""Folder of the recipes that come with mtkit."""

STUDIES = FOLDER.with_name("studies")
"""Folder of the studies that come with mtkit (`mtkit.experiments.study`)."""

LARGEST = 1_000_000
"""Maximum characters of a recipe."""

_PIPES: dict[tuple[int, int], str] = {}
"""The texts of pipes, by device and inode."""

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


def shipped(folder: Path | None = None) -> dict[str, Path]:
    """Return the paths of the recipes that come with mtkit, or of the studies in STUDIES, by name."""
    return {path.stem: path for path in sorted((folder or FOLDER).glob("*.yaml"), key=lambda path: path.stem)}


def find_recipe(path: Path, folder: Path | None = None) -> Path:
    """Return `path`, or the shipped recipe of this name if `path` is a plain name and no such file exists.

    In STUDIES, it finds studies. Raises: RecipeError, with the nearest name, if none has this name.
    """
    name = path.name
    if name != str(path) or path.suffix or path.is_file():
        return path
    found, what = shipped(folder), "study" if folder == STUDIES else "recipe"
    if name not in found:
        hint = did_you_mean(name, list(found))
        raise RecipeError(f"no {what} {shown(name)} comes with mtkit{hint}; there are: {', '.join(found)}")
    return found[name]


def read_text(path: Path, what: str = "recipe") -> str:
    """Read the file of a recipe or a study; messages name it as `what`.

    A pipe, as of `--recipe <(...)`, is read once: another call returns the same text.

    Raises: RecipeError if it cannot be read, is larger than LARGEST, or is not UTF-8.
    """
    try:
        status = path.stat()
        pipe = (status.st_dev, status.st_ino) if stat.S_ISFIFO(status.st_mode) else None
        if pipe in _PIPES:
            return _PIPES[pipe]
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise RecipeError(f"cannot read {what} {path}: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not a YAML {what}: its bytes are not UTF-8; give a text file") from error
    if len(text) > LARGEST:
        raise RecipeError(f"{path}: larger than a {what} may be ({LARGEST:,} characters); give another file")
    if pipe is not None:
        _PIPES[pipe] = text
    return text


_EXAMPLES = {"recipe": "training: {max_updates: 1000}", "study": "entries: [full, band]"}


def read_settings(path: Path, what: str = "recipe") -> dict[str, Any]:
    """Read the nested settings in a YAML file, without any check of their values; `what` is recipe or study.

    Raises: RecipeError with the file, and the line if it is known.
    """
    text = read_text(path, what)
    try:
        settings = load_yaml(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        wrong = f"the character U+{error.character:04X} is not allowed; remove it"
        raise RecipeError(f"{path}, line {line}: not a YAML {what}: {wrong}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"{where}: not a YAML {what}: {cut_words(problem)}") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise RecipeError(f"{path}: a {what} is a mapping of settings, as in `{_EXAMPLES[what]}`")
    return settings


def with_variables(settings: Mapping[str, Any], origin: Path) -> dict[str, Any]:
    """Return the settings with environment variables ($MTKIT_DATA or ${MTKIT_DATA}) expanded in paths of text.

    These are the paths of `data` and of `model.embeddings`.

    Column names are not expanded: they may contain a dollar. Raises: RecipeError for a variable that is not set, and
    for a path with a null character.
    """

    def value_of(name: str) -> str:
        if not os.environ.get(name):
            raise RecipeError(
                f"{origin}: the environment variable {name} is not set; the recipe's first lines describe the "
                f"corpora in its folder; set it first, as in `export {name}=~/corpora`"
            )
        return os.environ[name]

    def expanded(value: Any) -> Any:
        if isinstance(value, str | Path):
            if "\0" in str(value):
                raise RecipeError(f"{origin}: {shown(str(value))} is not text; take out the character U+0000")
            return _VARIABLE.sub(lambda match: value_of(match[1] or match[2]), str(value))
        if isinstance(value, list | tuple):
            return [expanded(item) for item in value]
        if isinstance(value, Mapping):
            columns = ("source", "target", "documents", "scores") if "file" in value or "dataset" in value else ()
            return {key: item if key in columns else expanded(item) for key, item in value.items()}
        return value

    result, model = dict(settings), settings.get("model")
    if "data" in settings:
        result["data"] = expanded(settings["data"])
    if isinstance(model, Mapping) and "embeddings" in model:
        result["model"] = {**model, "embeddings": expanded(model["embeddings"])}
    return result


_REACHED = "reached:"


@dataclass(frozen=True)
class Head:
    """The head of a recipe: its description and the score that it reached."""

    name: str
    what: str
    reached: str | None


def read_head(path: Path) -> Head:
    """Parse the head of a recipe file. Raises: RecipeError if the file cannot be read."""
    comments = takewhile(lambda line: line.startswith("#"), read_text(path).split("\n"))
    head = [line.removeprefix("#").strip() for line in comments]
    reached = [line.removeprefix(_REACHED).strip() for line in head if line.startswith(_REACHED)]
    return Head(path.stem, head[0].rstrip(".") if head else "", reached[0] if reached else None)


EXAMPLE = "BLEU >= 37 on flickr2016 after 20 minutes"
_FORM = r"(\w+) (>=|<=) (\d+(?:\.\d+)?) on ([\w.-]+)(?: after (\d+) minutes)?"


@dataclass(frozen=True)
class Promise:
    """A bound on the score that a training with the recipe reaches."""

    text: str
    """The recipe's text: "BLEU >= 37 on flickr2016 after 20 minutes"."""
    metric: str
    side: str
    """Name of a test side."""
    bound: float
    at_most: bool
    """Whether lower is better."""
    minutes: float | None
    """Minutes of training; None for the recipe's own limits."""

    def kept(self, score: float) -> bool:
        """Return whether a score is within the bound."""
        return score <= self.bound if self.at_most else score >= self.bound


def promise(text: str) -> Promise:
    """Parse a promise. Raises: ValueError if the text has another form."""
    match = re.fullmatch(_FORM, text)
    if match is None:
        raise ValueError(f"cannot understand the promise {shown(text)}; write it as {EXAMPLE}")
    metric, sign, bound, side, minutes = match.groups()
    return Promise(text, metric, side, float(bound), sign == "<=", None if minutes is None else float(minutes))


def due_after(promises: Sequence[Promise], minutes: float | None) -> list[Promise]:
    """Return the promises that apply to a training of `minutes`; None means the recipe's own limits, and all apply.

    These are the promises for at most `minutes`; if all are for more, the first promise.
    """
    if minutes is None:
        return list(promises)
    return [item for item in promises if (item.minutes or 0) <= minutes] or list(promises[:1])


PromiseText = Annotated[
    str, AfterValidator(lambda text: promise(text).text), Field(json_schema_extra={"pattern": f"^{_FORM}$"})
]
"""The text of a promise in a recipe."""
