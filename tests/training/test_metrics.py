import errno
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mtkit.data.batches import Batch
from mtkit.errors import MtkitError, RunError
from mtkit.evaluation.pictures.curves import draw_curves
from mtkit.training.metrics import Interval, Metrics, ProgressLine, ignoring_write_errors, read_metrics


def test_lines_after_the_checkpoint_and_half_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "train", "update": update, "loss": 1.0}) for update in (1, 2, 3)]
    path.write_text("\n".join([*lines, '{"kind": "train", "upd']))
    metrics = Metrics(tmp_path, update=2, validated=False)
    metrics.write("validation", 2, bleu=3.5, signature="s")
    metrics.close()
    assert [(row["kind"], row["update"]) for row in read_metrics(path)] == [
        ("train", 1),
        ("train", 2),
        ("validation", 2),
    ]
    assert path.read_text().endswith("\n")


@pytest.mark.parametrize("validated", [False, True])
def test_a_validation_that_no_checkpoint_kept_is_written_once(tmp_path: Path, validated: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"kind": kind, "update": update} for update in (2, 4) for kind in ("train", "validation")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = Metrics(tmp_path, update=4, validated=validated)
    if not validated:
        metrics.write("validation", 4)
    metrics.close()
    assert read_metrics(path) == rows


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, update=0, validated=False)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(MtkitError, match=r"cannot write .*metrics\.jsonl"):
        metrics.write("train", 1, loss=0.0)


def test_a_number_that_is_not_finite_is_null_and_no_scalar_of_tensorboard(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "update": 1, "gradient_norm": Infinity}\n')
    metrics = Metrics(tmp_path, update=1, validated=False)
    shown: list[str] = []
    metrics._board = SimpleNamespace(add_scalar=lambda name, *_: shown.append(name), close=lambda: None)
    metrics.write("train", 2, loss=1.5, gradient_norm=math.nan)
    metrics.close()
    assert shown == ["train/loss"]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert [row["gradient_norm"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [None, None]
    draw_curves(read_metrics(tmp_path / "metrics.jsonl"), tmp_path / "curves.png")


def test_the_gradient_norm_is_that_of_the_updates_that_were_made() -> None:
    interval = Interval()
    for _ in range(3):
        interval.count(10)
    row = interval.read([30.0, 30.0, 0.0, 0.0, 0.0, 0.0, 3.0, 2.0], rate=0.5)
    assert row["gradient_norm"] == 1.5
    assert row["skipped_updates"] == 1
    interval.count(10)
    assert math.isnan(interval.read([30.0, 30.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], rate=0.5)["gradient_norm"])


def test_an_interval_gives_means_per_token_and_per_update() -> None:
    interval = Interval()
    interval.count(30)
    with interval.paused():
        pass
    with interval.waiting():
        pass
    valid = torch.tensor([[True, True, True, False], [True, False, False, False]])
    pieces = torch.zeros(2, 4, dtype=torch.long)
    interval.count(10, [Batch(pieces, valid, pieces, pieces, valid, 4, np.arange(2))])
    row = interval.read([80.0, 40.0, 8.0, -6.0, 4.0, 10.0, 3.0, 2.0], rate=0.5)
    assert row["padding"] == 0.5
    assert row["loss"] == 2.2
    assert row["nll"] == 1.0
    assert row["perplexity"] == pytest.approx(2.71828, rel=1e-5)
    assert row["gradient_norm"] == 1.5
    assert row["reward"] == -1.5
    assert row["r_drop"] == 0.25
    assert "skipped_updates" not in row
    assert row["rate"] == 0.5
    assert 0 <= row["data_wait"] <= 1
    assert row["tokens_per_second"] > 0
    assert "mfu" not in row


def test_the_utilisation_is_the_rate_of_tokens_over_that_of_products_alone() -> None:
    interval = Interval()
    interval.full_rate = 5_000.0
    interval.count(10)
    row = interval.read([30.0, 30.0, 0.0, 0.0, 0.0, 0.0, 3.0, 1.0], rate=0.5)
    assert row["mfu"] == row["tokens_per_second"] / 5_000.0


def test_away_from_a_terminal_progress_is_lines_with_all_that_matters() -> None:
    said: list[str] = []
    line = ProgressLine(said.append, update=0, shown=True)
    line.expect(100)
    row = {
        "loss": 2.5,
        "perplexity": 7.25,
        "rate": 1e-3,
        "gradient_norm": 0.5,
        "tokens_per_second": 12_345.0,
        "data_wait": 0.02,
        "mfu": 0.41,
    }
    line.advance()
    line.measure(50, row, seconds_left=3_723.4)
    line.close()
    (text,) = said
    for part in (
        "50/100",
        "2.500",
        "7.25",
        "1.00e-03",
        "0.50",
        "12,345 tok/s",
        "MFU 41%",
        "data wait 2%",
        "ETA 1:02:03",
    ):
        assert part in text


def test_a_bar_shows_the_first_measurements_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.training.metrics.stderr_is_terminal", lambda: True)
    line = ProgressLine(print, update=0, shown=True)
    line._bar.ncols = 60
    line.expect(1000)
    names = ("loss", "perplexity", "rate", "gradient_norm", "tokens_per_second", "data_wait")
    line.measure(1000, dict.fromkeys(names, 1.0), seconds_left=3.0)
    assert line._bar.postfix == "ETA 0:00:03  loss 1.000  ppl 1.00"
    line.close()


@pytest.mark.parametrize(("total", "shown"), [((None,), "5  ETA"), ((40,), "5/40  ETA"), ((38, True), "5/~38  ETA")])
def test_an_estimated_number_of_updates_is_marked(total: tuple[int | None, bool], shown: str) -> None:
    said: list[str] = []
    line = ProgressLine(said.append, update=0, shown=True)
    line.expect(*total)
    names = ("loss", "perplexity", "rate", "gradient_norm", "tokens_per_second", "data_wait")
    line.measure(5, dict.fromkeys(names, 1.0), seconds_left=3.0)
    line.close()
    assert said[0].startswith(f"update {shown}")


def test_only_the_process_that_is_shown_speaks() -> None:
    said: list[str] = []
    line = ProgressLine(said.append, update=0, shown=False)
    line.say("something")
    line.close()
    assert said == []


def test_lines_that_cannot_be_written_are_let_go_of_and_later_ones_are_not() -> None:
    said: list[str] = []

    def say(line: str) -> None:
        if line == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        said.append(line)

    for line in ("one", "full", "two"):
        ignoring_write_errors(say)(line)
    assert said == ["one", "two"]


def test_damaged_metrics_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = '{"kind": "train", "update": 4, "nll": NaN, "rate": 0.1, "epoch": 0}'
    path.write_text(f"{good}\n{good}\n{good[:30]}")
    assert [(row["update"], row["nll"]) for row in read_metrics(path)] == [(4, None)] * 2
    values = ('"rate": "x"', '"ter": []', '"ter_signature": []', '"tokens_per_second": "x"', '"peak_bytes": null')
    damaged = [f'{{"kind": "train", "update": 4, {value}}}' for value in values]
    for wrong in ("[]", "x", '{"update": 4}', good.replace("4", '"4"'), "\x00", *damaged):
        path.write_text(f"{good}\n{wrong}\n{good}\n")
        with pytest.raises(RunError, match=r"metrics\.jsonl, line 2, is damaged .*remove that line"):
            read_metrics(path)
    path.write_bytes(b"\xff\n" + good.encode())
    with pytest.raises(RunError, match="line 1"):
        read_metrics(path)


@pytest.mark.parametrize("stderr", [None, object()])
def test_without_a_stderr_progress_is_lines(stderr: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    said: list[str] = []
    line = ProgressLine(said.append, update=0, shown=True)
    line.advance()
    line.say("something")
    line.close()
    assert said == ["something"]
