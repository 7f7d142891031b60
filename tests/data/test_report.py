from mtkit.data.prepare import Report
from mtkit.data.prepared import Prepared
from mtkit.data.report import summary


def test_the_summary_says_what_is_there_and_what_is_left_out(builtin: Prepared) -> None:
    text = summary(Report(builtin.folder, unchanged=False, record=builtin.record), max_length=10)
    assert [line.split()[:2] for line in text.splitlines()[3:6]] == [["train", "400"], ["valid", "30"], ["test", "20"]]
    assert f"{builtin.train.too_long(10):,} too long" in text
    assert f"{builtin.tokenizers.source.size} pieces, joint" in text
    pieces = int(builtin.train.source.lengths.sum())
    assert f"{pieces:,}" in text


def test_the_summary_says_when_nothing_was_done(builtin: Prepared) -> None:
    assert "up to date" in summary(Report(builtin.folder, unchanged=True, record=builtin.record), max_length=1_024)
