"""Training a part of a model: frozen parameters and adapters, from the first update to translation."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from mtkit.data.prepared import Prepared, open_prepared
from mtkit.decoding.files import translate_side
from mtkit.decoding.held_out import held_out
from mtkit.decoding.translator import Translator
from mtkit.errors import RecipeError, RunError
from mtkit.evaluation.scores import score_corpus
from mtkit.model.adaptation import adapt
from mtkit.model.build import build_model
from mtkit.recipe import Recipe, load_recipe
from mtkit.runs import Run
from mtkit.storage.weights import load_weights, read_tensors
from mtkit.training.checkpoint import verified_tensors
from mtkit.training.metrics import read_metrics
from tests.training.conftest import run, tiny
from tests.training.test_loop import assert_same_numbers

TARGETS = ["query", "value", "feed_forward"]
LAST = "update-00000008"
SHORT: dict[str, Any] = {"max_updates": 8, "validate_every": 4, "validate_segments": 2, "log_every": 2}


@pytest.fixture(scope="module")
def base(prepared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "base"
    run(tiny(training=SHORT | {"validate_every": 8}), open_prepared(prepared_folder), folder)
    return folder


def lora(base: Path, **training: Any) -> Recipe:
    adapters = {"rank": 2, "targets": TARGETS, "alpha": 4}
    return tiny(training={**SHORT, "init_from": str(base), "lora": adapters, **training})


@pytest.fixture(scope="module")
def adapted(base: Path, prepared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of adapters that nothing interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "adapted"
    run(lora(base, average_last=2), open_prepared(prepared_folder), folder)
    return folder


def stopped(recipe: Recipe, prepared: Prepared, folder: Path, at: int = 6) -> None:
    """Stops the training by a signal, and goes on with it."""

    def say(line: str) -> None:
        if line.startswith(f"update {at}/8"):
            signal.raise_signal(signal.SIGTERM)

    assert run(recipe, prepared, folder, say=say).trained == at
    assert run(recipe, prepared, folder).trained == 8 - at


def test_checkpoints_hold_adapters_alone_and_the_base_once(adapted: Path, base: Path) -> None:
    for name in ("model", "ema", "optimizer"):
        tensors = verified_tensors(adapted / "checkpoints" / LAST, name)
        assert {each.rpartition(".")[2] for each in tensors} == {"lora_a", "lora_b"}
    kept = verified_tensors(adapted / "checkpoints" / "base", "model")
    wanted = Run(base).load_model().state_dict()
    assert kept.keys() == wanted.keys()
    assert all(torch.equal(kept[name], wanted[name]) for name in wanted)
    sizes = [(adapted / f"checkpoints/{name}/model.safetensors").stat().st_size for name in (LAST, "base")]
    linear = 3 * 2 + 2 * 2  # of one encoder and one decoder layer
    assert sizes[0] < 4 * 2 * linear * 48 + 200 * 2 * linear
    assert sizes[0] < sizes[1] / 4


def test_the_loaded_model_is_plain_and_computes_what_was_trained(adapted: Path, prepared: Prepared, base: Path) -> None:
    found = Run(adapted)
    model = found.load_model("last")
    assert {type(each) for each in model.modules() if isinstance(each, nn.Linear)} == {nn.Linear}
    sizes = {side: prepared.tokenizers.source.size for side in ("source_vocabulary", "target_vocabulary")}
    unmerged = build_model(found.recipe, **sizes).eval()
    assert found.recipe.training.lora is not None
    adapt(unmerged, found.recipe.training.lora, seed=1)
    parts = [
        read_tensors(adapted / "checkpoints" / name) for name in ("base/model.safetensors", f"{LAST}/ema.safetensors")
    ]
    load_weights(unmerged, {**parts[0], **parts[1]}, adapted)
    source, target = (torch.randint(5, sizes["source_vocabulary"], (3, 7)) for _ in range(2))
    with torch.no_grad():
        ours, theirs, before = (
            each.logits(each(source, target).hidden) for each in (model, unmerged, Run(base).load_model())
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours, before, atol=1e-3)


def test_it_begins_as_the_base(base: Path, prepared: Prepared, tmp_path: Path) -> None:
    said: list[str] = []
    run(lora(base, max_updates=1, validate_every=1, peak_rate=1e-12), prepared, tmp_path / "run", say=said.append)
    same = tiny(training={"init_from": str(base), "max_updates": 1, "validate_every": 1, "peak_rate": 1e-12})
    run(same, prepared, tmp_path / "whole")
    first, whole = (
        [row["nll"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if row["kind"] == "validation"]
        for name in ("run", "whole")
    )
    assert first == pytest.approx(whole, abs=1e-6)
    count = sum(each.numel() for each in Run(base).load_model().parameters())
    trained = 2 * ((2 + 4) * (16 + 16) + 2 * 2 * (16 + 32))
    assert any(line.startswith(f"{trained:,} of {count + trained:,} parameters trained; ") for line in said)


def test_an_interrupted_run_of_adapters_is_the_unbroken_one(
    adapted: Path, base: Path, prepared: Prepared, tmp_path: Path
) -> None:
    stopped(lora(base, average_last=2), prepared, tmp_path / "adapted")
    assert_same_numbers(tmp_path / "adapted", adapted)
    averages = [verified_tensors(folder / "checkpoints/average", "model") for folder in (tmp_path / "adapted", adapted)]
    assert averages[0].keys() == averages[1].keys()
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    assert {each.rpartition(".")[2] for each in averages[0]} == {"lora_a", "lora_b"}


def test_what_a_run_without_a_checkpoint_left_is_not_taken_for_that_of_the_next(
    adapted: Path, prepared: Prepared, tmp_path: Path
) -> None:
    shutil.copytree(adapted, tmp_path / "again", ignore=shutil.ignore_patterns("update-*"))
    with pytest.raises(RunError, match="average is left from an earlier training"):
        run(tiny(training=SHORT), prepared, tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/average")
    assert {each.name for each in (tmp_path / "again/checkpoints").iterdir()} == {"base"}
    assert (tmp_path / "again/best.json").exists()
    stopped(tiny(training=SHORT), prepared, tmp_path / "again")
    run(tiny(training=SHORT), prepared, tmp_path / "new")
    assert_same_numbers(tmp_path / "again", tmp_path / "new")
    assert {each.name[:7] for each in (tmp_path / "again/checkpoints").iterdir()} == {"update-"}
    assert Run(tmp_path / "again").checkpoint().name.startswith("update-")


@pytest.mark.parametrize("checkpoint", ["average", LAST])
def test_the_scores_of_training_are_those_of_translation(adapted: Path, prepared: Prepared, checkpoint: str) -> None:
    """Also of a run that was moved."""
    moved = Run(shutil.copytree(adapted, adapted.parent / f"moved-{checkpoint}"))
    state = json.loads((moved.folder / "checkpoints" / checkpoint / "state.json").read_text())
    side = held_out(prepared, "valid").sample(2)
    translated, *_ = translate_side(Translator([moved], checkpoint=checkpoint, device="cpu"), side, joined=True)
    hypotheses = [each[0].text for each in translated]
    (bleu,) = score_corpus(hypotheses, [side.references], metrics=("BLEU",), bootstrap=0)
    assert state["bleu"] == bleu.value


def test_a_run_can_begin_with_one_of_adapters(adapted: Path, prepared: Prepared, tmp_path: Path) -> None:
    recipe = tiny(training={"init_from": str(adapted), "max_updates": 1, "peak_rate": 1e-12, "ema": 0.0})
    run(recipe, prepared, tmp_path)
    wanted, found = Run(adapted).load_model().state_dict(), Run(tmp_path).load_model().state_dict()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-7) for name in wanted)


def test_adapters_without_their_base_are_refused(adapted: Path, prepared: Prepared, base: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(adapted, tmp_path / "adapted")
    file = broken / "checkpoints/base/model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"1234")
    with pytest.raises(RunError, match=r"base/model\.safetensors is damaged.*copy .*/base again .*another --name"):
        run(lora(base, average_last=2, max_updates=9), prepared, broken)
    shutil.rmtree(file.parent)
    with pytest.raises(RunError, match=r"base/model\.safetensors is missing, .*copy it again"):
        Run(broken).load_model()


def test_frozen_parameters_stay_and_have_no_state(base: Path, prepared: Prepared, tmp_path: Path) -> None:
    said: list[str] = []
    frozen = {**SHORT, "freeze": ["embeddings", "encoder"], "init_from": str(base), "average_last": 2}
    recipe = tiny(training=frozen, attention={"decoder": "band"})
    run(recipe, prepared, tmp_path / "one", say=said.append)
    before, after = Run(base).load_model().state_dict(), Run(tmp_path / "one").load_model("last").state_dict()
    stays = ("source_embedding.", "target_embedding.", "encoder")
    assert {name for name in after if torch.equal(after[name], before[name])} == {
        name for name in after if name.startswith(stays)
    }
    moments = verified_tensors(tmp_path / "one/checkpoints" / LAST, "optimizer")
    assert not [name for name in moments if name.partition("/")[2].startswith(stays)]
    trained = sum(value.numel() for name, value in after.items() if not name.startswith(stays))
    assert any(line.startswith(f"{trained:,} of ") for line in said)
    stopped(recipe, prepared, tmp_path / "two")
    files = [(tmp_path / name / "checkpoints" / LAST).glob("*.safetensors") for name in ("one", "two")]
    for one, two in zip(*map(sorted, files), strict=True):
        first, second = read_tensors(one), read_tensors(two)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_r_drop_and_bfloat16_train_a_part(base: Path, prepared: Prepared, tmp_path: Path) -> None:
    few = {**SHORT, "max_updates": 2, "r_drop": 1.0, "precision": "bfloat16"}
    run(lora(base, **few), prepared, tmp_path / "adapted")
    whole = tiny(training={"freeze": "embeddings", **few})
    run(whole, prepared, tmp_path / "frozen")
    for name in ("adapted", "frozen"):
        losses = [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if row["kind"] == "train"]
        assert losses
        assert all(map(float, losses))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"lora": {"rank": 2}}, r"training\.lora needs a trained model; give --init-from RUN"),
        ({"lora": {}, "init_from": "base", "freeze": ["encoder"]}, r"leave training\.freeze out"),
        ({"lora": {"targets": ["querry"]}, "init_from": "base"}, r"training\.lora\.targets\.0 = 'querry'"),
        ({"lora": {"targets": []}, "init_from": "base"}, r"training\.lora\.targets"),
        ({"lora": {"rank": 0}, "init_from": "base"}, r"training\.lora\.rank"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises((RecipeError, ValidationError), match=message):
        tiny(training=training)


def test_a_wrong_name_is_refused_before_anything_is_written(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no parameters 'encodr' \(did you mean 'encoder'"):
        run(tiny(training={"freeze": ["encodr"]}), prepared, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("training", "model", "stuck"),
    [
        ({"lora": {"rank": 2}}, {"feed_forward": 16}, r"decoder\.0\.feed_forward\.inner\.bias, .* and 3 more"),
        ({"freeze": ["encoder"]}, {"encoder_layers": 2}, r"encoder\.1\.attention\.k_proj\.weight"),
    ],
    ids=["size", "layer"],
)
def test_frozen_parameters_that_the_run_does_not_have_are_refused(
    base: Path, prepared: Prepared, tmp_path: Path, training: dict[str, Any], model: dict[str, Any], stuck: str
) -> None:
    recipe = tiny(training={**SHORT, "init_from": str(base), **training}, model=model)
    with pytest.raises(RecipeError, match=f"keeps {stuck}.* at random values.*leave out preset and model"):
        run(recipe, prepared, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("training", [{"lora": {"rank": 2}}, {"freeze": ["encoder"]}], ids=["lora", "freeze"])
def test_frozen_attention_weights_that_the_run_does_not_have_are_refused(
    base: Path, prepared: Prepared, tmp_path: Path, training: dict[str, Any]
) -> None:
    recipe = tiny(training={**SHORT, "init_from": str(base), **training}, attention={"encoder": "luna"})
    with pytest.raises(
        RecipeError, match=r"keeps encoder\.0\.attention\.packed_q_proj\.weight, .*keep the attention of"
    ):
        run(recipe, prepared, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("training", [{"lora": {"rank": 2}}, {"freeze": ["encoder"]}], ids=["lora", "freeze"])
def test_a_convolution_that_would_stay_at_zero_is_refused(
    base: Path, prepared: Prepared, tmp_path: Path, training: dict[str, Any]
) -> None:
    attention = {"options": {"nearby": "convolution"}}
    recipe = tiny(training={**SHORT, "init_from": str(base), **training}, attention=attention)
    with pytest.raises(RecipeError, match=r"keeps encoder\.0\.attention\.nearby\.weight.* at zero.*leave out nearby"):
        run(recipe, prepared, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    whole = tiny(
        training={**SHORT, "max_updates": 1, "init_from": str(base), "freeze": ["decoder"]}, attention=attention
    )
    run(whole, prepared, tmp_path / "run")


def test_model_and_attention_are_those_of_the_run_unless_others_are_named(base: Path) -> None:
    def begun(**given: Any) -> Recipe:
        return load_recipe(None, {"training": {"init_from": str(base)}, **given})

    whole = load_recipe(base / "recipe.yaml")
    assert begun().model == whole.model
    assert begun(model={"dropout": 0.3}).model == whole.model.model_copy(update={"dropout": 0.3})
    assert begun(preset="small").model.d_model == 256
    assert begun().attention == whole.attention
    assert begun(attention={"name": "longformer", "encoder": None}).attention.name == "longformer"
    assert begun(attention={"options": {"positions": "rotary"}}).attention.options == {"positions": "rotary"}
    assert load_recipe(None, {"training": {"init_from": "nobody"}}).model.d_model == 128
