"""The sides of document tasks: distances, distinct documents, and the contrastive pairs next to the prepared data."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import mtkit
from mtkit.data.builtin.registry import BuiltinSide, builtin_sides
from mtkit.data.prepared import open_prepared
from mtkit.data.resampling import join_documents
from mtkit.data.resolve import with_task_defaults
from mtkit.errors import RecipeError
from mtkit.recipe import make_recipe
from mtkit.recipe.data import DataSettings
from mtkit.text.tokenizer import BREAK

SMALL = {"train": 300, "valid": 12, "test": 9}


def sides_of(name: str = "discourse", **task: Any) -> dict[str, BuiltinSide]:
    settings = DataSettings.model_validate({"task": {"name": name, **SMALL, **task}})
    return builtin_sides(with_task_defaults(settings))


def documents_of(side: BuiltinSide) -> dict[str, list[tuple[str, str]]]:
    documents: dict[str, list[tuple[str, str]]] = {}
    for source, target, document in side.draw():
        assert document is not None
        documents.setdefault(document, []).append((source, target))
    return documents


def test_training_mixes_the_distances_and_each_has_a_test_side() -> None:
    sides = sides_of(train=3_000)
    assert list(sides) == ["train", "valid", *(f"distance-{2**power}" for power in range(6))]
    counts = Counter(int(document.split("-")[1]) for document in documents_of(sides["train"]))
    assert set(counts) == {1, 2, 4, 8, 16, 32}
    assert all(0.13 < count / 3_000 < 0.20 for count in counts.values())
    for distance in counts:
        documents = documents_of(sides[f"distance-{distance}"])
        assert len(documents) == 9
        assert {document.split("-")[1] for document in documents} == {str(distance)}
        assert all(distance + 1 <= len(lines) <= distance + 9 for lines in documents.values())


def test_kinds_and_distances_can_be_chosen() -> None:
    sides = sides_of("terms", shortest=3, longest=10, longer=[2], options={"around": 0})
    assert list(sides) == ["train", "valid", "distance-3", "distance-6", "distance-20"]
    assert {(*document.split("-")[:2], len(lines)) for document, lines in documents_of(sides["train"]).items()} == {
        ("term", "3", 4),
        ("term", "6", 7),
    }
    assert {pair["labels"]["kind"] for pair in sides["distance-20"].contrastive()} == {"term"}


def test_no_held_out_document_is_in_training_or_held_out_twice() -> None:
    sides = sides_of("names", longest=1, options={"around": 0}, train=20_000, valid=500, test=500)
    texts = {name: [tuple(lines) for lines in documents_of(side).values()] for name, side in sides.items()}
    held_out = texts["valid"] + texts["distance-1"]
    assert len(set(held_out)) == 1_000
    assert len(texts["train"]) == 20_000
    assert not set(held_out) & set(texts["train"])


def test_prepared_documents_are_whole_rows_and_have_contrastive_pairs_with_their_context(tmp_path: Path) -> None:
    recipe = {"data": {"task": {"name": "discourse", **SMALL}, "folder": str(tmp_path / "data")}}
    prepared = open_prepared(mtkit.prepare(recipe).folder)
    assert prepared.directions == ["en-de"]
    settings = prepared.settings.documents
    assert settings is not None
    rows = join_documents(prepared.train, settings.pieces, seed=1, epoch=0, whole=settings.whole)
    assert len(rows) == 300
    assert max((rows.source[row] == BREAK).sum() for row in range(300)) == 32 + 8

    pairs = [json.loads(line) for line in (tmp_path / "data" / "contrastive.jsonl").read_text("utf-8").splitlines()]
    assert Counter(pair["labels"]["distance"] for pair in pairs) == {2**power: 9 for power in range(6)}
    for side, test in prepared.tests.items():
        assert test.documents is not None
        assert len(set(test.documents.tolist())) == 9
        text = [(tmp_path / "data" / "text" / f"{side}.{end}").read_text("utf-8").split("\n") for end in ("en", "de")]
        ids = (tmp_path / "data" / "text" / f"{side}.ids").read_text("utf-8").split("\n")
        begins = [row for row, name in enumerate(ids) if name and name not in ids[:row]]
        of_side = [pair for pair in pairs if f"distance-{pair['labels']['distance']}" == side]
        for begin, pair in zip(begins, of_side, strict=True):
            end = begin + len(pair["source_context"])
            assert text[0][begin : end + 1] == [*pair["source_context"], pair["source"]]
            assert text[1][begin : end + 1] == [*pair["target_context"], pair["right"]]
            assert ids[begin] == ids[end]
            assert ids[end].startswith(f"{pair['labels']['kind']}-{pair['labels']['distance']}-")

    assert mtkit.prepare(recipe).unchanged
    recipe["data"]["task"] = {"name": "names", **SMALL}
    mtkit.prepare(recipe, overwrite=True)  # it accepts its own files, and replaces the pairs
    assert '"pronoun"' not in (tmp_path / "data" / "contrastive.jsonl").read_text("utf-8")
    recipe["data"]["task"] = {"name": "copy", **SMALL}
    mtkit.prepare(recipe, overwrite=True)
    assert not (tmp_path / "data" / "contrastive.jsonl").exists()
    assert not list((tmp_path / "data" / "text").glob("*.ids"))


def test_settings_of_the_recipe_replace_the_defaults() -> None:
    data = {"task": {"name": "names", "test": 7}, "documents": {"pieces": 77}, "cleaning": {"duplicates": True}}
    settings = with_task_defaults(make_recipe({"data": data}).data)
    assert settings.task is not None
    assert settings.documents is not None
    assert (settings.task.test, settings.task.valid, settings.task.longer) == (7, 100, ())
    assert (settings.documents.pieces, settings.documents.whole) == (77, True)
    assert (settings.cleaning.duplicates, settings.cleaning.overlap) == (True, False)
    assert with_task_defaults(settings) == settings


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"task": "names", "cleaning": {"overlap": True}}, "no held-out document is in training"),
        ({"task": "copy", "documents": {"pieces": 9}}, "segments of the task copy are independent"),
        ({"task": {"name": "names", "shortest": 600, "longest": 1_200}}, "at most 1,000 sentences"),
        ({"task": {"name": "names", "options": {"around": -1}}}, "from 0 to 100"),
    ],
)
def test_wrong_settings_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        builtin_sides(with_task_defaults(make_recipe({"data": data}).data))
