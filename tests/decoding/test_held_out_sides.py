"""Held-out sides that go on after an interruption."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtkit.decoding import files as module
from mtkit.decoding.files import translate_side
from mtkit.decoding.held_out import HeldOut, held_out
from mtkit.decoding.lines import chunks
from mtkit.decoding.translate import translate_lines
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.recipe import DecodingSettings
from tests.decoding.trained import Trained, make_run, sentences, three_threads

GREEDY: dict[str, Any] = {"method": "greedy"}
LINES = [*sentences(5, 1), "", "犬が木を見る。猫。", "The dog.\u2028The cat.", "\u200b", "The tree and the house. " * 9]


class KilledError(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("sides"), documents=40)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIDE_CHUNK", 3)


def killed(translator: Translator, side: HeldOut, monkeypatch: pytest.MonkeyPatch, *, joined: bool, after: int) -> None:
    """Translate the side until this number of chunks is done."""
    calls = 0

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise KilledError
        return translate_lines(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("mtkit.decoding.translator.translate_lines", dying)
        with pytest.raises(KilledError):
            translate_side(translator, side, joined=joined)


def written(folder: Path) -> dict[str, bytes]:
    """All files of the side but for the time it took."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    record = json.loads(files.pop("side.json"))
    timed = ("seconds", "segments_per_second", "tokens_per_second", "finished")
    return files | {"side.json": json.dumps({key: each for key, each in record.items() if key not in timed}).encode()}


@pytest.mark.parametrize("settings", [GREEDY, {"beam": 3, "n_best": 2}, {"method": "sample", "top_k": 5}])
@pytest.mark.parametrize("joined", [False, True])
def test_a_side_goes_on_where_it_ended(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], joined: bool
) -> None:
    translator, folder = Translator([trained.run], DecodingSettings(**settings)), trained.run.folder / "translations"
    side = (
        replace(held_out(trained.prepared), name="side")
        if joined
        else HeldOut("side", LINES, [each[:9] for each in LINES])
    )
    whole, _, _ = translate_side(translator, side, joined=joined)
    expected = written(folder)
    killed(translator, side, monkeypatch, joined=joined, after=1)
    said, counts = list[str](), list[int]()
    found, speed, path = translate_side(translator, side, joined=joined, say=said.append, on_progress=counts.append)
    assert any("resuming after line" in line for line in said)
    assert sum(counts) == len(side.sources) == speed.segments
    assert found == whole
    assert written(folder) == expected
    assert not list(folder.glob(".*")), "nothing is left over"
    assert path.read_text().count("\n") == len(side.sources)


def test_time_of_the_interrupted_call_counts(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    translator, side = Translator([trained.run], DecodingSettings(**GREEDY)), HeldOut("side", LINES[:6], LINES[:6])
    moments = iter([0.0, 5.0, 100.0, 200.0, 203.0])
    with monkeypatch.context() as patch:
        patch.setattr("mtkit.decoding.files.monotonic", lambda: next(moments))
        killed(translator, side, monkeypatch, joined=False, after=1)
        _, speed, _ = translate_side(translator, side, joined=False)
    assert speed.seconds == pytest.approx(8.0)


@pytest.mark.parametrize("change", ["settings", "text", "record"])
def test_what_no_longer_holds_is_made_again(trained: Trained, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    translator, side = Translator([trained.run], DecodingSettings(**GREEDY)), HeldOut("side", LINES, LINES)
    folder, said = trained.run.folder / "translations", list[str]()
    killed(translator, side, monkeypatch, joined=False, after=2)
    if change == "settings":
        translator = Translator([trained.run], DecodingSettings(beam=2))
    elif change == "text":
        side = replace(side, sources=[*LINES[:4], "Another line.", *LINES[5:]])
    else:
        record = folder / ".side.jsonl.partial.jsonl"
        record.write_bytes(record.read_bytes()[:-9])
    found, _, _ = translate_side(translator, side, joined=False, say=said.append)
    # in other batches, whose last digits differ
    assert [each[0].pieces for each in found] == [each[0].pieces for each in translator.translate(side.sources)]
    expected = {"settings": "starts again", "text": "was made of other text", "record": "resuming after line 3,"}[
        change
    ]
    assert any(expected in line for line in said), said


def test_one_process_at_a_time(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    translator, side = Translator([trained.run], DecodingSettings(**GREEDY)), HeldOut("side", LINES, LINES)

    def again(*arguments: Any, **options: Any) -> Any:
        return translate_side(translator, side, joined=False)

    monkeypatch.setattr("mtkit.decoding.translator.translate_lines", again)
    with pytest.raises(MtkitError, match="another process is writing"):
        translate_side(translator, side, joined=False)


def test_long_lines_make_short_chunks(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIDE_CHUNK", 100)
    monkeypatch.setattr(chunks, "CHARACTERS", 40)
    translator, side = Translator([trained.run], DecodingSettings(**GREEDY)), HeldOut("side", LINES, LINES)
    killed(translator, side, monkeypatch, joined=False, after=2)
    said = list[str]()
    with three_threads():
        found, _, _ = translate_side(translator, side, joined=False, say=said.append)
    assert len(found) == len(LINES)
    assert any("resuming after line" in line for line in said)


def test_damaged_translations_are_one_clear_error(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    translator, side = Translator([trained.run], DecodingSettings(**GREEDY)), HeldOut("side", LINES, LINES)
    partial = trained.run.folder / "translations" / ".side.jsonl.partial"
    killed(translator, side, monkeypatch, joined=False, after=2)
    partial.write_bytes(b"x" * partial.stat().st_size)
    with pytest.raises(MtkitError, match=r"side\.jsonl is damaged; the same command translates that side again"):
        translate_side(translator, side, joined=False)
    found, _, _ = translate_side(translator, side, joined=False)
    assert len(found) == len(LINES)


def test_a_side_of_usual_size_has_several_chunks(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    translator, side = Translator([trained.run], DecodingSettings(**GREEDY)), HeldOut("side", [""] * 3003, [""] * 3003)
    killed(translator, side, monkeypatch, joined=False, after=2)
    counts = list[int]()
    translate_side(translator, side, joined=False, on_progress=counts.append)
    assert counts[:2] == [1000, 1000]
