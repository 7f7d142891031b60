"""What a recipe promises, and which of its promises count."""

import re
from pathlib import Path

import pytest

from mtkit.errors import RecipeError
from mtkit.recipe import Recipe, load_recipe
from mtkit.recipe.file import due_after, promise

BLEU = promise("BLEU >= 37 on flickr2016 after 20 minutes")
TER = promise("TER <= 42.5 on flickr2016 after 75 minutes")


def test_a_promise_has_a_metric_a_side_a_bound_and_minutes() -> None:
    assert (BLEU.metric, BLEU.side, BLEU.bound, BLEU.minutes, BLEU.at_most) == ("BLEU", "flickr2016", 37, 20, False)
    assert (TER.bound, TER.at_most) == (42.5, True)
    assert promise("exact >= 99 on test").minutes is None


def test_a_promise_is_kept_at_its_bound_and_beyond() -> None:
    assert [BLEU.kept(score) for score in (36.99, 37.0, 40.0)] == [False, True, True]
    assert [TER.kept(score) for score in (42.51, 42.5, 30.0)] == [False, True, True]


@pytest.mark.parametrize(
    ("minutes", "due"),
    [(None, [BLEU, TER]), (5, [BLEU]), (20, [BLEU]), (74, [BLEU]), (75, [BLEU, TER])],
)
def test_a_promise_counts_for_trainings_as_long_or_longer(minutes: float | None, due: list[object]) -> None:
    assert due_after([BLEU, TER], minutes) == due
    assert due_after([], minutes) == []


@pytest.mark.parametrize("text", ["BLEU > 37 on test", "BLEU >= 37", "BLEU >= 37 on test in 20 minutes", "''"])
def test_a_promise_that_cannot_be_understood_is_an_error_of_the_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "captions.yaml"
    path.write_text(f"promises:\n  - {text}\n")
    with pytest.raises(RecipeError, match=r"captions\.yaml: .*cannot understand the promise"):
        load_recipe(path)


def test_the_schema_takes_the_same_promises() -> None:
    pattern = Recipe.model_json_schema()["properties"]["promises"]["items"]["pattern"]
    assert re.search(pattern, BLEU.text)
    assert re.search(pattern, "exact >= 99 on test")
    assert not re.search(pattern, "BLEU > 37 on test")
