"""Trainings that are limited by target tokens and by FLOPs."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.data.prepared import Prepared, open_prepared
from mtkit.product_rate import Rate
from mtkit.recipe import Recipe, make_recipe
from mtkit.training import loop
from mtkit.training.checkpoint import read_progress
from mtkit.training.flops import flops_per_token
from mtkit.training.metrics import read_metrics
from mtkit.training.train import train
from tests.processes import together
from tests.training.conftest import TINY, run, tiny
from tests.training.test_loop import assert_same_numbers

BUDGET = {"max_updates": None, "ema": 0.0, "validate_every": 1_000, "log_every": 1}


def tokens_of(folder: Path) -> list[int]:
    """The target tokens after each update."""
    return [row["tokens"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]


def test_training_ends_with_the_update_that_reaches_the_tokens(prepared: Prepared, tmp_path: Path) -> None:
    outcome = run(tiny(training={**BUDGET, "max_tokens": 1_500}), prepared, tmp_path)
    *_, before, last = tokens_of(tmp_path)
    assert before < 1_500 <= last == outcome.progress.tokens
    assert outcome.limit == "max_tokens = 1,500"


def test_flops_are_tokens_times_flops_per_token(prepared: Prepared, tmp_path: Path) -> None:
    each = flops_per_token(tiny(), prepared)
    said: list[str] = []
    recipe = tiny(training={**BUDGET, "max_flops": 1_500.5 * each})
    outcome = run(recipe, prepared, tmp_path, say=said.append)
    *_, before, last = tokens_of(tmp_path)
    assert before < 1_500.5 < last
    assert outcome.limit is not None
    assert outcome.limit.startswith("max_flops = ")
    assert f"{each:,.0f} training FLOPs per target token" in said
    assert json.loads((tmp_path / "run.json").read_text())["flops_per_token"] == each


@pytest.mark.parametrize("limit", ["max_tokens", "max_flops"])
def test_a_resumed_training_cools_down_as_if_nothing_had_happened(
    prepared: Prepared, tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 1_500 if limit == "max_tokens" else 1_500 * flops_per_token(tiny(), prepared)
    recipe = tiny(training={**BUDGET, "ema": 0.9, "schedule": "cosine", "cooldown": 0.5, limit: budget})

    def say(line: str) -> None:
        if line.startswith("update 5/"):
            signal.raise_signal(signal.SIGTERM)

    whole = run(recipe, prepared, tmp_path / "whole")
    first = run(recipe, prepared, tmp_path / "resumed", say=say)
    assert (first.trained, first.signal) == (5, signal.SIGTERM)
    monkeypatch.setattr(loop, "flops_per_token", None)  # it is counted once, and recorded
    second = run(recipe, prepared, tmp_path / "resumed")
    assert second.limit == whole.limit
    assert second.progress.tokens == whole.progress.tokens
    assert_same_numbers(tmp_path / "resumed", tmp_path / "whole")
    rates = [row["rate"] for row in read_metrics(tmp_path / "whole" / "metrics.jsonl") if row["kind"] == "train"]
    assert 0 < rates[-1] < 0.1 * max(rates)


def test_a_finished_training_goes_on_with_more_tokens(prepared: Prepared, tmp_path: Path) -> None:
    run(tiny(training={**BUDGET, "max_tokens": 500}), prepared, tmp_path)
    said: list[str] = []
    again = run(tiny(training={**BUDGET, "max_tokens": 500}), prepared, tmp_path, say=said.append)
    assert again.trained == 0
    assert any("was finished already" in line and "raise that limit" in line for line in said)
    more = run(tiny(training={**BUDGET, "max_flops": 1_000 * flops_per_token(tiny(), prepared)}), prepared, tmp_path)
    assert more.trained > 0
    assert more.progress.tokens >= 1_000


def test_the_estimated_number_of_updates_follows_the_tokens(prepared: Prepared, tmp_path: Path) -> None:
    said: list[str] = []
    outcome = run(tiny(training={**BUDGET, "max_tokens": 1_500}), prepared, tmp_path, say=said.append)
    shown = [line.split()[1] for line in said if line.startswith("update ") and "loss" in line and "ETA" in line]
    assert len(shown) == outcome.trained
    totals = [int(text.partition("/~")[2]) for text in shown]
    assert abs(totals[len(totals) // 2] - outcome.trained) <= 3
    assert totals[-1] == outcome.trained


def trained(recipe: Recipe, folder: Path) -> Any:
    """The limit, tokens and updates of one of several processes."""
    outcome = train(recipe, open_prepared(recipe.data.folder), folder, command=["mtkit"], device="cpu")
    return outcome.limit, outcome.progress.tokens, outcome.progress.update


@pytest.mark.parametrize("limit", ["max_tokens", "max_flops"])
def test_tokens_are_those_of_all_processes(prepared: Prepared, tmp_path: Path, limit: str) -> None:
    budget = 700 if limit == "max_tokens" else 700 * flops_per_token(tiny(), prepared)
    groups = TINY | {"training": TINY["training"] | BUDGET | {limit: budget}, "data": {"folder": str(prepared.folder)}}
    recipe = make_recipe(groups)
    alone = run(recipe, prepared, tmp_path / "alone")
    one, other = together(2, trained, recipe, tmp_path / "together")
    assert one == other == (alone.limit, alone.progress.tokens, alone.progress.update)
    last = max((tmp_path / "together" / "checkpoints").glob("update-*"))
    assert read_progress(last).tokens == alone.progress.tokens


@pytest.mark.parametrize(("r_drop", "expected"), [(0.0, 3_000.0), (1.0, 1_500.0)])
def test_the_full_rate_is_the_rate_of_products_over_those_of_a_token(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, r_drop: float, expected: float
) -> None:
    rates: list[float | None] = []
    monkeypatch.setattr(loop, "product_rate", lambda *_: Rate("float32", {8: 6e9}))
    monkeypatch.setattr(loop, "training_operations", lambda *_: 2e6)
    monkeypatch.setattr(loop.Training, "introduce", lambda training: rates.append(training._full_rate()))
    run(tiny(model={"dropout": 0.1}, training={**BUDGET, "max_updates": 1, "r_drop": r_drop}), prepared, tmp_path)
    assert rates == [expected]


@pytest.mark.parametrize(
    "groups",
    [
        {"model": {"architecture": "rnn"}, "attention": {"cross": "additive"}},
        {"training": {**BUDGET, "max_updates": 1, "freeze": ["embeddings"]}},
    ],
)
def test_no_full_rate_is_known_if_products_cannot_be_counted(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, Any]
) -> None:
    rates: list[float | None] = []
    monkeypatch.setattr(loop, "product_rate", lambda *_: Rate("float32", {8: 6e9}))
    monkeypatch.setattr(loop.Training, "introduce", lambda training: rates.append(training._full_rate()))
    run(tiny(**{"training": {**BUDGET, "max_updates": 1}, **groups}), prepared, tmp_path)
    assert rates == [None]


def test_without_memory_to_count_products_no_full_rate_is_known(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise torch.OutOfMemoryError

    rates: list[float | None] = []
    monkeypatch.setattr(loop, "product_rate", lambda *_: Rate("float32", {8: 6e9}))
    monkeypatch.setattr(loop, "training_operations", fail)
    monkeypatch.setattr(loop.Training, "introduce", lambda training: rates.append(training._full_rate()))
    run(tiny(training={**BUDGET, "max_updates": 1}), prepared, tmp_path)
    assert rates == [None]
