"""Values of options that several commands take."""

import pytest

from mtkit.cli.options import parse_names, parse_numbers, parse_options
from mtkit.errors import MtkitError


def test_values_are_yaml() -> None:
    given = ["window_radius=64", "positions=rotary", "eps=1e-3", "kernel=no", "projection={name: multi-query}"]
    found = {"window_radius": 64, "positions": "rotary", "eps": 0.001, "kernel": "no"}
    assert parse_options(given) == {**found, "projection": {"name": "multi-query"}}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["64"], "write KEY=VALUE"),
        (["a=[1"], "is not a YAML value"),
        (["a={b: 1, b: 2}"], "is not a YAML value"),
        (["a=1", "a=2"], "given twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(MtkitError, match=words):
        parse_options(texts)


def test_names_and_numbers_stand_between_commas() -> None:
    assert parse_names("--names", " full, band,") == ["full", "band"]
    assert parse_names("--names", None) == []
    assert parse_numbers("--beam", "1, 10", most=10) == [1, 10]


@pytest.mark.parametrize("text", ["", " , "])
def test_a_list_is_not_empty(text: str) -> None:
    for parse in (parse_names, parse_numbers):
        with pytest.raises(MtkitError, match="--names is empty; give a value"):
            parse("--names", text)


@pytest.mark.parametrize("text", ["0", "11", "1,-1", "few", "1_0", "\u0661", "9" * 5000])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(MtkitError, match=r"--beam .*: write whole numbers from 1 to 10 with commas"):
        parse_numbers("--beam", text, most=10)
