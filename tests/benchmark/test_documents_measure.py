"""Decoding over the length of a document: the same work for all, and costs that grow as they should."""

from typing import Any

import pytest
import torch

from mtkit.benchmark import documents
from mtkit.benchmark.documents import DocumentSetting, as_object, bars, measure_documents, table
from mtkit.errors import MtkitError
from mtkit.model.transformer import Transformer
from mtkit.recipe import load_recipe

MODEL = {"d_model": 16, "heads": 2, "feed_forward": 16, "encoder_layers": 1, "decoder_layers": 1}


@pytest.fixture(autouse=True)
def _short_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LAST", 3)


def setting(**changes: Any) -> DocumentSetting:
    given: dict[str, Any] = {"beam": 2, "arithmetic": "float32", "repeats": 1, "vocabulary": 12, "options": {}}
    return DocumentSetting(recipe=load_recipe(None, {"model": MODEL}), device=torch.device("cpu"), **(given | changes))


@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16", "int8"])
def test_every_model_makes_one_step_per_piece_with_all_hypotheses(
    arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the vocabulary is so small that an end would come soon."""
    seen: list[int] = []
    plain = Transformer.step

    def step(self: Transformer, token: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        seen.append(token.shape[1])
        return plain(self, token, *arguments, **named)

    monkeypatch.setattr(Transformer, "step", step)
    done: list[tuple[int, int]] = []
    measured = measure_documents(
        ["linear"], [9, 5], setting(repeats=2, arithmetic=arithmetic), on_progress=lambda *each: done.append(each)
    )
    assert len(seen) == 2 * 5 + 2 * 2 * (5 + 9)  # the first decoding of each model is not timed
    assert seen[:5] == [1, 2, 2, 2, 2]  # the first step makes two of one
    assert done == [(number + 1, 8) for number in range(8)]
    assert [(row.attention, row.length) for row in measured.rows] == [
        ("full", 5), ("linear", 5), ("full", 9), ("linear", 9)
    ]  # fmt: skip
    assert all(0 < row.last * 3 < row.seconds for row in measured.rows)


def test_of_short_documents_the_last_half_is_the_end() -> None:
    measured = measure_documents(["linear"], [2, 4, 9], setting())
    assert [row["pieces_at_the_end"] for row in as_object(measured)["rows"]] == [1, 1, 2, 2, 3, 3]
    assert all(0 < row.last < row.seconds for row in measured.rows)
    assert "last 3 pieces (at most the last half)" in table(measured)


def test_documents_of_a_batch_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    plain = Transformer.step

    def step(self: Transformer, token: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        seen.append(token.shape)
        return plain(self, token, *arguments, **named)

    monkeypatch.setattr(Transformer, "step", step)
    measured = measure_documents(["linear"], [5], setting(documents=3))
    assert set(seen[1:5]) == {(3, 2)}
    assert len(seen) == 2 * (5 + 5)
    assert "decoding 3 documents at once, of as many" in table(measured)
    assert as_object(measured)["documents"] == 3


def test_a_mechanism_fills_the_roles_it_can_play() -> None:
    measured = measure_documents(["band", "linformer"], [5], setting(options={"window_radius": 2}))
    assert [row.roles for row in measured.rows] == [("decoder", "cross"), ("decoder",), ("cross",)]
    shown = table(measured)
    assert "band (decoder)" in shown
    assert "linformer (cross)" in shown
    assert shown.count("×1.00") >= 2  # full beside itself, in both tables
    assert [len(chart.speeds) for chart in bars(measured)] == [3]
    assert [row["attention"] for row in as_object(measured)["rows"]] == ["full", "band", "linformer"]


@pytest.mark.parametrize(
    ("names", "lengths", "options", "message"),
    [
        (["etc"], [5], {}, "etc can play neither the decoder nor the cross role"),
        (["lineer"], [5], {}, "did you mean"),
        (["linear"], [1], {}, "from 2 on"),
        (["linear"], [], {}, "whole numbers"),
        (["band"], [5], {"window_radios": 2}, "did you mean 'window_radius'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    names: list[str], lengths: list[int], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(MtkitError, match=message):
        measure_documents(names, lengths, setting(options=options))
