"""YAML by the core schema of version 1.2: what a plain word is, what is refused, and what comes back from writing."""

import math
from itertools import pairwise
from typing import Any

import pytest
import yaml

from mtkit.storage.yaml_text import DEEPEST, dump_yaml, load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((word, word) for word in ("no", "No", "NO", "yes", "on", "off", "y", "n")),
        *((word, word) for word in ("12:30", "1_000", "2024-01-01", "0b1")),
        ("true", True), ("False", False), ("~", None), ("null", None), ("", None),
        ("012", 12), ("0o14", 12), ("0x1F", 31), ("-5", -5), ("9" * 30, int("9" * 30)),
        ("1e-3", 0.001), ("1.5E+2", 150.0), (".5", 0.5), ("5.", 5.0), ("-.inf", -math.inf),
        ("'true'", "true"), ("!!str 5", "5"), ("[no, 1e3]", ["no", 1000.0]),
    ],
)  # fmt: skip
def test_plain_words_mean_what_version_1_2_says(text: str, value: Any) -> None:
    found = load_yaml(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        *("no", "on", "12:30", "1e-3", "0o14", "08", "012", "true", "", "~", "1_000", "a\x85", "\n\x85b"),
        *(1e-9, 1e22, 5, True, None),
    ],
)
def test_what_is_written_comes_back(value: Any) -> None:
    """Under the rules of version 1.1 too, which other programs go by."""
    text = dump_yaml({"key": [value]})
    assert load_yaml(text) == {"key": [value]}
    if isinstance(value, str):
        assert yaml.safe_load(text) == {"key": [value]}


def test_two_equal_keys_are_refused_with_both_lines() -> None:
    with pytest.raises(yaml.MarkedYAMLError) as raised:
        load_yaml("a: 1\nb:\n  c: 1\n  d: 2\n  'c': 3\n")
    assert raised.value.problem_mark.line + 1 == 5
    assert "'c'" in raised.value.problem
    assert "line 3" in raised.value.problem
    assert load_yaml("a: {c: 1}\nb: {c: 1}\n") == {"a": {"c": 1}, "b": {"c": 1}}
    assert load_yaml("a: &a {c: 1}\nb: {<<: *a, c: 2}\n")["b"] == {"c": 2}  # laid over what is merged in


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1000 + "]" * 1000,
        "".join(f"{' ' * depth}a:\n" for depth in range(1000)),
        "a: &a [*a]",
        "a: &a []\n" + "".join(f"{b}: &{b} [{', '.join(10 * [f'*{a}'])}]\n" for a, b in pairwise("abcdefghi")),
        "!!int many", "!!float x", "!!bool x", "!!timestamp x", "!!binary '*'", "!!python/name:os.system x",
        "? [a]\n: b", "a: \0", "9" * 5000, "0x" + "f" * 5000,
        'a: "\\0"', 'a: "\\udcff"', '"\\0": a',
    ],
)  # fmt: skip
def test_what_no_recipe_needs_is_an_error_of_yaml(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


def test_what_is_not_too_deep_is_read() -> None:
    assert load_yaml("[" * DEEPEST + "]" * DEEPEST)
