"""Scores of documents."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu

from mtkit.errors import DataError, MtkitError
from mtkit.evaluation.document_positions import PositionRow, by_position
from mtkit.evaluation.documents import document_metrics, document_rows, joined
from mtkit.evaluation.pictures import document_positions
from mtkit.evaluation.pictures.document_positions import draw_by_position
from mtkit.evaluation.report import side_object, side_text, sides_text
from mtkit.evaluation.scores import named_metrics, score_corpus
from mtkit.evaluation.side_scores import score_side
from mtkit.evaluation.systems import SystemTexts, Translated
from mtkit.evaluation.term_consistency import consistency
from tests.evaluation.test_statistics import corpus
from tests.evaluation.test_systems import written

IDS = ["a"] * 12 + ["b"] * 3 + ["a"] * 25
"""40 lines of three documents: an id that comes again is another document."""

GROUPS = [list(range(12)), [12, 13, 14], list(range(15, 40))]


def texts_of(references: list[str], **more: object) -> SystemTexts:
    texts = SystemTexts([references], [references], None, None, None, [])
    return replace(texts, **more)  # type: ignore[arg-type]


@pytest.fixture
def files(tmp_path: Path) -> list[Translated]:
    texts = {"reference": corpus(40, 0), "one": corpus(40, 0.2), "two": corpus(40, 0.3, 2), "ids": IDS}
    paths = {name: written(tmp_path / name, lines) for name, lines in texts.items()}
    about = (paths["reference"],), paths["reference"], None, paths["ids"]
    return [Translated(name, paths[name], *about) for name in ("one", "two")]


def join(lines: list[str]) -> list[str]:
    return [" ".join(lines[row] for row in rows) for rows in GROUPS]


def test_documents_end_where_the_id_or_the_direction_changes() -> None:
    lines = corpus(40, 0)
    assert document_rows(texts_of(lines, documents=IDS), Path("x")) == GROUPS
    ways = ["en-de"] * 5 + ["en-fr"] * 35
    rows = document_rows(texts_of(lines, documents=IDS, directions=ways), Path("x"))
    assert rows == [list(range(5)), list(range(5, 12)), *GROUPS[1:]]
    with_blank = ["x", "", "y"]
    assert document_rows(texts_of(with_blank, documents=["a"] * 3), Path("x")) == [[0, 1, 2]]
    apart = ["x", "", "", "y", "", "z", "\u200b"]
    assert document_rows(texts_of(apart, documents=list("aabcccc")), Path("x")) == [[0], [3, 4, 5]]


def test_blank_lines_of_the_source_or_the_reference_separate_documents() -> None:
    lines = ["", "x", "y", " \u200b", "\u3000", "z", ""]
    assert document_rows(texts_of(lines), Path("x")) == [[1, 2], [5]]
    assert document_rows(texts_of(["?"] * 7, sources=lines), Path("x")) == [[1, 2], [5]]
    with pytest.raises(DataError, match=r"en\.txt has no blank lines between documents.*--document-ids"):
        document_rows(texts_of(["x", "y"]), Path("en.txt"))
    with pytest.raises(DataError, match="only blank lines"):
        document_rows(texts_of(["", " "]), Path("en.txt"))


def test_scores_are_sacrebleus_of_joined_lines(files: list[Translated]) -> None:
    found = score_side("test", files, metrics=["BLEU", "chrF"], documents=True)
    references = [join(corpus(40, 0))]
    assert found.segments == 3
    for scores, lines in zip(found.overall.scores, (corpus(40, 0.2), corpus(40, 0.3, 2)), strict=True):
        assert [score.name for score in scores] == ["d-BLEU", "d-chrF", "consistency"]
        assert scores[0].value == pytest.approx(sacrebleu.corpus_bleu(join(lines), references).score)
        assert scores[1].value == pytest.approx(sacrebleu.corpus_chrf(join(lines), references).score)
        of_documents = score_corpus(join(lines), references, metrics=["BLEU", "chrF"])
        assert [(score.low, score.high, score.signature) for score in scores[:2]] == [
            (score.low, score.high, score.signature) for score in of_documents
        ]
    assert [difference.metric for difference in found.overall.differences[0]] == ["d-BLEU", "d-chrF", "consistency"]


def test_positions_have_the_scores_of_their_lines(files: list[Translated]) -> None:
    found = score_side("test", files, metrics=["BLEU", "chrF"], documents=True).documents
    assert found is not None
    places = [*range(1, 13), 1, 2, 3, *range(1, 26)]
    for rows, lines in zip(found.positions, (corpus(40, 0.2), corpus(40, 0.3, 2)), strict=True):
        assert [(row.name, row.segments, row.documents) for row in rows] == [
            ("1-10", 23, 3),
            ("11-20", 12, 2),
            ("21-30", 5, 1),
        ]
        for row, (least, most) in zip(rows, ((1, 10), (11, 20), (21, 30)), strict=True):
            chosen = [number for number, place in enumerate(places) if least <= place <= most]
            part = [lines[number] for number in chosen], [[corpus(40, 0)[number] for number in chosen]]
            bleu, chrf = score_corpus(*part, metrics=["BLEU", "chrF"], bootstrap=0)
            assert row.scores == {"BLEU": pytest.approx(bleu.value), "chrF": pytest.approx(chrf.value)}
        assert rows[0].low is not None
        assert rows[0].low < rows[0].scores["BLEU"]
        assert rows[2].low is rows[2].high is None  # one document


def test_intervals_of_positions_are_over_documents() -> None:
    lines = [*corpus(12, 0)[:6], *corpus(12, 0.5)[6:]]
    texts = texts_of(corpus(12, 0), hypotheses=[lines])
    groups = [list(range(6)), list(range(6, 12))]
    metrics, kinds = named_metrics(["BLEU"]), np.zeros(12, dtype=np.intp)
    ((row,),) = by_position(texts, groups, metrics, kinds)
    of_one = [
        score_corpus(lines[part], [corpus(12, 0)[part]], bootstrap=0)[0].value for part in (slice(6), slice(6, 12))
    ]
    assert (row.low, row.high) == (pytest.approx(min(of_one), abs=1e-3), pytest.approx(max(of_one), abs=1e-3))


def test_consistency_is_the_share_of_pairs_translated_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    def link_pairs(sources: list[list[str]], targets: list[list[str]], progress: object) -> list[list[tuple[int, int]]]:
        return [
            list(zip(*[range(min(len(a), len(b)))] * 2, strict=True)) for a, b in zip(sources, targets, strict=True)
        ]

    monkeypatch.setattr("mtkit.evaluation.term_consistency.link_pairs", link_pairs)
    sources = ["bank x 7 old", "bank x 7", "Bank, y"]
    #                bank: ufer twice and bank once, 1 of 3 pairs; x: q and q, 1 of 1; 7 is no term; old occurs once
    translations = ["Ufer q 8 alt", "ufer; Q 9", "Bank r"]
    (found,) = consistency(sources, [translations], [[0, 1, 2]])
    assert found.rows.tolist() == [[2, 4]]
    assert found.result().score == 50
    (apart,) = consistency(sources, [translations], [[0], [1, 2]])
    assert apart.rows.tolist() == [[0, 0], [0, 1]]
    monkeypatch.setattr("mtkit.evaluation.term_consistency.FREQUENT", 1)
    sources += [f"w{number}" for number in range(10)]  # 15 words, a tenth of which is the most frequent one: bank
    (rare,) = consistency(sources, [[*translations, *["-"] * 10]], [[0, 1, 2]])
    assert rare.rows.tolist() == [[1, 1]]


def test_consistency_of_systems_and_of_the_reference(tmp_path: Path) -> None:
    ids = written(tmp_path / "ids", ["1"] * 20 + ["2"] * 20)
    source = written(tmp_path / "source", ["dog"] * 40)
    reference = written(tmp_path / "reference", ["hund"] * 40)
    lines = {"same": ["tier"] * 40, "varied": ["hund", "tier"] * 20, "worse": ["hund", "tier"] * 10 + ["hund"] * 20}
    systems = [
        Translated(name, written(tmp_path / name, each), (reference,), source, None, ids)
        for name, each in lines.items()
    ]
    found = score_side("test", systems, metrics=["BLEU"], documents=True)
    assert found.documents is not None
    assert found.documents.reference is not None
    assert found.documents.pairs == [380] * 4  # 2 * C(20, 2)
    # varied: 2 * C(10, 2) of C(20, 2) pairs agree in each document
    values = [scores[-1].value for scores in found.overall.scores]
    assert values == [found.documents.reference.value, pytest.approx(100 * 90 / 190), pytest.approx(100 * 280 / 380)]
    assert found.overall.differences[0][-1].value == pytest.approx(100 * 90 / 190 - 100)


def test_without_the_source_there_is_no_consistency(files: list[Translated], tmp_path: Path) -> None:
    unknown = [replace(file, source=None) for file in files]
    found = score_side("test", unknown, metrics=["BLEU"], documents=True)
    assert [score.name for score in found.overall.scores[0]] == ["d-BLEU"]
    assert any("give it with --source" in note for note in found.notes)
    assert "consistency" not in side_text(found)
    once = written(tmp_path / "once", [f"w{number}" for number in range(40)])
    none = score_side("test", [replace(files[0], source=once)], metrics=["BLEU"], documents=True)
    assert any("no term occurs twice" in note for note in none.notes)
    assert len(none.overall.scores[0]) == 1


def test_one_document_has_no_interval(files: list[Translated]) -> None:
    assert files[0].documents is not None
    written(files[0].documents, ["a"] * 40)
    found = score_side("test", files, metrics=["BLEU"], documents=True)
    assert all(score.low is None for scores in found.overall.scores for score in scores)
    assert "()" not in side_text(found)
    assert found.overall.differences[0][0].bootstrap_p is None


def test_directions_have_their_own_tokenizer(files: list[Translated], tmp_path: Path) -> None:
    ways = written(tmp_path / "ways", ["en-zh"] * 15 + ["en-de"] * 25)
    found = score_side("test", [replace(files[0], direction=ways)], metrics=["BLEU"], documents=True)
    assert {way: count for way, (count, _) in found.directions.items()} == {"en-zh": 2, "en-de": 1}
    assert [found.directions[way][1].scores[0][0].low is None for way in ("en-zh", "en-de")] == [False, True]
    assert "tok:zh+13a" in found.overall.scores[0][0].signature
    assert "tok:13a" in found.directions["en-de"][1].scores[0][0].signature


def test_tables_and_objects(files: list[Translated]) -> None:
    found = score_side("test", files, metrics=["BLEU", "chrF"], documents=True)
    assert found.documents is not None
    reference, one, two = found.documents.pairs
    assert len({reference, one, two}) == 3
    text = side_text(found)
    assert f"; pairs: reference {reference:,}, one {one:,}, two {two:,}" in text
    assert "documents: 3, lines: 40" in text
    assert "the reference has 100.00 (100.00 to 100.00); pairs: reference" in text
    head, first, *_ = text.split("\n\n")[-1].split("\n")
    assert head.split("  ")[0] == "line in document"
    assert first.split()[:4] == ["1-10", "23", "3", "one"]
    assert "system" not in side_text(score_side("test", files[:1], metrics=["BLEU"], documents=True))
    shown = sides_text([found] * 5)  # a matrix
    assert shown.count("line in document") == shown.count("the reference has") == 5
    (one, two), about = side_object(found)["systems"], side_object(found)["documents"]
    assert about["lines"] == 40
    assert about["consistency_of_reference"]["value"] == 100
    assert len(about["pairs"]) == 3
    assert one["by_position"][0]["lines"] == "1-10"
    assert two["differences"][2]["metric"] == "consistency"


def test_documents_have_bleu_and_chrf_only() -> None:
    assert document_metrics(None, ["BLEU", "chrF", "TER"]) == ("BLEU", "chrF")
    assert document_metrics(None, ["exact"]) == ("BLEU", "chrF")
    assert document_metrics(["chrf"], ["BLEU"]) == ("chrF",)
    with pytest.raises(MtkitError, match="documents have no TER; choose one or both of: BLEU, chrF"):
        document_metrics(["ter"], ["BLEU"])


def test_the_picture_has_a_panel_for_each_side(files: list[Translated], tmp_path: Path) -> None:
    sides = [score_side(name, files, metrics=["chrF"], documents=True).by_position for name in ("a $", "b")]
    heights = []
    for shown in (sides[:1], sides):
        draw_by_position(shown, tmp_path / "out.png")
        content = (tmp_path / "out.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        heights.append(int.from_bytes(content[20:24], "big"))
    assert heights[1] == heights[0] + 360


def drawn(names: list[str], monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    """The figure of systems with these names at two positions."""
    figures: list[Any] = []
    save = document_positions.save_figure
    monkeypatch.setattr(
        document_positions, "save_figure", lambda figure, path: figures.append(figure) or save(figure, path)
    )
    rows = [PositionRow(least, least + 9, 50, {"BLEU": 30.0}, 1.0, 4, 20.0, 40.0) for least in (1, 11)]
    draw_by_position([("side", names, [rows] * len(names))], path)
    return figures[0]


def test_many_and_long_names_stay_readable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = [f"{'folder/' * 20}{number}.de" for number in range(24)]
    few, many = (drawn(some, monkeypatch, tmp_path / "out.png") for some in (names[:2], names))
    assert many.get_figheight() - few.get_figheight() > 22 * 0.3  # two lines each
    bars = many.axes[0].containers
    assert len({(bar[0].get_color(), bar[0].get_marker(), bar[0].get_linestyle()) for bar in bars}) == len(names)
    assert all(-0.4 < place - round(place) < 0.4 for bar in bars for place in bar[0].get_xdata())
    box = many.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= many.get_figwidth() * many.dpi
    assert box.y0 >= 0
    panel = many.axes[0].get_window_extent()
    assert panel.height > 200
    assert box.y1 < panel.y0


def test_names_in_the_picture_are_no_formulas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["_a", r"a$\b$", "$x_1$"]
    figure = drawn(names, monkeypatch, tmp_path / "out.png")
    texts = figure.legends[0].get_texts()
    assert [text.get_text() for text in texts] == names
    assert not any(text.get_parse_math() for text in texts)


def test_letters_of_names_without_a_font_are_reported(files: list[Translated], tmp_path: Path) -> None:
    title, names, rows = score_side("test", files, metrics=["BLEU"], documents=True).by_position
    assert draw_by_position([(title, names, rows)], tmp_path / "out.png")
    assert not draw_by_position([(title, ["one", "\u0378"], rows)], tmp_path / "out.png")  # an unassigned letter
    assert not draw_by_position([("\u0378", names, rows)], tmp_path / "out.png")


def test_joined_texts_keep_everything_but_the_ids() -> None:
    lines = corpus(40, 0)
    ways = ["en-de"] * 40
    texts = joined(texts_of(lines, sources=lines, documents=IDS, directions=ways), GROUPS)
    assert texts.hypotheses == texts.references == [join(lines)]
    assert texts.sources == join(lines)
    assert texts.directions == ["en-de"] * 3
    assert texts.documents is None
