"""Entries of a comparison: what is compared, as text or as settings over the recipe.

full                          a mechanism in the roles of its paper
band[window_radius=16]        with options
linear@encoder@decoder        in these roles only; the other roles are full
reformer+reversible           with settings of the recipe: `reversible` is model.reversible = true
full:2+band:2@encoder         several mechanisms in the heads of a layer
full+norm=post+preset=small   a setting is named by its last word, or in full if that is ambiguous: model.norm
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import yaml
from pydantic.fields import FieldInfo

from mtkit.attention import mechanisms
from mtkit.attention.mixed_heads import MIX
from mtkit.attention.options import OptionValueError
from mtkit.attention.registry import check_role, find
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.model.build import choose_attention
from mtkit.recipe import Recipe, make_recipe, merged
from mtkit.storage.yaml_text import load_yaml
from mtkit.terminal import acts

ALL = "all"
"""Text that means all mechanisms, `full` first."""

SECTIONS = ("preset", "model", "attention", "training", "decoding")
"""Parts of the recipe that an entry may set. Data, scoring and seed are the same for all entries."""

_ENTRY = re.compile(
    rf"(?P<name>{MIX.pattern}(?=[\[@+]|$)|[^\[\]@+]+)"
    r"(?:\[(?P<options>[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\])?(?P<rest>(?:[@+].+)?)"
)


@dataclass(frozen=True)
class Entry:
    """One model of a comparison."""

    name: str
    """Name in tables: the entry's text, or a name given by the user."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Nested settings over the recipe of the comparison."""


def parse_entries(texts: Sequence[str | Mapping[str, Any]]) -> list[Entry]:
    """Parse the entries of a comparison: texts, or mappings of settings with an optional `name`. ALL makes many.

    A repeated text counts once.

    Raises: MtkitError for an unknown mechanism, role or setting, and for two different entries of the same name.
    """
    entries: dict[str, Entry] = {}
    for text in texts:
        names = ["full", *mechanisms()] if text == ALL else [text]
        for entry in map(_entry, names):
            if entries.setdefault(entry.name, entry) != entry:
                raise MtkitError(f"two entries have the name {shown(entry.name)}; give one of them another `name`")
    if not entries:
        raise MtkitError("no entries to compare; give mechanisms, as in --attention full,longformer")
    return list(entries.values())


def split(text: str) -> list[str]:
    """Split a text at the commas outside brackets: "full, band[window_radius=3,dropout=0]" has two parts."""
    parts, depth, begin = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
    return [part.strip() for part in [*parts, text[begin:]] if part.strip()]


def with_common_options(
    entries: Sequence[Entry], base: Mapping[str, Any], options: Mapping[str, Any], wanted: Collection[str] = ()
) -> list[Entry]:
    """Add each of the attention `options` to the entries that have it and do not set it.

    At least one entry must have each option in `wanted`. `base` are the settings that all entries share.

    Raises: MtkitError for an option that no entry has, and for an invalid value.
    """
    refused: dict[str, list[MtkitError]] = {}
    result = []
    for entry in entries:
        settings = entry.settings
        for key, value in options.items():
            if not isinstance(settings.get("attention", {}), Mapping):
                break  # `Study.recipe` raises
            bare = {**settings, "attention": {**settings.get("attention", {}), "options": {key: value}}}
            try:
                choose_attention(make_recipe(merged(base, bare)))
            except OptionValueError:  # the mechanism has the option, so it must not be left out
                raise
            except MtkitError as error:
                refused.setdefault(key, []).append(error)
            else:
                settings = merged({"attention": {"options": {key: value}}}, settings)
        result.append(Entry(entry.name, settings))
    for key in wanted:
        if len(errors := refused.get(key, [])) == len(entries):
            # the error that suggests a name is the most helpful
            raise max(errors, key=lambda error: "did you mean" in str(error))
    return result


def family(recipe: Recipe) -> str | None:
    """Return the family of the recipe's mechanisms other than `full`; None if there are several families."""
    names = {choice.name for choices in choose_attention(recipe).values() for choice in choices}
    families = {find(name).family for name in names - {"full"} or {"full"}}
    return families.pop() if len(families) == 1 else None


def _entry(written: str | Mapping[str, Any]) -> Entry:
    if isinstance(written, str):
        return _parse(written)
    settings = dict(written)
    name = settings.pop("name", None)
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise MtkitError(f"an entry has the name {shown(name)}; give a word, or leave it out")
    if name is not None and acts(name):
        raise MtkitError(f"the name {shown(name)} of an entry has a line end or a control character; leave that out")
    text = settings.pop("entry", None)
    parsed = Entry("", {}) if text is None else _parse(str(text))
    if isinstance(settings.get("attention"), str):
        settings["attention"] = {"name": settings["attention"]}
    for key in settings:
        _check_section(key)
    name = name or " ".join(filter(None, [parsed.name, *(f"{key}={value}" for key, value in _leaves(settings))]))
    return Entry(name or "the recipe", merged(parsed.settings, settings))


def _parse(text: str) -> Entry:
    match = _ENTRY.fullmatch(text.strip())
    if match is None:
        raise MtkitError(
            f"cannot understand the entry {shown(text)}; write NAME[OPTION=VALUE]@ROLE+SETTING=VALUE, as in "
            "band[window_radius=16]@encoder+norm=post"
        )
    mechanism = find(match["name"].strip())
    settings: dict[str, Any] = {}
    roles, places = [], set[str]()
    for sign, word in re.findall(r"([@+])([^@+]*)", match["rest"]):
        if sign == "@":
            check_role(mechanism, word)
            roles.append(word)
            continue
        key, equals, value = word.partition("=")
        place = _place(key.strip(), text)
        if place in places:
            raise MtkitError(f"{shown(text)} sets {place} twice; keep one of them")
        places.add(place)
        settings = merged(settings, nested(place, _value(value, text) if equals else True))
    attention: dict[str, Any] = dict.fromkeys(roles, mechanism.name) if roles else {"name": mechanism.name}
    if match["options"] is not None:
        options = {}
        for option in split(match["options"]):
            key, equals, value = option.partition("=")
            if not equals:
                raise MtkitError(f"{shown(text)}: write an option as OPTION=VALUE, as in window_radius=16")
            if key.strip() in options:
                raise MtkitError(f"{shown(text)} sets {key.strip()} twice; keep one of them")
            options[key.strip()] = _value(value, text)
        attention["options"] = options
    return Entry(re.sub(r"\s+", "", text), merged({"attention": attention}, settings))


def nested(place: str, value: Any) -> dict[str, Any]:
    """Return {"training": {"peak_rate": value}} for the place "training.peak_rate"."""
    for part in reversed(place.split(".")):
        value = {part: value}
    return dict(value)


def setting_place(word: str) -> str:
    """Return the full name of a recipe's setting: "model.norm" for "norm". Raises: MtkitError for an unknown word."""
    return _place(word, word)


def is_whole(place: str, low: float, high: float) -> bool:
    """Return whether a range of a setting, "model.d_model", has whole numbers only.

    The ends tell it for an option of attention, whose type is unknown: 1 to 4 is whole, 0.0 to 1.0 is not.
    """
    section, _, name = place.partition(".")
    fields: Mapping[str, FieldInfo] = getattr(Recipe.model_fields[section].annotation, "model_fields", {})
    if name not in fields:
        return isinstance(low, int) and isinstance(high, int)
    kind = fields[name].annotation
    return int in {kind, *(inner for part in get_args(kind) for inner in (part, *get_args(part)))}


def _place(word: str, text: str) -> str:
    if word == "seed":
        raise MtkitError(
            f"{shown(text)}: all entries have the same seeds (--seeds); the seed of sampling is decoding.seed"
        )
    places = list(_places())
    matching = [place for place in places if word == place or word == place.rpartition(".")[2]]
    if len(matching) == 1:
        return matching[0]
    if word in matching:
        return word
    if matching:
        raise MtkitError(f"{shown(text)}: {shown(word)} is ambiguous; write {' or '.join(matching)}")
    if word.startswith("attention.options."):
        return word
    words = [*places, *(place.rpartition(".")[2] for place in places)]
    raise MtkitError(f"{shown(text)}: no setting {shown(word)} of a recipe{did_you_mean(word, words)}")


def _places() -> Iterator[str]:
    """Yield the settings of a recipe that entries may differ in, as "model.norm"."""
    for section in SECTIONS:
        fields = getattr(Recipe.model_fields[section].annotation, "model_fields", None)
        places = [section] if fields is None else [f"{section}.{name}" for name in fields]
        yield from (place for place in places if place not in ("attention.name", "attention.options"))


def _check_section(key: str) -> None:
    if key not in SECTIONS:
        raise MtkitError(
            f"an entry cannot set {shown(key)}{did_you_mean(key, list(SECTIONS))}; it may set {', '.join(SECTIONS)}"
        )


def _leaves(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the innermost keys with their values."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield key, value


def _value(text: str, entry: str) -> Any:
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise MtkitError(f"{shown(entry)}: {shown(text)} is not a YAML value such as 64, true or [1, 2]") from error
