import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mtkit import product_rate
from mtkit.benchmark import decoding
from mtkit.benchmark.decoding import (
    Candidate,
    Decoded,
    DecodingBenchmark,
    OwnDecoder,
    common_side,
    first_segments,
    measure_decoding,
)
from mtkit.benchmark.decoding_report import as_object, bars, table
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.held_out import HeldOut, held_out
from mtkit.decoding.lines.source import Directions
from mtkit.decoding.translate import translate_lines
from mtkit.errors import MtkitError
from tests.decoding.trained import Trained, make_run


class Copier:
    """A program that gives the first line's source back for every line; at a batch size of 2 it is slow."""

    program, arithmetic, shortlist = "copier", "float32", 0

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def sizes(self, beam: int) -> Sequence[int]:
        return 2, 4

    def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
        self.asked.append((len(lines), beam, size))
        time.sleep(0.02 if size == 2 else 0.001)
        return [Decoded(lines[0], 3) for _ in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("run") / "here")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "TRIAL_SHARE", 2)
    monkeypatch.setattr(decoding, "REST", 0.0)
    monkeypatch.setattr(product_rate, "LARGE", {"cpu": 32})
    monkeypatch.setattr(product_rate, "BLOCK_SECONDS", 1e-4)


def measured(trained: Trained, copier: Copier, beams: Sequence[int]) -> DecodingBenchmark:
    model, side = trained.run.load_model(), held_out(trained.prepared)
    own = OwnDecoder(trained.run, model, trained.run.recipe.decoding, "auto")
    return measure_decoding([Candidate(trained.run, model, [own, copier])], side, beams, repeats=2)


def candidate(trained: Trained) -> Candidate:
    model = trained.run.load_model()
    return Candidate(trained.run, model, [OwnDecoder(trained.run, model, trained.run.recipe.decoding, "auto")])


def test_mtkit_translates_as_its_translate_command_does(trained: Trained) -> None:
    model, side, settings = trained.run.load_model(), held_out(trained.prepared), trained.run.recipe.decoding
    found = OwnDecoder(trained.run, model, settings, "float32").translate(side.sources, settings.beam, 64)
    expected = translate_lines(ModelEngine(model, settings), trained.run.tokenizers, side.sources)
    assert [each.text for each in found] == [best.text for best, *_ in expected]
    assert [each.pieces for each in found] == [len(best.pieces) for best, *_ in expected]


def test_every_decoder_translates_the_whole_side_at_each_beam_in_its_fastest_size(trained: Trained) -> None:
    copier = Copier()
    benchmark = measured(trained, copier, [1, 3])
    lines = len(benchmark.side.sources)
    assert [each for each in copier.asked if each[0] == lines] == [(lines, 1, 4)] * 2 + [(lines, 3, 4)] * 2
    assert [(row.program, row.beam, row.size) for row in benchmark.rows] == [
        ("mtkit", 1, 8192),
        ("copier", 1, 4),
        ("mtkit", 3, 16384),
        ("copier", 3, 4),
    ]
    assert all(len(row.seconds) == 2 and row.pieces >= lines for row in benchmark.rows)
    assert benchmark.rows[1].pieces == 3 * lines


def test_agreement_is_with_mtkit_and_doubted_where_it_is_small(trained: Trained) -> None:
    benchmark = measured(trained, Copier(), [1])
    assert [row.same for row in benchmark.rows] == [1.0, 0.0]
    assert "note: copier float32 translates only 0.0%" in table(benchmark)
    assert "note: mtkit" not in table(benchmark)
    benchmark.rows[0].arithmetic = "int8"  # beside rounded numbers, lines differ all the same
    benchmark.rates["int8"] = benchmark.rates["float32"]
    assert "note:" not in table(benchmark)


def test_a_decoder_that_fails_is_left_out(trained: Trained) -> None:
    class Failing(Copier):
        def translate(self, lines: Sequence[str], beam: int, size: int) -> list[Decoded]:
            if beam == 3 and len(self.asked) > 6:
                raise RuntimeError("no memory\nfor this")
            return super().translate(lines, beam, size)

    benchmark = measured(trained, Failing(), [1, 3])
    assert [(row.program, row.beam) for row in benchmark.rows] == [("mtkit", 1), ("copier", 1), ("mtkit", 3)]
    assert "failed: copier float32, beam 3: RuntimeError: no memory\n" in table(benchmark)
    assert as_object(benchmark)["failed"][0]["error"] == "RuntimeError: no memory"
    assert [len(chart.speeds) for chart in bars(benchmark)] == [2, 1]
    failing = Candidate(trained.run, trained.run.load_model(), [Failing()])
    with pytest.raises(RuntimeError, match="no memory"):
        measure_decoding([failing], held_out(trained.prepared), [1, 3])


def test_the_ceiling_is_the_rate_over_the_operations_of_a_segment(trained: Trained) -> None:
    benchmark = measured(trained, Copier(), [1, 3])
    greedy, beam, operations = benchmark.rows[0], benchmark.rows[2], benchmark.operations["one"]
    assert operations[1] < operations[3] < 3 * operations[1]
    assert benchmark.ceiling(greedy) == benchmark.rates["float32"].best / operations[1]
    assert benchmark.share(beam) == pytest.approx(beam.speed * operations[3] / benchmark.rates["float32"].best)
    content = as_object(benchmark)
    assert content["rows"][2]["segments_per_second"] == beam.speed
    assert [[own for *_, own in chart.speeds] for chart in bars(benchmark)] == [[True, False]] * 2


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A larger run on data of the same text, with a tokenizer of its own."""
    return make_run(tmp_path_factory.mktemp("other") / "there", name="two", feed_forward=64, vocabulary=300)


def test_runs_are_measured_side_by_side(trained: Trained, other: Trained) -> None:
    both, copier = [candidate(trained), candidate(other)], Copier()
    both[1] = Candidate(both[1].run, both[1].model, [*both[1].decoders, copier])
    side = common_side([trained.prepared, other.prepared])
    assert trained.run.vocabulary != other.run.vocabulary
    benchmark = measure_decoding(both, side, [1, 3], repeats=1)
    each_beam = [("one", "mtkit"), ("two", "mtkit"), ("two", "copier")]
    assert [(row.beam, row.run, row.program) for row in benchmark.rows] == [(b, *x) for b in (1, 3) for x in each_beam]
    one, two, copied = benchmark.of_beam(3)
    assert one.texts != two.texts
    assert (one.same, two.same, copied.same) == (1.0, 1.0, 0.0)  # agreement is within a run
    assert benchmark.operations["one"][3] != benchmark.operations["two"][3]
    assert benchmark.ceiling(two) == benchmark.rates["float32"].best / benchmark.operations["two"][3]
    shown = table(benchmark)
    assert all(
        label in shown for label in ("one: mtkit float32", "two: mtkit float32", "×: relative to one: mtkit float32")
    )
    assert "note: two: copier float32 translates only 0.0% of the lines as two: mtkit float32 does" in shown
    content = as_object(benchmark)
    assert content["runs"] == {"one": str(trained.run.folder), "two": str(other.run.folder)}
    assert [row["run"] for row in content["rows"]] == ["one", "two", "two"] * 2
    assert [label.split(" (")[0] for label, *_ in bars(benchmark)[1].speeds] == [
        "one: mtkit float32",
        "two: mtkit float32",
        "two: copier float32",
    ]


def test_runs_with_another_text_are_refused_by_name(trained: Trained, tmp_path: Path) -> None:
    without, another = make_run(tmp_path / "1", sides=("test2",)), make_run(tmp_path / "2", text=100)
    with pytest.raises(MtkitError, match="no test side 'test'"):
        common_side([trained.prepared, without.prepared])
    with pytest.raises(MtkitError, match=f"the side test of {another.prepared.folder} and ") as raised:
        common_side([trained.prepared, another.prepared])
    assert str(trained.prepared.folder) in str(raised.value)


def test_text_is_scored_by_the_language_it_is_in(trained: Trained) -> None:
    side = held_out(trained.prepared)
    chinese = replace(side, directions=Directions(["en-zh"], [0] * len(side.sources)))
    benchmark = measure_decoding([candidate(trained)], first_segments(chinese, 3), [1], repeats=1)
    assert "tok:zh" in benchmark.signature


def test_the_first_segments_are_taken(trained: Trained) -> None:
    side = held_out(trained.prepared)
    assert first_segments(side, 2).sources == side.sources[:2]
    assert first_segments(side, None).references == side.references


@pytest.mark.parametrize(("beams", "count"), [([], 2), ([0], 2), ([1], 0)])
def test_nothing_to_decode_is_refused(trained: Trained, beams: list[int], count: int, tmp_path: Path) -> None:
    model, side = trained.run.load_model(), HeldOut("test", ["a"] * count, ["b"] * count)
    with pytest.raises(MtkitError, match="segments to translate"):
        measure_decoding([Candidate(trained.run, model, [Copier()])], side, beams)
