"""Translations in the run's folder."""

import json
from pathlib import Path

import pytest

from mtkit.decoding.held_out import HeldOut, Speed, held_out, latest_translations, n_best_lines, reference_of, save
from mtkit.decoding.translate import Translation
from mtkit.errors import RunError
from mtkit.runs import Run
from tests.decoding.trained import make_run

SIDE = HeldOut("test", ["a", "b\u2028"], ["x", "y"])


def translation(text: str, score: float = -1.0) -> Translation:
    return Translation(text, score, score, (4, 3))


def test_the_test_side_is_taken_or_else_the_validation_side(tmp_path: Path) -> None:
    both = held_out(make_run(tmp_path / "both").prepared)
    assert both.name == "test"
    assert list(both.sources) == (tmp_path / "both" / "test.source").read_text().split("\n")[:-1]
    assert list(both.references) == (tmp_path / "both" / "test.target").read_text().split("\n")[:-1]
    assert held_out(make_run(tmp_path / "one", test_side=False).prepared).name == "valid"


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(RunError, match="mtkit translate"):
        latest_translations(run)
    valid = HeldOut("valid", ["a"], ["x"])
    save(run, valid, [[translation("v")]], Speed(1.0, 1, 2), {})
    path = save(
        run, SIDE, [[translation("one"), translation("uno", -2)], [translation("")] * 2], Speed(2.0, 2, 4), {"c": 1}
    )
    assert latest_translations(run) == path
    assert path.read_bytes() == b"one\n\n"
    assert reference_of(path).read_bytes() == b"x\ny\n"
    assert path.with_suffix(".source.txt").read_text() == "a\nb\u2028\n"
    assert path.with_suffix(".nbest.txt").read_text().split("\n")[1] == "1\t-2.000000\tuno"
    record = json.loads(path.with_suffix(".json").read_text())
    assert (record["c"], record["segments"], record["segments_per_second"], record["tokens_per_second"]) == (1, 2, 1, 2)
    save(run, SIDE, [[translation("one")], [translation("two")]], Speed(2.0, 2, 4), {})
    assert not path.with_suffix(".nbest.txt").exists()
    save(run, valid, [[translation("w")]], Speed(1.0, 1, 2), {})
    assert latest_translations(run).name == "valid.txt"
    path.with_suffix(".json").write_text("{")
    with pytest.raises(RunError, match="damaged"):
        latest_translations(run)


def test_n_best_lines_name_their_line() -> None:
    lines = list(n_best_lines([[translation("a"), translation("b", -2)], [translation("c\tc")]]))
    assert lines == ["1\t-1.000000\ta", "1\t-2.000000\tb", "2\t-1.000000\tc\tc"]
