"""A tokenizer that prepared data takes over from a run, or from other prepared data, instead of training one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtkit.data.prepared import open_prepared
from mtkit.errors import DataError, did_you_mean
from mtkit.recipe import make_recipe
from mtkit.recipe.data import DataSettings, TokenizerSettings
from mtkit.recipe.file import read_settings
from mtkit.recipe.settings import RUNS
from mtkit.storage.files import check_regular
from mtkit.storage.records import read_stored
from mtkit.text.languages import languages_of

OPTIONS = {
    "vocabulary": "--vocabulary",
    "kind": "--tokenizer",
    "normalization": "--normalization",
    "joint": "--separate",
}
"""The options of `mtkit prepare` that set these settings of the tokenizer."""


@dataclass(frozen=True)
class _Lender:
    """The run, or the prepared data, that has the tokenizer."""

    folder: Path
    tokenizer: TokenizerSettings
    directions: Sequence[str]


def with_tokenizer(settings: DataSettings) -> DataSettings:
    """The settings with those of the tokenizer that `tokenizer_from` names, and its folder in place of the name.

    Where neither language is named, they are those of the run. Settings without `tokenizer_from` stay as they are.

    Raises: DataError where there is no such run or folder, a setting contradicts its tokenizer, or it translates into
    several languages and the text's is not named.
    """
    if settings.tokenizer_from is None:
        return settings
    lender = _find(settings.tokenizer_from)
    wanted, there = settings.tokenizer, lender.tokenizer
    for name in wanted.model_fields_set:
        asked, has = getattr(wanted, name), getattr(there, name)
        if asked != has:
            option = f" ({OPTIONS[name]})" if name in OPTIONS else ""
            raise DataError(
                f"data.tokenizer.{name} = {_shown(asked)}{option} contradicts the tokenizer of {lender.folder}, which "
                f"has {_shown(has)}; leave that setting out, or --tokenizer-from (data.tokenizer_from)"
            )
    update: dict[str, Any] = {"tokenizer_from": lender.folder, "tokenizer": there}
    corpora = (*settings.train, *settings.valid, *(each for side in settings.test.values() for each in side))
    unnamed = not {"source_language", "target_language"} & settings.model_fields_set
    if unnamed and any(corpus.direction is None for corpus in corpora):
        if len(lender.directions) > 1:
            raise DataError(
                f"{lender.folder} translates {', '.join(lender.directions[:5])}{', ...' * (len(lender.directions) > 5)}"
                "; name the languages of your text with --source-language and --target-language"
            )
        update["source_language"], update["target_language"] = languages_of(lender.directions[0])
    return settings.model_copy(update=update)


def vocabulary_of(folder: Path) -> str:
    """Fingerprint of the tokenizers in a folder: where it is the same, the same pieces have the same numbers."""
    models = sorted(folder.glob("*.model"))
    return hashlib.sha256(b"".join(each.name.encode() + each.read_bytes() for each in models)).hexdigest()


def copy_tokenizers(source: Path, target: Path) -> None:
    """Copy the tokenizers of a folder into another, which is there."""
    for model in sorted(source.glob("*.model")):
        (target / model.name).write_bytes(model.read_bytes())


def _find(named: Path) -> _Lender:
    """The folder of that path, or the run of that name. Raises: DataError where it has no tokenizer."""
    records = (named / "prepared.json", named / "run.json")
    plain = named.name == str(named) and not any(each.is_file() for each in records)
    folder = RUNS / named if plain else named
    if not (folder / "tokenizer").is_dir():
        runs = sorted(path.parent.name for path in RUNS.glob("*/run.json"))
        hint = did_you_mean(named.name, runs) if plain else ""
        known = f"; the runs in {RUNS}: {', '.join(runs)}" if plain and runs else ""
        raise DataError(
            f"--tokenizer-from {named}: no run of that name, and no folder of a run or of prepared data{hint}{known}"
        )
    if (folder / "prepared.json").is_file():
        data = open_prepared(folder).settings
        return _Lender(folder, data.tokenizer, data.directions)
    check_regular(folder)
    path = folder / "recipe.yaml"
    data = make_recipe(read_settings(path), origin=str(path)).data
    about = read_stored(folder / "run.json", dict[str, Any], "choose another run", error=DataError)
    return _Lender(folder, data.tokenizer, about.get("directions") or data.directions)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)
