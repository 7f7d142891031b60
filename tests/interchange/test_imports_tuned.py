"""Imported models trained on: with other text in their pieces, another attention, and adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.decoding.translator import Translator
from mtkit.interchange.exports import export_run
from mtkit.interchange.imports import import_marian
from mtkit.recipe import load_recipe
from mtkit.recipe.data import DataSettings
from mtkit.runs import Run
from mtkit.training.train import train

pytest.importorskip("transformers")

from tests.interchange.text import ENGLISH, OTHERS, SOURCES, sentences
from tests.interchange.theirs import LIMIT, load_theirs, save_theirs

SENTENCES = [line for line in SOURCES if line != "Two sentences. In one line!"]
"""Lines that a run does not split, which knows the lengths of its training lines."""


def text(place: Path, run: Run, **more: str) -> Prepared:
    """Lines in the pieces of a run, prepared."""
    corpora = {}
    for side, count in (("train", 60), ("valid", 6)):
        corpora[side] = {"source": str(place / f"{side}.source"), "target": str(place / f"{side}.target")}
        for end, words in (("source", ENGLISH), ("target", OTHERS)):
            Path(corpora[side][end]).write_text("".join(f"{line}\n" for line in sentences(words, count, len(side))))
    prepare(DataSettings.model_validate({"folder": place / "data", "tokenizer_from": run.folder, **corpora, **more}))
    return open_prepared(place / "data")


def tuned(place: Path, run: Run, prepared: Prepared, attention: str | None = None, **training: Any) -> Run:
    """The run after a few updates, its settings as `mtkit train --init-from` takes them."""
    few = {"max_updates": 2, "validate_segments": 1, "precision": "float32", "batch_tokens": 400}
    given: dict[str, Any] = {
        "training": {**few, "init_from": str(run.folder), **training},
        "decoding": {"max_pieces": 40},
    }
    recipe = load_recipe(None, given | ({"attention": {"name": attention}} if attention else {}))
    assert recipe.model == run.recipe.model
    train(recipe, prepared, place / "tuned", command=["mtkit"], device="cpu")
    return Run(place / "tuned")


def texts(run: Run, settings: Run, **way: str) -> list[str]:
    found = Translator([run], settings.recipe.decoding, engine="mtkit", device="cpu").translate(SENTENCES, **way)
    return [each[0].text for each in found]


@pytest.mark.parametrize("kind", [{}, {"separate": True}, {"norm": "pre"}, {"tags": (">>jpn<<", ">>deu<<")}])
def test_training_begins_where_the_imported_model_is(kind: dict[str, Any], tmp_path: Path) -> None:
    imported = import_marian(save_theirs(tmp_path / "theirs", **kind), tmp_path / "opus").run
    languages = {"source_language": "en", "target_language": "jpn"} if "tags" in kind else {}
    prepared = text(tmp_path, imported, **languages)
    assert prepared.tokenizers.joint == imported.tokenizers.joint
    same = tuned(tmp_path, imported, prepared, peak_rate=1e-12)
    theirs, ours = imported.load_model().state_dict(), same.load_model().state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-7) for name in theirs)
    # also where the data has one of the model's directions: its tag stays
    assert texts(same, imported) == texts(imported, imported, **({"direction": "en-jpn"} if languages else {}))


def test_another_attention_and_adapters_train_it(tmp_path: Path) -> None:
    imported = import_marian(save_theirs(tmp_path / "theirs"), tmp_path / "opus").run
    adapters = {"rank": 2, "targets": ["query", "value", "feed_forward"]}
    found = tuned(tmp_path, imported, text(tmp_path, imported), "longformer", lora=adapters)
    kept, now = imported.load_model().state_dict(), found.load_model("last").state_dict()
    changed = {name.rpartition(".")[0].rpartition(".")[2] for name in kept if not torch.equal(kept[name], now[name])}
    assert changed == {"q_proj", "v_proj", "inner", "outer"}
    assert len(texts(found, imported)) == len(SENTENCES)


@pytest.mark.parametrize("to", ["huggingface", "ctranslate2"])
def test_adapters_go_out_merged(to: str, tmp_path: Path) -> None:
    if to == "ctranslate2":
        pytest.importorskip("ctranslate2")
    imported = import_marian(save_theirs(tmp_path / "theirs"), tmp_path / "opus").run
    adapters = {"rank": 2, "targets": ["query", "key", "value", "output", "feed_forward"]}
    found = tuned(tmp_path, imported, text(tmp_path, imported), lora=adapters, peak_rate=0.1)
    made = export_run(found, to, tmp_path / "out", checkpoint="last")
    assert made.agreement is not None
    assert made.agreement.lines > 20
    assert not made.agreement.differing
    if to == "huggingface":
        out, theirs = (load_theirs(tmp_path / each)[0].state_dict() for each in ("out", "theirs"))
        assert out.keys() == theirs.keys()
        greedy = {"method": "greedy", "max_pieces": LIMIT - 1, "no_repeat_ngram": 2}
        settings = found.recipe.decoding.model_validate(greedy)
        lines = SENTENCES[:30]
        ours = Translator([found], settings, engine="mtkit", device="cpu").translate(lines)
        before = Translator([imported], settings, engine="mtkit", device="cpu").translate(lines)
        assert [each[0].text for each in ours] != [each[0].text for each in before]
