"""A run records the runs and the word vectors that its training began with."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.data.prepared import Prepared, open_prepared
from mtkit.errors import DiffersError, RecipeError, RunError
from mtkit.recipe import load_recipe, merged
from mtkit.runs import Run
from mtkit.training.run_folder import ancestors, record, trained_on
from tests.training.conftest import TINY, run, tiny


def test_a_run_records_the_runs_that_it_began_with(prepared_folder: Path, tmp_path: Path) -> None:
    prepared, short = open_prepared(prepared_folder), tiny(training={"max_updates": 1})
    run(short, prepared, tmp_path / "base")
    path = tmp_path / "base" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"imported_from": "Some/model"}), "utf-8")
    run(short, prepared, tmp_path / "one", init_from=Run(tmp_path / "base"))
    run(short, prepared, tmp_path / "two", init_from=Run(tmp_path / "one"))
    shutil.rmtree(tmp_path / "base")
    run(tiny(training={"max_updates": 2}), prepared, tmp_path / "two", init_from=Run(tmp_path / "one"))  # resumed
    one, base = ancestors(Run(tmp_path / "two"))
    assert (one["run"], one["imported_from"]) == ("one", None)
    assert (base["run"], base["imported_from"]) == ("base", "Some/model")
    assert any(line.endswith(" training pairs") for line in one["data"])


def test_a_resumed_run_gets_its_tokenizer_back(prepared: Prepared, tmp_path: Path) -> None:
    run(tiny(training={"max_updates": 1}), prepared, tmp_path / "one")
    (tmp_path / "one/tokenizer/joint.model").write_bytes(b"")
    run(tiny(training={"max_updates": 2}), prepared, tmp_path / "one")
    assert Run(tmp_path / "one").tokenizers.source.size == prepared.tokenizers.source.size


def test_a_measurement_replaces_no_record_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"format": 1')
    with pytest.raises(RunError, match=r"run\.json is damaged .*; repeat the command"):
        record(tmp_path, "precision", "float32")
    assert path.read_text() == '{"format": 1'
    path.write_text('{"format": 1}')
    record(tmp_path, "precision", "float32")
    assert json.loads(path.read_text()) == {"format": 1, "precision": "float32"}


def test_new_embeddings_begin_with_word_vectors_and_resumed_ones_do_not(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    piece = prepared.tokenizers.source.encode("the")[0]
    Path("v.vec").write_text("1 16\nthe " + " ".join(["0.5"] * 16), "utf-8")
    recipe = {"model": {"embeddings": {"source": "v.vec"}}, "training": {"max_updates": 1, "freeze": ["embeddings"]}}
    said: list[str] = []
    run(tiny(**recipe), prepared, tmp_path / "one", say=said.append)
    table = Run(tmp_path / "one").load_model().source_embedding.tokens.weight
    assert torch.allclose(table[piece], torch.full((16,), 0.25))  # length 1, and frozen
    assert said[1].startswith("source and target embeddings: ")
    assert " pieces " in said[1]
    (entry,) = Run(tmp_path / "one").about["embeddings"]
    assert (entry["side"], entry["file"], entry["vectors"], entry["scale"]) == ("both", "v.vec", 1, 0.5)
    assert "word vectors of initial embeddings: v.vec" in trained_on(Run(tmp_path / "one"))

    Path("v.vec").unlink()  # not needed to resume
    with pytest.raises(DiffersError, match=r"model\.embeddings: \{'source': 'v\.vec', 'target': None\} -> "):
        run(tiny(training={"max_updates": 2, "freeze": ["embeddings"]}), prepared, tmp_path / "one")
    run(tiny(**merged(recipe, {"training": {"max_updates": 2}})), prepared, tmp_path / "one")
    resumed = Run(tmp_path / "one")
    assert torch.equal(resumed.load_model("last").source_embedding.tokens.weight, table)
    assert resumed.about["embeddings"] == [entry]


def test_a_run_that_begins_with_another_keeps_the_trained_embeddings(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("v.vec").write_text("the " + " ".join(["0.5"] * 16), "utf-8")
    given = {"model": {"embeddings": {"source": "v.vec"}}, "training": {"max_updates": 1}}
    run(tiny(**given), prepared, tmp_path / "one")
    Path("v.vec").unlink()
    base = Run(tmp_path / "one")
    child = load_recipe(None, {"training": {**TINY["training"], "init_from": tmp_path / "one", "max_updates": 1}})
    assert child.model.embeddings is None
    assert child.model.d_model == 16
    run(child, prepared, tmp_path / "two", init_from=base)
    assert ancestors(Run(tmp_path / "two"))[0]["data"] == trained_on(base)
    with pytest.raises(RecipeError, match=r"either from the run .*one .* or from word vectors"):
        run(tiny(**given), prepared, tmp_path / "three", init_from=base)
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"model": {"tie": "none"}}, "output"),
        ({"model": {"encoder_layers": 2}}, "encoder.1"),
        ({"model": {"activation": "swiglu"}}, "decoder.0.feed_forward.gate, encoder.0.feed_forward.gate"),
        ({"attention": {"encoder": "linformer"}}, "encoder.0.attention.key_slots, encoder.0.attention.value_slots"),
        ({"attention": {"encoder": "talking-heads"}}, None),  # its mixes begin as identities
    ],
)
def test_the_parts_that_begin_at_random_are_printed(
    prepared: Prepared, tmp_path: Path, changed: dict[str, dict[str, Any]], parts: str | None
) -> None:
    few = {"training": {"max_updates": 1}}
    run(tiny(**few), prepared, tmp_path / "one")
    said: list[str] = []
    run(tiny(**few, **changed), prepared, tmp_path / "two", init_from=Run(tmp_path / "one"), say=said.append)
    lines = [line for line in said if "at random" in line]
    stem = f"these parts begin at random, because {tmp_path / 'one'} has no weights for them: "
    assert lines == ([] if parts is None else [stem + parts])


def test_embeddings_of_another_width_are_refused(prepared: Prepared, tmp_path: Path) -> None:
    run(tiny(training={"max_updates": 1}), prepared, tmp_path / "one")
    with pytest.raises(
        RecipeError, match=r"source embeddings have 32 numbers per piece, and in .*one they have 16; leave"
    ):
        run(tiny(model={"d_model": 32}), prepared, tmp_path / "two", init_from=Run(tmp_path / "one"))
    assert not (tmp_path / "two").exists()
