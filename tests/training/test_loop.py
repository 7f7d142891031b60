import importlib.util
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.data.epochs import plan
from mtkit.data.prepared import Prepared
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.lines.source import SourceLines, TrainedOn
from mtkit.decoding.translate import translate_lines
from mtkit.errors import RunError
from mtkit.evaluation.scores import score_corpus
from mtkit.model.transformer import Transformer
from mtkit.recipe import load_recipe, merged
from mtkit.runs import Run
from mtkit.text.model_file import ModelFile
from mtkit.training import loop
from mtkit.training.checkpoint import read_progress, verified_tensors
from mtkit.training.metrics import read_metrics
from mtkit.training.run_folder import lock_folder
from tests.training.conftest import run, tiny


def last_tensors(folder: Path) -> dict[str, Tensor]:
    """All numbers of the last checkpoint."""
    last = sorted((folder / "checkpoints").glob("update-*"))[-1]
    return {
        f"{name}/{key}": value
        for name in ("model", "optimizer", "ema")
        for key, value in verified_tensors(last, name).items()
    }


def assert_same_numbers(one: Path, other: Path) -> None:
    first, second = last_tensors(one), last_tensors(other)
    assert first.keys() == second.keys()
    assert not [name for name in first if not torch.equal(first[name], second[name])]


@pytest.fixture(scope="module")
def finished(prepared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    from mtkit.data.prepared import open_prepared

    folder = tmp_path_factory.mktemp("runs") / "whole"
    outcome = run(tiny(), open_prepared(prepared_folder), folder)
    assert (outcome.trained, outcome.limit) == (24, "max_updates = 24")
    return folder


def test_training_lowers_the_loss(finished: Path) -> None:
    validations = [row["nll"] for row in read_metrics(finished / "metrics.jsonl") if row["kind"] == "validation"]
    assert len(validations) == 3
    assert validations[-1] < validations[0] - 0.1


def test_the_run_folder_holds_what_translation_and_people_need(finished: Path, prepared: Prepared) -> None:
    recipe = load_recipe(finished / "recipe.yaml")
    assert recipe.training == tiny().training
    assert recipe.data.builtin.train == 200
    about = json.loads((finished / "run.json").read_text())
    assert about["commands"] == ["mtkit train 'it'\"'\"'s'"]
    assert {"format", "mtkit", "torch", "python", "data", "vocabularies", "tokenizer"} <= about.keys()
    for tokenizers in (Run(finished).tokenizers, prepared.tokenizers):
        assert tokenizers.source.encode("Ｄａｓ Ｈａｕｓ") == prepared.tokenizers.target.encode("Das Haus")
        assert tokenizers.target.decode(tokenizers.target.encode("Ｄａｓ")) == "Ｄａｓ"
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    if importlib.util.find_spec("tensorboard"):
        assert list((finished / "tensorboard").iterdir())
    trained = [row for row in read_metrics(finished / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["update"] for row in trained] == [4, 8, 12, 16, 20, 24]
    assert {"loss", "nll", "rate", "gradient_norm", "tokens_per_second", "data_wait", "seconds"} <= trained[0].keys()


def test_another_tokenizer_of_the_same_size_is_refused(finished: Path, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(finished, tmp_path / "run")))
    path = run.folder / "tokenizer" / "joint.model"
    model = ModelFile.read(path.read_bytes())
    *others, first, second = model.pieces
    path.write_bytes(replace(model, pieces=(*others, second, first)).written())
    with pytest.raises(RunError, match="is not the one it was trained with"):
        run.tokenizers  # noqa: B018


def test_the_entropy_of_attention_is_in_the_metrics_on_request(prepared: Prepared, tmp_path: Path) -> None:
    for name, segments in (("with", 3), ("without", 0)):
        run(tiny(training={"max_updates": 8, "attention_entropy": segments}), prepared, tmp_path / name)
    rows = {
        name: [row for row in read_metrics(tmp_path / name / "metrics.jsonl") if row["kind"] == "validation"]
        for name in ("with", "without")
    }
    names = {f"entropy_{role}_1_{head}" for role in ("encoder", "decoder", "cross") for head in (1, 2)}
    assert rows["with"][0].keys() - rows["without"][0].keys() == names
    assert rows["with"][0]["nll"] == rows["without"][0]["nll"]
    assert all(rows["with"][0][name] > 0 for name in names)


def test_validation_bleu_is_that_of_translate_and_score_with_the_best_checkpoint(
    finished: Path, prepared: Prepared
) -> None:
    best, found = json.loads((finished / "best.json").read_text()), Run(finished)
    assert prepared.valid.source_text is not None
    assert prepared.valid.target_text is not None
    engine, lines = ModelEngine(found.load_model(), found.recipe.decoding), prepared.valid.source_text[:4]
    translations = translate_lines(engine, found.tokenizers, SourceLines(lines, trained_on=TrainedOn.of([found])))
    references = [prepared.valid.target_text[:4]]
    bleu = score_corpus([each[0].text for each in translations], references, metrics=("BLEU",), bootstrap=0)[0]
    assert best["bleu"] == bleu.value
    averaged = verified_tensors(finished / "checkpoints" / best["checkpoint"], "ema")
    assert torch.equal(found.load_model().output_weight, averaged["target_embedding.tokens.weight"])


def test_validation_translates_with_the_weights_of_the_moment(prepared: Prepared, tmp_path: Path) -> None:
    said: list[str] = []
    run(tiny(training={"ema": 0.0, "peak_rate": 0.03}), prepared, tmp_path, say=said.append)
    lines = [line for line in "\n".join(said).split("\n") if line.lstrip().startswith("translation")]
    shown = [line.split("translation", 1)[1].strip() for line in lines[-len(lines) // 3 :]]
    found = Run(tmp_path)
    assert prepared.valid.source_text is not None
    engine = ModelEngine(found.load_model("last"), found.recipe.decoding)
    sources = prepared.valid.source_text[: len(shown)]
    again = translate_lines(engine, found.tokenizers, SourceLines(sources, trained_on=TrainedOn.of([found])))
    assert [each[0].text.strip() for each in again] == shown


def test_a_finished_run_says_so_and_goes_on_with_a_higher_limit(
    finished: Path, prepared: Prepared, tmp_path: Path
) -> None:
    said: list[str] = []
    folder = tmp_path / "run"
    run(tiny(training={"max_updates": 16}), prepared, folder)
    again = run(tiny(training={"max_updates": 16}), prepared, folder, say=said.append)
    assert (again.trained, again.limit) == (0, "max_updates = 16")
    assert any("was finished already" in line and "raise that limit" in line for line in said)
    longer = run(tiny(training={"max_updates": 24}), prepared, folder)
    assert longer.trained == 8
    assert load_recipe(folder / "recipe.yaml").training.max_updates == 24
    assert len(json.loads((folder / "run.json").read_text())["commands"]) == 3
    assert_same_numbers(folder, finished)


def test_other_settings_under_the_same_name_are_refused_with_the_differences(
    finished: Path, prepared: Prepared, tmp_path: Path
) -> None:
    before = (finished / "recipe.yaml").read_bytes()
    with pytest.raises(RunError) as error:
        run(tiny(training={"peak_rate": 0.5}, model={"dropout": 0.0}), prepared, finished)
    for text in ("training.peak_rate: 0.01 -> 0.5", "model.dropout: 0.2 -> 0.0", "another --name"):
        assert text in str(error.value)
    assert (finished / "recipe.yaml").read_bytes() == before
    with pytest.raises(RunError, match=r"init_from: None -> whole"):
        run(tiny(), prepared, finished, init_from=Run(finished))


@pytest.mark.parametrize("moment", ["update 4/24", "update 8: validation"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_goes_on_bit_for_bit(
    finished: Path, prepared: Prepared, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith(moment):
            signal.raise_signal(number)

    first = run(tiny(), prepared, tmp_path, say=say)
    assert (first.signal, first.limit) == (number, None)
    assert first.trained < 24
    assert "the same command resumes" in said[-1]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    second = run(tiny(), prepared, tmp_path)
    assert first.trained + second.trained == 24
    assert_same_numbers(tmp_path, finished)
    updates = [row["update"] for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "validation"]
    assert updates == [8, 16, 24]


def test_a_resumed_run_draws_the_pieces_that_an_unbroken_one_does(
    finished: Path, prepared: Prepared, tmp_path: Path
) -> None:
    recipe = tiny(training={"subword_dropout": 0.2, "validate_segments": 1})
    whole = run(recipe, prepared, tmp_path / "whole")
    said: list[str] = []

    def say(line: str) -> None:
        if line.startswith("update 12/24"):
            signal.raise_signal(signal.SIGTERM)
        said.append(line)

    assert run(recipe, prepared, tmp_path / "broken", say=say).trained == 12
    assert read_progress(tmp_path / "broken/checkpoints/update-00000012").bleu is None, (
        "that of update 8 is not its own"
    )
    assert run(recipe, prepared, tmp_path / "broken").trained == 12
    assert_same_numbers(tmp_path / "whole", tmp_path / "broken")
    plain = read_progress(finished / "checkpoints" / "update-00000024")
    assert whole.progress.tokens > plain.tokens, "dropped merges make more tokens"
    assert whole.progress.batch == plain.batch, "of the same batches"


@pytest.mark.parametrize(
    "groups",
    [
        {"model": {"architecture": "rnn", "cell": "gru"}},
        {"model": {"architecture": "rnn", "cell": "lstm"}},
        {"training": {"optimizer": "muon", "weight_decay": 0.1}},
    ],
)
def test_other_models_and_optimizers_resume_bit_for_bit(
    prepared: Prepared, tmp_path: Path, groups: dict[str, dict[str, Any]]
) -> None:
    recipe = tiny(**merged({"training": {"validate_segments": 1}}, groups))
    run(recipe, prepared, tmp_path / "whole")

    def say(line: str) -> None:
        if line.startswith("update 12/24"):
            signal.raise_signal(signal.SIGTERM)

    assert run(recipe, prepared, tmp_path / "broken", say=say).trained == 12
    assert run(recipe, prepared, tmp_path / "broken").trained == 12
    assert_same_numbers(tmp_path / "whole", tmp_path / "broken")


def test_a_signal_during_validation_is_obeyed_and_the_validation_made_up_for(
    finished: Path, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, on_progress: Any = None, **options: Any) -> Any:
        if on_progress is None:  # the dry run before the first update
            return translate_lines(*arguments, **options)
        signal.raise_signal(signal.SIGTERM)
        return on_progress(1)

    with monkeypatch.context() as patch:
        patch.setattr("mtkit.training.validation.translate_lines", interrupted)
        assert run(tiny(), prepared, tmp_path).trained == 8
    assert read_progress(tmp_path / "checkpoints" / "update-00000008").bleu is None
    run(tiny(), prepared, tmp_path)
    assert_same_numbers(tmp_path, finished)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["update"] for row in rows if row["kind"] == "validation"] == [8, 16, 24]


def test_a_loss_that_is_not_finite_stops_keeps_the_checkpoint_and_names_the_lines(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = Transformer.forward, 0

    def poisoned(self: Transformer, *arguments: Any, **options: Any) -> Any:
        nonlocal calls
        output = forward(self, *arguments, **options)
        calls += self.training
        output.hidden = output.hidden * (float("nan") if calls == 11 and self.training else 1.0)
        return output

    monkeypatch.setattr(Transformer, "forward", poisoned)
    with pytest.raises(RunError) as error:
        run(tiny(), prepared, tmp_path)
    recipe = tiny()
    rows = plan(prepared.train, batch_tokens=200, max_length=recipe.model.max_length, seed=recipe.seed, epoch=0)[10]
    lines = ", ".join(str(line) for line in sorted(prepared.train.lines[rows]))
    assert f"update 11, which trains on lines {lines} of" in str(error.value)
    assert "train.en" in str(error.value)
    assert "update-00000008" in str(error.value)
    assert "\n" not in str(error.value)
    last = tmp_path / "checkpoints" / "update-00000008"
    assert all(value.isfinite().all() for value in verified_tensors(last, "model").values())


@pytest.mark.parametrize(
    ("limits", "ended"),
    [
        ({"max_epochs": 2, "max_updates": None}, "max_epochs = 2"),
        ({"max_minutes": 0.02, "max_updates": None}, "max_minutes = 0.02"),
        ({"patience": 1, "validate_every": 1, "least_improvement": 50.0}, "patience = 1"),
    ],
)
def test_every_limit_ends_training(prepared: Prepared, tmp_path: Path, limits: dict[str, Any], ended: str) -> None:
    recipe = tiny(training={"validate_every": 1_000, "validate_segments": 1, "ema": 0.0, **limits})
    outcome = run(recipe, prepared, tmp_path)
    assert outcome.limit == ended
    if "max_epochs" in limits:
        batches = [plan(prepared.train, batch_tokens=200, max_length=1024, seed=1, epoch=epoch) for epoch in (0, 1)]
        assert outcome.progress.update == sum(map(len, batches))
        assert (outcome.progress.epoch, outcome.progress.batch) == (2, 0)
        lengths = prepared.train.target.lengths
        assert outcome.progress.tokens == 2 * int(lengths.sum() + len(lengths))


def test_accumulated_epochs_end_with_the_batches_that_are_left(prepared: Prepared, tmp_path: Path) -> None:
    batches = len(plan(prepared.train, batch_tokens=200, max_length=1024, seed=1, epoch=0))
    recipe = tiny(training={"accumulate": 7, "max_epochs": 1, "max_updates": None, "validate_every": 99})
    outcome = run(recipe, prepared, tmp_path)
    assert outcome.progress.update == -(-batches // 7)
    assert outcome.progress.tokens == int(prepared.train.target.lengths.sum()) + len(prepared.train)


def test_the_average_of_the_last_checkpoints_is_validated(prepared: Prepared, tmp_path: Path) -> None:
    said: list[str] = []
    recipe = tiny(training={"average_last": 2, "keep_last": 1})
    run(recipe, prepared, tmp_path, say=said.append)
    assert any(line.startswith("average of updates 16, 24: validation loss") for line in said)
    states = [verified_tensors(tmp_path / "checkpoints" / f"update-000000{update}", "ema") for update in (16, 24)]
    average = verified_tensors(tmp_path / "checkpoints" / "average", "model")
    name = "target_embedding.tokens.weight"
    torch.testing.assert_close(average[name], (states[0][name] + states[1][name]) / 2)
    assert Run(tmp_path).load_model("average").output_weight.equal(average[name])
    said.clear()
    run(tiny(training={"average_last": 1, "keep_last": 1}), prepared, tmp_path, say=said.append)
    assert any(line.startswith("average of updates 24: validation loss") for line in said), "another average is wanted"


def test_a_new_run_can_begin_with_the_weights_of_another(finished: Path, prepared: Prepared, tmp_path: Path) -> None:
    recipe = tiny(training={"max_updates": 1, "peak_rate": 1e-12})
    run(recipe, prepared, tmp_path, init_from=Run(finished))
    wanted = Run(finished).load_model().output_weight
    name = "target_embedding.tokens.weight"
    for file in ("model", "ema"):
        found = verified_tensors(tmp_path / "checkpoints" / "update-00000001", file)[name]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-9)


def test_what_of_another_run_does_not_fit_is_said(finished: Path, prepared: Prepared, tmp_path: Path) -> None:
    said: list[str] = []
    wider = tiny(training={"max_updates": 1}, model={"feed_forward": 48})
    run(wider, prepared, tmp_path, init_from=Run(finished), say=said.append)
    (line,) = [each for each in said if "are not copied" in each]
    assert "feed_forward.inner.weight" in line


def test_the_weights_of_another_vocabulary_are_refused(finished: Path, prepared: Prepared, tmp_path: Path) -> None:
    other = shutil.copytree(finished, tmp_path / "other")
    (other / "tokenizer" / "joint.model").write_bytes(b"others")
    with pytest.raises(RunError, match="has another vocabulary"):
        run(tiny(), prepared, tmp_path / "run", init_from=Run(other))
    assert run(tiny(training={"max_updates": 1}), prepared, tmp_path / "run").trained == 1  # as the message says


def test_two_trainings_do_not_share_a_folder(prepared: Prepared, tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(RunError, match="another training is at work"):
        run(tiny(), prepared, tmp_path)


def test_a_signal_while_the_last_checkpoints_are_averaged_is_no_end(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, averaged = tiny(training={"average_last": 2, "max_updates": 16}), loop.Checkpoints.mean_of_last

    def told_to_stop(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return averaged(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Checkpoints, "mean_of_last", told_to_stop)
        outcome = run(recipe, prepared, tmp_path)
    assert (outcome.limit, outcome.signal) == (None, signal.SIGTERM)
    assert not (tmp_path / "checkpoints" / "average").exists()
    assert run(recipe, prepared, tmp_path).signal is None
    assert (tmp_path / "checkpoints" / "average").exists()
