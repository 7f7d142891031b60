"""Another program behind the seam: source batches in, hypotheses out, and all around it stays as it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.decoding.contract import Engine, Hypotheses, SourceBatch
from mtkit.decoding.forced import force_lines
from mtkit.decoding.held_out import HeldOut
from mtkit.decoding.lines.source import Documents, SourceLines
from mtkit.decoding.translate import translate_lines
from mtkit.errors import MtkitError
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import PAD, Tokenizers
from tests.decoding.trained import make_run, sentences


class Copier:
    """Gives every source back, `n_best` times, and as many hypotheses more; it does not sample."""

    max_parallel = 8
    longest_source: int | None = None
    longest_target: int | None = None
    identity: dict[str, Any] = {"program": "copier"}  # noqa: RUF012

    def __init__(self, settings: DecodingSettings) -> None:
        self.settings, self.sizes, self.inside = settings, list[int](), False

    def check(self) -> None:
        if self.settings.method == "sample":
            raise MtkitError("decoding.method = sample: the copier does not sample")

    @contextmanager
    def ready(self) -> Iterator[torch.device]:
        self.inside = True
        yield torch.device("cpu")
        self.inside = False

    def translate(self, batch: SourceBatch) -> Hypotheses:
        assert self.inside
        self.sizes.append(len(batch.source))
        pieces = [
            [*row[: limit - 1], 3] if len(row) > limit else row
            for row, limit in zip(lists_of(batch.source), batch.limits, strict=True)
        ]
        width = max(map(len, pieces))
        rows = torch.tensor([[row + [PAD] * (width - len(row))] * (self.settings.n_best + 1) for row in pieces])
        return Hypotheses(rows, -torch.ones(rows.shape[:2]), -torch.ones(rows.shape[:2]))

    def log_probs(self, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
        assert self.inside
        return -(target != PAD).float()


def lists_of(source: Tensor) -> list[list[int]]:
    return [[piece for piece in row if piece != PAD] for row in source.tolist()]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Tokenizers:
    return make_run(tmp_path_factory.mktemp("run")).run.tokenizers


def copier(**settings: Any) -> Copier:
    engine: Engine = Copier(DecodingSettings.model_validate(settings))
    assert isinstance(engine, Copier)
    return engine


def test_lines_go_through_it(tokenizers: Tokenizers) -> None:
    lines, engine = [*sentences(9, 1), "", *sentences(2, 2)], copier(batch_tokens=60)
    found = translate_lines(engine, tokenizers, lines)
    assert [each.text for (each,) in found] == lines
    assert len(engine.sizes) > 1
    assert [[each.text for each in line] for line in translate_lines(copier(n_best=2, beam=2), tokenizers, lines)] == [
        [line] * 2 for line in lines
    ]


def test_limits_and_joined_documents_are_not_its_business(tokenizers: Tokenizers) -> None:
    lines = sentences(6, 3)
    cut = translate_lines(copier(max_pieces=3), tokenizers, lines)
    assert all(each.cut and len(each.pieces) == 3 for (each,) in cut)
    engine = copier()
    found = translate_lines(engine, tokenizers, SourceLines(lines, documents=Documents([1] * 6, 1000)))
    assert [each.text for (each,) in found] == lines
    assert [each.together for (each,) in found] == [6] * 6
    assert engine.sizes == [1]


def test_sides_and_forced_lines_go_through_it(tokenizers: Tokenizers) -> None:
    lines = sentences(5, 4)
    found = translate_lines(copier(), tokenizers, HeldOut("test", lines, lines).lines(copier().settings))
    assert [each.text for (each,) in found] == lines
    forced = force_lines(copier(), tokenizers, lines, lines)
    assert [each.log_prob for each in forced] == [-float(len(each.pieces)) for (each,) in found]


def test_what_it_cannot_do_is_refused_before_anything_is_translated(tokenizers: Tokenizers, tmp_path: Path) -> None:
    engine = copier(method="sample")
    with pytest.raises(MtkitError, match="does not sample"):
        translate_lines(engine, tokenizers, ["a"])
    assert not engine.sizes
