"""Options of attention mechanisms on the command line."""

import pytest

from mtkit.cli.attention_options import parse_options
from mtkit.errors import MtkitError


def test_values_are_yaml() -> None:
    given = ["window_radius=64", "positions=rotary", "eps=1e-3", "kernel=no", "projection={name: multi-query}"]
    found = {"window_radius": 64, "positions": "rotary", "eps": 0.001, "kernel": "no"}
    assert parse_options(given) == {**found, "projection": {"name": "multi-query"}}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["64"], "write KEY=VALUE"),
        (["a=[1"], "is no YAML value"),
        (["a={b: 1, b: 2}"], "is no YAML value"),
        (["a=1", "a=2"], "given twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(MtkitError, match=words):
        parse_options(texts)
