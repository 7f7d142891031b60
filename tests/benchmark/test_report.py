"""Where a benchmark's report is written."""

from functools import partial
from pathlib import Path

import pytest

from mtkit.benchmark import report
from mtkit.benchmark.report import Bars, draw, outputs, write
from mtkit.errors import MtkitError


def test_a_report_that_was_not_finished_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    files = outputs(tmp_path, "train")
    monkeypatch.setattr(report, "write_text", kill)
    with pytest.raises(KeyboardInterrupt):
        write(files, "table", {"mtkit": "1"}, lambda path: None)
    assert [path.name for path in tmp_path.iterdir()] == ["train.json"]
    assert outputs(tmp_path, "train") == files


@pytest.mark.parametrize("content", [None, '{"mtkit": "1"}', '{"mine": 1}', "[]", "1"])
def test_only_an_earlier_report_is_replaced(tmp_path: Path, content: str | None) -> None:
    corpus = tmp_path / "train.txt"
    corpus.write_text("years of work\n")
    if content is not None:
        (tmp_path / "train.json").write_text(content)
    if content == '{"mtkit": "1"}':
        bars = Bars("speed", "tokens/s", [("a", 1.0, True)])
        write(outputs(tmp_path, "train"), "table", {"mtkit": "2"}, partial(draw, [bars]))
        assert corpus.read_text() == "table\n"
        return
    with pytest.raises(MtkitError, match=r"train\.txt exists, and mtkit has no record that it wrote it; give another"):
        outputs(tmp_path, "train")
    assert corpus.read_text() == "years of work\n"
    with pytest.raises(MtkitError, match=r"train.txt is a file, not a folder"):
        outputs(corpus, "train")
