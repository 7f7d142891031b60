"""Messages quote values, and at most 80 characters of one."""

import pytest

from mtkit.attention import build
from mtkit.cli.options import parse_numbers, parse_options
from mtkit.decoding.engines.model_engine import find_dtype
from mtkit.device import find_device
from mtkit.errors import MtkitError, cut_words, first_line, shown
from mtkit.recipe import make_recipe
from mtkit.runs import find_run, run_folder
from mtkit.storage.jobs import Part

LONG = "x" * 5000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("a\n\x1b[31m", r"'a\n\x1b[31m'"),
        (3, "3"),
        ("x" * 80, f"'{'x' * 80}'"),
        (LONG, f"'{'x' * 80}'..."),
        ([LONG], f"['{'x' * 78}..."),
        ([10**5000], "a number of thousands of digits"),
    ],
    ids=range(7),
)
def test_a_value_is_shown_in_at_most_80_characters(value: object, text: str) -> None:
    assert shown(value) == text


def test_other_libraries_messages_are_one_line_with_long_words_cut() -> None:
    assert cut_words(f"no option: --{LONG}\nin '{'y ' * 99}'") == f"no option: '--{'x' * 78}'... in '{'y ' * 40}'..."
    assert cut_words("Invalid value for '--beam': 'x'") == "Invalid value for '--beam': 'x'"


@pytest.mark.parametrize(
    "use",
    [
        lambda: build(LONG, role="encoder", d_model=32, heads=4),
        lambda: build("full", role=LONG, d_model=32, heads=4),
        lambda: build("full", role="encoder", d_model=32, heads=4, positions=LONG),
        lambda: build("full", role="encoder", d_model=32, heads=4, **{LONG: 1}),
        lambda: build("band", role="encoder", d_model=32, heads=4, window_radius=LONG),
        lambda: make_recipe({"preset": LONG}),
        lambda: make_recipe({LONG: 1}),
        lambda: make_recipe({"model": {"d_model": LONG}}),
        lambda: make_recipe({"data": {"test": {LONG: 1}}}),
        lambda: make_recipe({"promises": [LONG]}),
        lambda: find_run(name=LONG),
        lambda: run_folder(f"{LONG}/"),
        lambda: find_dtype(LONG),
        lambda: find_device(LONG),
        lambda: Part.named(LONG),
        lambda: parse_options([LONG]),
        lambda: parse_options([f"a=[{LONG}"]),
        lambda: parse_numbers("--beam", LONG),
    ],
)
def test_errors_do_not_repeat_long_values(use: object) -> None:
    with pytest.raises(MtkitError) as caught:
        use()  # type: ignore[operator]
    assert len(str(caught.value)) < 1500
    assert "x" * 81 not in str(caught.value)


def test_of_another_librarys_message_the_first_line_is_quoted() -> None:
    assert first_line(ValueError("\n no such file \nTraceback ...")).strip() == "no such file"
    assert first_line(TimeoutError()) == "TimeoutError"
