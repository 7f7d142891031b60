"""What the head of a recipe says, and which of its promises count."""

from pathlib import Path

import pytest

from mtkit.errors import RecipeError
from mtkit.recipe.head import Head, read_head

HEAD = """# Captions, English-German.
#
#     mtkit recipes check captions
#
# promises: BLEU >= 37 on flickr2016 after 20 minutes
# promises: TER <= 42.5 on flickr2016 after 75 minutes
# reached: BLEU 37.4 on flickr2016
preset: small
# promises: BLEU >= 99 on nothing
"""


@pytest.fixture
def head(tmp_path: Path) -> Head:
    path = tmp_path / "captions.yaml"
    path.write_text(HEAD)
    return read_head(path)


def test_the_head_is_read_up_to_the_first_setting(head: Head) -> None:
    assert (head.name, head.what, head.reached) == ("captions", "Captions, English-German", "BLEU 37.4 on flickr2016")
    bleu, ter = head.promises
    assert (bleu.metric, bleu.side, bleu.bound, bleu.minutes) == ("BLEU", "flickr2016", 37, 20)
    assert ter.text == "TER <= 42.5 on flickr2016 after 75 minutes"


def test_a_promise_is_kept_at_its_bound_and_beyond(head: Head) -> None:
    bleu, ter = head.promises
    assert [bleu.kept(score) for score in (36.99, 37.0, 40.0)] == [False, True, True]
    assert [ter.kept(score) for score in (42.51, 42.5, 30.0)] == [False, True, True]


@pytest.mark.parametrize(
    ("minutes", "metrics"),
    [(None, ["BLEU", "TER"]), (5, ["BLEU"]), (20, ["BLEU"]), (74, ["BLEU"]), (75, ["BLEU", "TER"])],
)
def test_a_promise_counts_for_trainings_as_long_or_longer(
    head: Head, minutes: float | None, metrics: list[str]
) -> None:
    assert [each.metric for each in head.promises_after(minutes)] == metrics


@pytest.mark.parametrize("text", ["BLEU > 37 on test", "BLEU >= 37", "BLEU >= 37 on test in 20 minutes", ""])
def test_a_promise_that_cannot_be_understood_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "captions.yaml"
    path.write_text(f"# Captions\n# promises: {text}\n")
    with pytest.raises(RecipeError, match=r"captions\.yaml: cannot understand the promise"):
        read_head(path)


def test_a_recipe_without_a_head_promises_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("seed: 1\n")
    assert read_head(path) == Head("plain", "", (), None)
    assert read_head(path).promises_after(20) == []
