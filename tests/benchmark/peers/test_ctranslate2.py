from pathlib import Path

import pytest

from mtkit.decoding.held_out import held_out
from mtkit.decoding.lines.source import TrainedOn
from tests.decoding.trained import make_run

pytestmark = pytest.mark.peer
pytest.importorskip("ctranslate2")


def test_a_batch_has_the_piece_limit_of_its_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is untrained, so that all translations reach the limit."""
    from mtkit.benchmark.peers.ctranslate2 import CTranslate2

    trained = make_run(tmp_path / "here")
    run, lines = trained.run, held_out(trained.prepared).sources
    monkeypatch.setattr(TrainedOn, "limit", lambda self, pieces, *_: len(pieces))
    decoder = CTranslate2(run, run.load_model(), run.recipe.decoding, "float32")
    sizes = [len(pieces) + 1 for pieces in run.tokenizers.source.encode_lines(lines)]
    assert len(set(sizes)) > 1
    assert [line.pieces for line in decoder.translate(lines, 1, 1)] == sizes
    assert {line.pieces for line in decoder.translate(lines, 1, len(lines))} == {max(sizes)}
