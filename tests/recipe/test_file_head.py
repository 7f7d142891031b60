"""What the head of a recipe says."""

from pathlib import Path

from mtkit.recipe.file import Head, read_head

HEAD = """# Captions, English-German.
#
#     mtkit recipes check captions
#
# reached: BLEU 37.4 on flickr2016
preset: small
# reached: BLEU 99 on nothing
"""


def test_the_head_is_read_up_to_the_first_setting(tmp_path: Path) -> None:
    path = tmp_path / "captions.yaml"
    path.write_text(HEAD)
    assert read_head(path) == Head("captions", "Captions, English-German", "BLEU 37.4 on flickr2016")


def test_a_recipe_without_a_head_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("seed: 1\n")
    assert read_head(path) == Head("plain", "", None)
