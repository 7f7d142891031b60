"""Validation: what it lacks shows before the first update, and a fault in it loses nothing."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.data.lengths import lengths_of
from mtkit.data.prepared import Prepared
from mtkit.decoding.lines.source import SourceLines, TrainedOn
from mtkit.decoding.translate import translate_lines
from mtkit.errors import MtkitError, RunError
from mtkit.evaluation.scores import Score, score_corpus
from mtkit.model.build import build_model
from mtkit.model.transformer import Transformer
from mtkit.runs import Run
from mtkit.training import validation
from mtkit.training.checkpoint import Progress, read_state
from mtkit.training.metrics import Metrics, read_metrics
from mtkit.training.precision import Precision
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.training.conftest import run, tiny

CPU = torch.device("cpu")


def states(folder: Path) -> dict[str, Any]:
    return {path.name: read_state(path) for path in sorted((folder / "checkpoints").glob("update-*"))}


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"scoring": {"tokenize": "zhh"}}, "no tokenizer 'zhh'"),
        ({"decoding": {"coverage_penalty": 0.2}}, "set it to 0 with method greedy"),
        (
            {"decoding": {"method": "beam", "coverage_penalty": 0.2}, "attention": {"cross": "linear"}},
            "needs attention weights",
        ),
    ],
)
def test_what_validation_lacks_is_said_before_the_first_update(
    prepared: Prepared, tmp_path: Path, groups: dict[str, Any], says: str
) -> None:
    with pytest.raises(MtkitError, match=says):
        run(tiny(**groups), prepared, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_fault_in_validation_loses_no_update_and_its_settings_can_be_corrected(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(hypotheses: list[str], *arguments: Any, tokenize: str | None, **options: Any) -> list[Score]:
        if len(hypotheses) > 1 and tokenize != "char":
            raise MtkitError("no such tokenizer after all")
        return score_corpus(hypotheses, *arguments, tokenize=tokenize, **options)

    monkeypatch.setattr(validation, "score_corpus", fails)
    with pytest.raises(MtkitError, match="after all"):
        run(tiny(), prepared, tmp_path)
    assert list(states(tmp_path)) == ["update-00000008"]
    corrected = tiny(scoring={"tokenize": "char"}, decoding={"method": "beam", "beam": 2})
    assert run(corrected, prepared, tmp_path).trained == 16
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "validation"]
    assert [row["update"] for row in rows] == [8, 16, 24]
    assert all("tok:char" in row["signature"] for row in rows)


def test_scores_by_other_settings_count_neither_for_the_best_nor_for_patience(
    prepared: Prepared, tmp_path: Path
) -> None:
    recipe = {"max_updates": 16, "average_last": 2, "patience": 9}
    run(tiny(training=recipe), prepared, tmp_path)
    first = tmp_path / "checkpoints" / "update-00000008" / "state.json"
    first.write_text(json.dumps(json.loads(first.read_text()) | {"score": 99.0}))
    last = tmp_path / "checkpoints" / "update-00000016" / "state.json"
    last.write_text(json.dumps(json.loads(last.read_text()) | {"best_score": 99.0, "stale": 8}))
    said: list[str] = []
    other = tiny(training=recipe | {"max_updates": 24}, scoring={"tokenize": "char"})
    assert run(other, prepared, tmp_path, say=said.append).trained == 8
    assert sum("are not comparable" in line for line in said) == 1
    found = states(tmp_path)
    mine = {name: found[name]["bleu"] for name in ("update-00000016", "update-00000024")}
    mine["average"] = read_state(tmp_path / "checkpoints" / "average")["bleu"]
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["bleu"], mine[best["checkpoint"]]) == (max(mine.values()),) * 2
    assert found["update-00000024"]["best_score"] == max(mine["update-00000016"], mine["update-00000024"])
    said.clear()
    roomier = tiny(training=recipe | {"max_updates": 24}, scoring={"tokenize": "char"}, decoding={"batch_tokens": 99})
    run(roomier, prepared, tmp_path, say=said.append)
    assert not [line for line in said if "are not comparable" in line or "validation loss" in line]


@pytest.mark.parametrize("best_by", ["chrf", "exact", "ter", "loss"])
def test_the_best_checkpoint_is_chosen_by_the_score_that_the_recipe_names(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best_by: str
) -> None:
    monkeypatch.setattr(Metrics, "draw", lambda self: None)  # it is slow
    monkeypatch.setattr(validation, "score_corpus", rated)
    said: list[str] = []
    training = {"max_updates": 4, "validate_every": 1, "keep_last": 9, "average_last": 2}
    run(tiny(training=training), prepared, tmp_path)
    assert json.loads((tmp_path / "best.json").read_text()).keys() == {"checkpoint", "bleu"}
    run(tiny(training=training | {"max_updates": 6, "best_by": best_by}), prepared, tmp_path, say=said.append)
    assert any("or another training.best_by, and are not comparable" in line for line in said)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "validation"]
    key, judged = "nll" if best_by == "loss" else best_by, [row for row in rows if row["best_by"] == best_by]
    assert [row["update"] for row in judged] == [4, 5, 6], "the last one anew"
    best = json.loads((tmp_path / "best.json").read_text())
    values = [row[key] for row in judged] + [read_state(tmp_path / "checkpoints" / "average")["score"]]
    assert best[best_by] == (min if best_by in ("loss", "ter") else max)(values)
    if best_by != "loss":
        assert judged[0][f"{best_by}_signature"] == "signed"
        assert any(f"{best_by}s {values[0]:.2f}" in line for line in said)


def rated(hypotheses: list[str], *_: Any, metrics: tuple[str, ...], **options: Any) -> list[Score]:
    """Scores that differ from call to call."""
    return [Score(f"{name}s", float(next(ROLLS)), "signed") for name in metrics]


ROLLS = itertools.cycle([3, 1, 4, 1, 5, 9, 2, 6])


def test_an_average_is_validated_anew_where_scores_are_made_by_other_settings(
    prepared: Prepared, tmp_path: Path
) -> None:
    training = {"max_updates": 16, "average_last": 2}
    run(tiny(training=training), prepared, tmp_path)
    run(tiny(training=training, scoring={"lowercase": True}), prepared, tmp_path)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "validation"]
    assert [row["update"] for row in rows] == [8, 16, 16]
    judged = {read_state(path)["judged_by"] for path in (tmp_path / "checkpoints").glob("[au]*[6e]")}
    assert len(judged) == 1, "the last checkpoint and the average"


def test_what_changes_the_weights_stays_once_there_is_a_checkpoint(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RunError("the memory does not hold it")

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "run", fails)
        with pytest.raises(RunError, match="does not hold it"):
            run(tiny(), prepared, tmp_path)
    smaller = tiny(training={"batch_tokens": 100, "max_updates": 8})
    assert run(smaller, prepared, tmp_path).trained == 8
    with pytest.raises(RunError, match="batch_tokens: 100 -> 200"):
        run(tiny(), prepared, tmp_path)


def test_the_loss_of_batches_that_memory_does_not_hold_is_summed_over_their_halves(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = prepared.tokenizers.target.size
    model = build_model(tiny(), source_vocabulary=size, target_vocabulary=size).eval()
    precision = Precision("float32", CPU)
    whole = validation.validation_loss(model, tiny(), prepared, precision, World("cpu"))
    forward, sizes = Transformer.forward, list[int]()

    def short(self: Transformer, source: Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(len(source))
        if len(source) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, source, *arguments, **options)

    monkeypatch.setattr(Transformer, "forward", short)
    assert validation.validation_loss(model, tiny(), prepared, precision, World("cpu")) == pytest.approx(whole)
    assert max(sizes) > 2


def test_translations_go_by_the_training_pairs_as_those_of_the_tool_do(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TrainedOn] = []

    def translated(engine: Any, tokenizers: Any, lines: SourceLines, **options: Any) -> Any:
        seen.extend([lines.trained_on] if lines.trained_on.models else [])
        return translate_lines(engine, tokenizers, lines, **options)

    monkeypatch.setattr(validation, "translate_lines", translated)
    run(tiny(training={"max_updates": 1, "validate_every": 1, "average_last": 1}), prepared, tmp_path / "run")
    assert (
        seen == [TrainedOn([[*lengths_of(prepared, 1024).values()]])] * 2 == [TrainedOn.of([Run(tmp_path / "run")])] * 2
    )


def test_scores_compare_only_if_all_settings_that_change_them_are_equal() -> None:
    others: list[dict[str, Any]] = [
        *({"decoding": {"method": "beam", **more}} for more in ({}, {"beam": 3}, {"length_penalty": 0.5})),
        *({"decoding": more} for more in ({"no_repeat_ngram": 3}, {"max_pieces": 9}, {"seed": 2})),
        *({"scoring": more} for more in ({"lowercase": True}, {"tokenize": "char"})),
        {"data": {"target_language": "zh"}},
    ]
    found = [validation.scoring_fingerprint(tiny(**other)) for other in ({}, *others)]
    assert len(set(found)) == len(found)
    for same in ({"decoding": {"batch_tokens": 7}}, {"scoring": {"metrics": ["chrF"]}}):
        assert validation.scoring_fingerprint(tiny(**same)) == found[0]


def test_scores_by_other_settings_are_forgotten_with_all_that_follows_from_them() -> None:
    scores = {"bleu": 3.0, "nll": 1.0, "score": 3.0, "best_score": 5.0, "best_nll": 2.0, "patience_score": 4.0}
    progress = Progress(update=8, epoch=2, validated=8, stale=4, judged_by="other", **scores)
    said: list[str] = []
    judged = validation.scoring_fingerprint(tiny())
    assert validation.with_comparable_scores(progress, tiny(), said.append) == Progress(
        update=8, epoch=2, judged_by=judged
    )
    assert len(said) == 1


def test_a_validation_holds_no_gradients_and_returns_the_memory_of_training(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, loss = list[object](), validation.validation_loss

    def watched(model: Transformer, *others: Any) -> float:
        events.append([name for name, parameter in model.named_parameters() if parameter.grad is not None])
        return loss(model, *others)

    monkeypatch.setattr(validation, "validation_loss", watched)
    monkeypatch.setattr(validation, "release_freed_memory", lambda: events.append("released"))
    run(tiny(training={"max_updates": 2, "validate_every": 2}), prepared, tmp_path / "run")
    assert events == ["released", [], "released"]


def test_any_loss_is_better_than_one_that_is_not_a_number(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([float("nan"), 3.0, 2.0])
    monkeypatch.setattr(validation, "validation_loss", lambda *_: next(losses))
    outcome = run(tiny(training={"best_by": "loss"}), prepared, tmp_path)
    assert [state["score"] for state in states(tmp_path).values()] == [None, 3.0, 2.0]
    assert outcome.progress.best_score == 2.0
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "update-00000024"
