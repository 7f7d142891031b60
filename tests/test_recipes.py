"""The recipes that come with mtkit: their heads, their models, and each from text to scores in a shortened form."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mtkit.data.builtin.corpus import corpus as builtin_corpus
from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.data.resampling import join_documents
from mtkit.experiments.check import check
from mtkit.model.build import build_model
from mtkit.recipe import Recipe, load_recipe, merged
from mtkit.recipe.data import Corpus, Grammar
from mtkit.recipe.file import promise, read_head, read_settings, shipped
from tests.decoding.trained import make_run

RECIPES = shipped()
SHORT: dict[str, Any] = {
    "model": {"d_model": 16, "heads": 2, "feed_forward": 16, "encoder_layers": 1, "decoder_layers": 1},
    "training": {
        "max_updates": 2,
        "max_minutes": None,
        "batch_tokens": 300,
        "warmup_updates": 1,
        "validate_every": 1,
        "validate_segments": 2,
    },
    "data": {"tokenizer": {"vocabulary": 400}},
    "decoding": {"max_pieces": 5},  # without it, models that learned nothing translate up to their limit
}
LINES = {"train": 150, "valid": 8, "test": 8}

each_recipe = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture
def corpora(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder where the real ones would be."""
    monkeypatch.setenv("MTKIT_DATA", str(tmp_path / "corpora"))
    return tmp_path / "corpora"


def test_the_package_holds_the_recipes_of_the_repository() -> None:
    files = (Path(__file__).parents[1] / "recipes").glob("*.yaml")
    assert {path.stem: path.read_bytes() for path in files} == {
        name: path.read_bytes() for name, path in RECIPES.items()
    }
    assert {"multi30k-en-de", "scan-simple", "de-en-news", "wmt14-en-de-base", "wmt14-en-de-big"} <= set(RECIPES)


@each_recipe
def test_the_head_says_what_to_type_and_what_to_expect(name: str, corpora: Path) -> None:
    recipe, head, text = load_recipe(RECIPES[name]), read_head(RECIPES[name]), RECIPES[name].read_text(encoding="utf-8")
    assert re.search(rf"^#     mtkit \w+ --recipe {name}\b", text, flags=re.MULTILINE)
    assert head.what
    assert head.reached
    promises = [promise(text) for text in recipe.promises]
    for each in promises:
        assert recipe.data.task is not None or each.side in (recipe.data.test or {"test"})
        assert each.metric in recipe.scoring.metrics
    minutes = [each.minutes for each in promises if each.minutes is not None]
    assert not minutes or min(minutes) == recipe.training.max_minutes  # what the bare command is to reach
    assert minutes == sorted(minutes)


@each_recipe
def test_the_whole_model_can_be_built_and_has_the_size_that_the_head_says(name: str, corpora: Path) -> None:
    recipe = load_recipe(RECIPES[name])
    pieces = recipe.data.tokenizer.vocabulary // 8 * 8
    with torch.device("meta"):
        model = build_model(
            recipe, source_vocabulary=pieces, target_vocabulary=pieces, tasks=len(recipe.data.directions)
        )
    said = re.search(r"([\d.]+) million parameters", RECIPES[name].read_text(encoding="utf-8"))
    assert said or name not in {"multi30k-en-de", "wmt14-en-de-base", "wmt14-en-de-big"}
    if said:
        digits = len(said[1].partition(".")[2])
        assert round(sum(each.numel() for each in model.parameters()) / 1e6, digits) == float(said[1])


@each_recipe
def test_a_shortened_form_goes_from_text_to_scores(
    name: str, corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = load_recipe(RECIPES[name])
    stand_in(whole, tmp_path)
    path = shortened(name, tmp_path)
    checked = check(path, tmp_path / "out", {}, command=["mtkit"], say=lambda line: None)
    sides = {side.name: side for side in checked.sides}
    prepared = open_prepared(tmp_path / "out" / "data")
    assert list(sides) == list(whole.data.test or (prepared.tests if whole.data.task else ["test"]))
    for side in sides.values():
        corpora_of_side = whole.data.test.get(str(side.name), ())
        if name == "discourse":  # its tests are documents
            assert prepared.tests[str(side.name)].documents[-1] + 1 == LINES["test"]
        else:
            assert side.segments == LINES["test"] * max(1, len(corpora_of_side))
        assert {each.name for each in side.overall.scores[0]} == set(whole.scoring.metrics)
        directions = {whole.data.direction_of(corpus) for corpus in corpora_of_side}
        assert set(side.directions) == (directions if len(directions) > 1 else set())
    assert [each.text for each, _ in checked.promises] == list(whole.promises)
    assert json.loads((tmp_path / "out" / "check.json").read_text())["recipe"] == name
    joined = whole.data.documents is not None or name == "discourse"
    assert (prepared.train.documents is not None) == joined


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("multi30k-en-de", {"train": 29_000, "valid": 1_014, "flickr2016": 1_000, "flickr2017": 1_000, "coco": 461}),
        ("multi30k-en-de-fr", {"train": 58_000, "valid": 2_028, "flickr2016": 2_000, "flickr2017": 2_000, "coco": 922}),
        ("scan-simple", {"train": 16_728, "valid": 4_182, "test": 4_182}),
        ("scan-length", {"train": 16_990, "valid": 3_920, "test": 3_920}),
        ("pydocs-enfr-sentences", {"train": 19_668, "valid": 868, "test": 1_793}),
        ("pydocs-enfr-documents", {"train": 19_668, "valid": 868, "test": 1_793}),
        (
            "de-en-news",
            {"train": 212_959, "valid": 3_000, "newstest2014": 3_003, "tatoeba": 2_500, "flickr2016": 1_000},
        ),
    ],
)
def test_the_real_corpora_can_be_prepared(name: str, rows: dict[str, int], tmp_path: Path) -> None:
    """Every line of the corpora is read, and nearly all of them are trained on."""
    recipe = load_recipe(RECIPES[name], {"data": {"folder": tmp_path / "data"}})
    settings = recipe.data
    sides = prepare(settings, workers=len(os.sched_getaffinity(0))).record["sides"]
    assert {side: each["lines"] for side, each in sides.items()} == rows
    held_out = {side: each["segments"] for side, each in sides.items() if side != "train"}
    assert held_out == {side: lines for side, lines in rows.items() if side != "train"}
    assert sides["train"]["segments"] > 0.97 * rows["train"]
    assert open_prepared(settings.folder).train.too_long(recipe.model.max_length) <= rows["train"] / 10_000
    if settings.documents is not None:
        train = open_prepared(settings.folder).train
        assert len(join_documents(train, settings.documents.pieces, seed=1, epoch=0)) < rows["train"] / 1.5
    assert all(side["unknown"] == {"source": 0, "target": 0} for side in sides.values())


def stand_in(recipe: Recipe, folder: Path) -> None:
    """Puts a few lines of the built-in corpus wherever a recipe looks for text: under MTKIT_DATA, or as a data set.

    A small run stands where it looks for one that translates, or that training begins with.
    """
    data = recipe.data
    for side, corpora in {"train": data.train, "valid": data.valid, **data.test}.items():
        kind = side if side in LINES else "test"
        for corpus in corpora:
            if corpus.dataset is None:
                write_files(corpus, list(segments(kind)))
    begins = recipe.training.init_from
    assert begins == data.tokenizer_from
    looked_for = [begins, *(corpus.translated_by for corpus in data.train)]
    for number, run in enumerate({run for run in looked_for if run is not None}):
        run.parent.mkdir(parents=True)
        run.symlink_to(make_run(folder / f"run-{number}").run.folder)
    if any(corpus.dataset for corpus in data.train):
        write_set(data.train[0], data.valid[0], next(iter(data.test.values()))[0])


def write_files(corpus: Corpus, pairs: list[tuple[str, str]]) -> None:
    """The files of a corpus, with documents of five lines where it has documents."""
    ids = [f"{number // 5}" for number in range(len(pairs))]
    sources, targets = zip(*pairs, strict=True)
    for path, lines in ((corpus.source, sources), (corpus.target, targets), (corpus.documents, ids)):
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_set(train: Corpus, valid: Corpus, test: Corpus) -> None:
    """What `datasets` would fetch from the hub, as a folder that it has saved, under the same name."""
    import datasets

    splits = datasets.DatasetDict()
    for kind, corpus in (("train", train), ("valid", valid), ("test", test)):
        rows = [{"en": source, "de": target} for source, target in segments(kind)]
        nested = str(corpus.source).startswith("translation.")
        splits[corpus.split] = datasets.Dataset.from_list([{"translation": row} if nested else row for row in rows])
    splits.save_to_disk(str(train.dataset))


def segments(kind: str) -> Iterator[tuple[str, str]]:
    for each in builtin_corpus(Grammar(**LINES))[kind]():
        yield each.source, each.target


def shortened(name: str, folder: Path) -> Path:
    """The recipe with a tiny model and two updates, under the same name and head."""
    text = RECIPES[name].read_text(encoding="utf-8")
    head = "".join(f"{line}\n" for line in text.split("\n") if line.startswith("#"))
    settings = merged(read_settings(RECIPES[name]), SHORT)
    if name.startswith("builtin"):
        sentences = min(settings["data"]["builtin"].get("sentences", 1), 4)
        settings = merged(settings, {"data": {"builtin": {**LINES, "sentences": sentences}}})
    if "task" in settings["data"]:
        settings = merged(settings, {"data": {"task": {"name": settings["data"]["task"], **LINES}}})
    if "init_from" in settings["training"]:
        # the width of the run which stands in, and not its maximum length
        settings = merged(settings, {"model": {"d_model": 32, "max_length": 1024}})
    if "lora" in settings["training"]:  # frozen weights are the run's, so the sizes are too
        settings["model"] = {"max_length": 1024}
    path = folder / f"{name}.yaml"
    path.write_text(head + yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return path
