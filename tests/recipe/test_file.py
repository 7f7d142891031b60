"""Recipe files: YAML, variables, errors with line numbers, heads and promises."""

import os
import re
from pathlib import Path

import pytest

from mtkit.errors import RecipeError
from mtkit.experiments.study import read_study
from mtkit.recipe import Recipe, file, load_recipe
from mtkit.recipe.file import (
    Head,
    due_after,
    find_recipe,
    promise,
    read_head,
    read_settings,
    shipped,
    with_variables,
)

PAIR = "{source: $CORPORA/train.en, target: '${CORPORA}/train.de'}"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORPORA", "/corpora")
    path = tmp_path / "mine.yaml"
    path.write_text(f"data: {{folder: $CORPORA-data, train: [{PAIR}], valid: {PAIR}}}\n")
    return path


def test_variables_are_filled_in_wherever_data_names_paths(written: Path) -> None:
    data = load_recipe(written).data
    assert str(data.train[0].source) == "/corpora/train.en"
    assert str(data.valid[0].target) == "/corpora/train.de"
    assert str(data.folder) == "/corpora-data"


def test_a_variable_that_is_not_set_is_named_with_the_file(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORPORA")
    with pytest.raises(RecipeError, match=r"mine\.yaml: the environment variable CORPORA is not set") as raised:
        load_recipe(written)
    assert "\n" not in str(raised.value)


def test_variables_are_expanded_in_the_paths_of_word_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPORA", "/corpora")
    found = with_variables({"model": {"embeddings": {"source": "$CORPORA/v.vec"}, "tie": "$no"}}, tmp_path)
    assert found == {"model": {"embeddings": {"source": "/corpora/v.vec"}, "tie": "$no"}}
    assert with_variables({"model": {"embeddings": None}}, tmp_path) == {"model": {"embeddings": None}}


def test_variables_are_expanded_in_paths_and_tuples_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPORA", "/corpora")
    given = {
        "folder": Path("$CORPORA/data"),
        "train": ({"source": Path("${CORPORA}/a.en"), "target": "$CORPORA/a.de"},),
    }
    found = with_variables({"data": given}, tmp_path)["data"]
    assert found == {"folder": "/corpora/data", "train": [{"source": "/corpora/a.en", "target": "/corpora/a.de"}]}


def test_a_path_with_a_null_character_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^recipe: 'a\\x00b' is not text; take out"):
        with_variables({"data": {"folder": "a\0b"}}, Path("recipe"))


def test_columns_keep_their_dollars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPORA", "/corpora")
    corpus = {"file": "$CORPORA/all.jsonl", "source": "$en", "target": "$de", "documents": "$id", "scores": "$score"}
    found = with_variables({"data": {"train": [corpus]}, "seed": 1}, tmp_path)
    assert found == {"data": {"train": [{**corpus, "file": "/corpora/all.jsonl"}]}, "seed": 1}


def test_a_name_means_the_recipe_that_comes_with_mtkit_unless_a_file_has_it(written: Path) -> None:
    path = find_recipe(Path("builtin-longformer"))
    assert path == shipped()["builtin-longformer"]
    assert load_recipe(Path("builtin-longformer")).attention.name == "longformer"
    Path("builtin-longformer").write_text("seed: 7")
    assert load_recipe(Path("builtin-longformer")).seed == 7
    assert find_recipe(Path("recipes/builtin-longformer")) == Path("recipes/builtin-longformer")


def test_a_name_that_is_nearly_right_is_helped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="did you mean 'builtin-longformer'"):
        load_recipe(Path("builtin-longfromer"))
    with pytest.raises(RecipeError, match=r"cannot read recipe builtin-longformer\.yaml"):
        load_recipe(Path("builtin-longformer.yaml"))


def test_an_empty_file_is_a_recipe_of_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_settings(tmp_path / "empty.yaml") == {}
    (tmp_path / "empty.yaml").write_text("false\n")
    with pytest.raises(RecipeError, match="a recipe is a mapping"):
        read_settings(tmp_path / "empty.yaml")


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """`mtkit recipes check <(...)` would otherwise check a recipe of defaults."""
    reader, writer = os.pipe()
    os.write(writer, b"# head\nseed: 7\n")
    os.close(writer)
    path = Path(f"/proc/self/fd/{reader}")
    assert read_head(path).what == "head"
    assert read_settings(path) == read_settings(path) == {"seed": 7}
    os.close(reader)


def test_errors_of_a_study_call_it_a_study(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    cases = {
        b"entries: [full": r"mine\.yaml, line [12]: not a YAML study",
        b"[full]": "a study is a mapping of settings, as in `entries:",
        b"\xff": "not a YAML study: its bytes are not UTF-8; give a text file",
        b"entries:\n- \x07": r"mine\.yaml, line 2: not a YAML study: the character U\+0007 is not allowed; remove it",
        b"#" * 10**7: "larger than a study may be",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=message):
            read_study(path)
    with pytest.raises(RecipeError, match=r"cannot read study .*: Is a directory; give a file"):
        read_study(tmp_path)


def test_plain_words_are_what_they_look_like(written: Path) -> None:
    """The language `no` is Norwegian."""
    written.write_text(f"data: {{target_language: no, train: [{PAIR}], valid: {PAIR}}}\ntraining: {{eps: 1e-8}}\n")
    recipe = load_recipe(written)
    assert recipe.data.target_language == "no"
    assert recipe.training.eps == 1e-8


def test_an_equal_key_is_named_with_both_lines(written: Path) -> None:
    written.write_text("seed: 1\ntraining:\n  ema: 0.5\nseed: 2\n")
    with pytest.raises(RecipeError, match=r"mine\.yaml, line 4: .*'seed' is repeated from line 1") as raised:
        load_recipe(written)
    assert "\n" not in str(raised.value)


def test_what_never_ends_is_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /dev/zero, which memory would not hold."""
    monkeypatch.setattr(file, "LARGEST", 20)
    (tmp_path / "large.yaml").write_text("#" * 21)
    with pytest.raises(RecipeError, match=r"large\.yaml: larger than a recipe"):
        load_recipe(tmp_path / "large.yaml")


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
