"""What every built-in task promises: sides, lengths, distinct sources, and checked options."""

import hashlib
import time
from pathlib import Path

import pytest

import mtkit
from mtkit.data.builtin.discourse import DocumentTask
from mtkit.data.builtin.registry import TASKS as ALL_TASKS
from mtkit.data.builtin.registry import builtin_sides, describe, find_task, table
from mtkit.data.prepared import open_prepared
from mtkit.errors import DataError, RecipeError
from mtkit.recipe import make_recipe
from mtkit.recipe.data import DataSettings
from mtkit.text.sentences import sentences

TASKS = {name: task for name, task in ALL_TASKS.items() if not isinstance(task, DocumentTask)}
SMALL = {"train": 200, "valid": 20, "test": 20}


def settings(**task: object) -> DataSettings:
    return DataSettings.model_validate({"task": task})


def drawn(**task: object) -> dict[str, list[tuple[str, str]]]:
    return {
        name: [(pair.source, pair.target) for pair in side.draw()]
        for name, side in builtin_sides(settings(**task)).items()
    }


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_its_sides_and_no_held_out_source_is_repeated(name: str) -> None:
    sides = drawn(name=name)
    sizes = {side: len(pairs) for side, pairs in sides.items()}
    assert sizes == {"train": 20_000, "valid": 500, "test": 500, "test-2x": 500, "test-4x": 500}
    held_out = [source for side, pairs in sides.items() if side != "train" for source, _ in pairs]
    assert len(set(held_out)) == 2_000
    assert not set(held_out) & {source for source, _ in sides["train"]}


@pytest.mark.parametrize("name", TASKS)
def test_a_source_has_one_target_and_words_without_spaces(name: str) -> None:
    targets: dict[str, str] = {}
    for source, target in (pair for pairs in drawn(name=name, **SMALL).values() for pair in pairs):
        assert targets.setdefault(source, target) == target
        assert all(text == " ".join(text.split()) != "" for text in (source, target))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_drawn_in_seconds_and_in_the_same_way(name: str) -> None:
    begin = time.process_time()
    first = drawn(name=name)
    assert time.process_time() - begin < 6  # 3 on a free core
    assert drawn(name=name) == first
    assert drawn(name=name, seed=2, **SMALL) != drawn(name=name, **SMALL)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_no_marks_at_which_long_lines_are_split(name: str) -> None:
    sides = drawn(name=name, **SMALL)
    assert all(len(sentences(source, "input")) == 1 for pairs in sides.values() for source, _ in pairs)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("copy", "cd3041ec"),
        ("reverse", "f649f8fb"),
        ("sort", "47ffce47"),
        ("shift", "d92b99c9"),
        ("nth", "faa3c3f2"),
        ("mqar", "63f62088"),
        ("selective-copy", "df675ec3"),
        ("counting", "0a39b7c4"),
        ("majority", "28dd622e"),
        ("dyck", "392b7ea5"),
        ("listops", "d3d69e3a"),
    ],
)
def test_the_same_seed_gives_the_same_text_in_every_version_of_python(name: str, digest: str) -> None:
    pairs = (pair for side in drawn(name=name, **SMALL).values() for pair in side)
    text = "".join(f"{source} -> {target}\n" for source, target in pairs)
    assert hashlib.sha256(text.encode()).hexdigest()[:8] == digest


@pytest.mark.parametrize("name", TASKS)
def test_training_words_are_the_words_of_all_sides(name: str) -> None:
    words = {
        side: {word for pair in pairs for text in pair for word in text.split()}
        for side, pairs in drawn(name=name).items()
    }
    assert set().union(*words.values()) == words["train"]


@pytest.mark.parametrize("name", ALL_TASKS)
def test_a_task_is_described_with_its_options(name: str) -> None:
    text = describe(name)
    assert all(option in text for option in ALL_TASKS[name].options)
    assert name in table()


def test_lengths_are_those_asked_for() -> None:
    sides = drawn(name="copy", shortest=3, longest=7, longer=[3], **SMALL, options={"vocabulary": 900})
    lengths = {side: {len(source.split()) for source, _ in pairs} for side, pairs in sides.items()}
    assert set(lengths) == {"train", "valid", "test", "test-3x"}
    assert lengths["train"] == set(range(3, 8))
    assert lengths["test"] <= lengths["train"]
    assert min(lengths["test-3x"]) >= 8
    assert max(lengths["test-3x"]) <= 21


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "copi"}, "did you mean 'copy'"),
        ({"name": "copy", "options": {"vocabular": 3}}, "did you mean 'vocabulary'"),
        ({"name": "copy", "options": {"vocabulary": 1}}, "a whole number from 2 to 10,000"),
        ({"name": "copy", "options": {"vocabulary": 2.5}}, "a whole number"),
        ({"name": "copy", "options": {"vocabulary": True}}, "a whole number"),
        ({"name": "copy", "shortest": 9, "longest": 8}, "exceeds data.task.longest"),
    ],
)
def test_wrong_settings_are_refused(task: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        builtin_sides(settings(**task))


def test_multiples_rise() -> None:
    with pytest.raises(RecipeError, match="rising order"):
        make_recipe({"data": {"task": {"name": "copy", "longer": [4, 2]}}})


def test_too_few_sources_are_an_error_unless_repeats_are_allowed() -> None:
    tiny = {"name": "copy", "shortest": 1, "longest": 3, "options": {"vocabulary": 2}, **SMALL}
    with pytest.raises(DataError, match="too few different sources of 1 to 3 symbols"):
        builtin_sides(settings(**tiny))
    data = DataSettings.model_validate({"task": tiny, "cleaning": {"overlap": False}})
    assert len(list(builtin_sides(data)["train"].draw())) == 200


@pytest.mark.parametrize("other", ["builtin", "train"])
def test_a_task_and_other_text_exclude_each_other(other: str) -> None:
    text = {"source": "a.en", "target": "a.de"}
    data = {"builtin": {"builtin": {"sentences": 3}}, "train": {"train": text, "valid": text}}[other]
    with pytest.raises(RecipeError, match=r"data\.task = copy.* leave "):
        make_recipe({"data": {"task": "copy", **data}})


def test_a_name_is_enough_and_the_data_is_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = mtkit.prepare({"data": {"task": "copy", "folder": "copy"}})
    prepared = open_prepared(report.folder)
    assert list(prepared.tests) == ["test", "test-2x", "test-4x"]
    assert prepared.directions == ["input-output"]
    assert len(prepared.train) == 20_000
    assert prepared.settings.tokenizer.kind == "words"
    assert prepared.tokenizers.source.encode("c a b") == [
        prepared.tokenizers.source.processor.piece_to_id(f"\u2581{word}") for word in "cab"
    ]
    assert mtkit.prepare({"data": {"task": {"name": "copy"}, "folder": "copy"}}).unchanged


def test_settings_of_the_recipe_replace_the_defaults_of_a_task(tmp_path: Path) -> None:
    data = {
        "task": {"name": find_task("reverse").name, **SMALL},
        "source_language": "en",
        "folder": str(tmp_path / "r"),
    }
    report = mtkit.prepare({"data": {**data, "tokenizer": {"kind": "bpe", "vocabulary": 400}}})
    prepared = open_prepared(report.folder)
    assert prepared.directions == ["en-output"]
    assert prepared.settings.tokenizer.kind == "bpe"
    assert sorted(path.name for path in (tmp_path / "r" / "text").iterdir())[:2] == ["test-2x.en", "test-2x.output"]
