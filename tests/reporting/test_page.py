"""The report: one page without assets, valid as a tree, with the numbers of `mtkit score`, and all text escaped."""

import json
import re
import shlex
from dataclasses import asdict
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtkit.cli.app import app
from mtkit.decoding.files import translate_side
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.evaluation.systems import run_sides
from mtkit.reporting.contents import differing, differing_settings, shown_segments
from mtkit.reporting.page import Chart, environment, line_chart
from mtkit.runs import Run
from mtkit.training.checkpoint import FORMAT
from mtkit.training.progress import Progress
from tests.decoding.trained import make_run

VOID = {"meta", "link"}


class Tree(HTMLParser):
    """Checks that elements are closed in order; gathers text, and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.words, self.addresses = list[str](), list[str](), list[str]()

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for key, value in attributes if key in ("src", "href")]
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, words: str) -> None:
        self.words.append(words)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs that have translated, one of which writes what HTML could take for its own, with metrics."""
    for name, attention in (("one", "full"), ("two", "band")):
        run = make_run(tmp_path, name=name, attention=attention, seed=len(name)).run
        translator = Translator([run])
        (side,) = [each for each in _sides(tmp_path) if each.name == "test"]
        translate_side(translator, side, joined=False)
        rows = [
            '{"kind": "train", "update": 10, "nll": 5.5, "tokens_per_second": 1234.0, "seconds": 60.0}',
            '{"kind": "validation", "update": 10, "nll": 5.0, "bleu": 1.5, "peak_bytes": 134217728}',
        ]
        (run.folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "mtkit-runs/one/translations/test.txt").write_text("<b>&amp; 犬が\n" * 7)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _sides(folder: Path) -> list:  # type: ignore[type-arg]
    from mtkit.data.prepared import open_prepared
    from mtkit.decoding.held_out import held_out

    return [held_out(open_prepared(folder / "mtkit-data"), "test")]


def typed(*words: str) -> str:
    result = CliRunner().invoke(app, ["report", *words], catch_exceptions=False)
    assert result.exit_code == 0
    page = Path("report.html").read_text(encoding="utf-8")
    assert result.stdout == "report.html\n"
    return page


def test_one_page_says_it_all(folder: Path) -> None:
    page = typed("one", "mtkit-runs/two")
    tree = Tree()
    tree.feed(page)
    assert not tree.open
    assert tree.addresses == ["data:,"]
    assert "url(" not in page
    assert "@import" not in page
    shown = " ".join(tree.words)
    for said in (
        "attention.encoder",
        "band",
        "1,234",
        "Validation BLEU",
        "p bootstrap",
        "Scores by source length",
        "mtkit score",
    ):
        assert said in shown
    assert "<b>" not in page
    assert "<b>&amp;" in shown
    assert "layer 1 head 1" in shown
    assert re.search(r"Words: +\d+-\d+ ", shown), "no word alignment"
    assert "128.0" in shown
    one = typed("two")
    assert "p bootstrap" not in one
    assert "data.folder" in one


def test_segment_scores_of_other_metrics_are_shown(folder: Path) -> None:
    for name, score in (("one.scores", 0.8125), ("two.scores", 0.3125)):
        Path(name).write_text(f"{score}\n" * 7)
    scores = ["--segment-scores", "Mine=one.scores", "--segment-scores", "Mine=two.scores"]
    page = typed("one", "two", "--side", "test", *scores)
    assert "mtkit translate --run mtkit-runs/two --side test\n" in page
    assert page.count("<td>0.8125") == page.count("<td>0.3125") == 4  # overview, score, interval, one source length
    assert "-0.5000" in page
    (command,) = re.findall("mtkit report .*(?=</code>)", page)
    Path("report.html").unlink()
    typed(*shlex.split(unescape(command))[2:])
    assert Path("report.html").read_text(encoding="utf-8") == page
    with pytest.raises(MtkitError, match="give one per system"):
        typed("one", "two", "--segment-scores", "Mine=one.scores")


def test_documents_are_scored_too_if_a_run_knows_them(folder: Path) -> None:
    assert "Documents of" not in typed("one", "two")
    (folder / "mtkit-runs/two/translations/test.docids.txt").write_text("a\n" * 4 + "b\n" * 3)
    page = typed("one", "two")
    tree = Tree()
    tree.feed(page)
    shown = " ".join(tree.words)
    assert "Documents of test" in shown
    assert "Documents: 2, lines: 7" in shown
    assert "d-BLEU" in shown
    assert shown.count("1-10") >= 2


def test_text_is_shown_from_the_side_that_its_letters_ask_for(folder: Path) -> None:
    page = typed("one", "two")
    assert set(re.findall("<dd[^>]*>", page)) == {'<dd dir="auto">'}
    attention = page[page.index("<h2>Attention") :]
    assert attention.count('<p dir="auto">') == 3  # the source, and what each run makes of it
    macros = environment().get_template("macros.html").module
    table = unescape(macros.attention_table(["▁كلب"], ["▁dog"], [[1.0]]))  # type: ignore[attr-defined]
    assert table.count('<th dir="auto">') == table.count("<th ") == 2
    assert 'title="\u2068▁dog\u2069 → \u2068▁كلب\u2069: 1.000"' in table


def test_what_cannot_be_reported_is_one_line(folder: Path) -> None:
    with pytest.raises(MtkitError, match="no translations of a side"):
        typed("one", "--side", "other")
    with pytest.raises(MtkitError, match="is a folder"):
        typed("one", "--output", "mtkit-runs")
    assert not Path("report.html").exists()


@pytest.mark.parametrize("speed", ['"x"', "NaN", "[]"])
def test_a_damaged_record_of_translations_is_named(folder: Path, speed: str) -> None:
    record = folder / "mtkit-runs/one/translations/test.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"tokens_per_second": 0.125}).replace("0.125", speed))
    with pytest.raises(MtkitError, match=r"test\.json is damaged \(tokens_per_second = .*translate` again"):
        typed("one")


def test_a_page_without_weights_says_so_in_place_of_the_attention(folder: Path) -> None:
    run = Run(folder / "mtkit-runs/one")
    run.weights().unlink()
    assert f"{run.weights().name} is missing" in typed("one")


def test_segments_are_ordered_by_what_they_show(folder: Path) -> None:
    reference = Path("mtkit-runs/one/translations/test.reference.txt").read_text().split("\n")
    Path("mtkit-runs/two/translations/test.txt").write_text("\n".join([*reference[:1], *["x"] * 6]) + "\n")
    from mtkit.runs import find_run

    files = run_sides([find_run(name="one"), find_run(name="two")], ["test"])["test"]
    kinds = shown_segments(files)
    assert kinds["Segments with the largest difference between runs"][0].number == 1
    assert kinds["Best segments"][0].number == 1
    assert kinds["Best segments"][0].scores[1] == 100


def test_an_imported_run_has_no_settings_of_training(folder: Path) -> None:
    runs = [Run(folder / "mtkit-runs" / name) for name in ("one", "two")]
    assert any(name.startswith("training.") for name, _ in differing_settings(runs[:1]))
    path = runs[0].folder / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"imported_from": "opus"}))
    imported = Run(runs[0].folder)
    assert not any(name.startswith("training.") for name, _ in differing_settings([imported]))
    assert ("training.optimizer", ["", "adamw"]) in differing_settings([imported, runs[1]])


def test_differences_are_of_words() -> None:
    assert differing("the red cat sees", "the cat sees it") == {1}
    assert differing("我爱你", "我 你") == {1}
    assert differing("", "a") == set()


def test_only_the_beginnings_of_long_segments_are_compared() -> None:
    text = " ".join(map(str, range(50_000)))
    assert differing(f"a {text}", text) == {0}
    assert differing(f"{text} a", text) == set()


def test_a_chart_holds_its_points() -> None:
    def points(chart: Chart | None) -> list[tuple[int, bool]]:
        assert chart is not None
        return [(len(line), dots) for _, line, dots in chart.lines]

    assert line_chart("x", [(0, [])], dots=True) is None
    assert points(line_chart("x", [(0, [(1, 2.0)]), (1, [(1, 2.0), (3, -4.0)])], dots=True)) == [(1, True), (2, True)]
    assert points(line_chart("x", [(0, [(0, 0.0), (0, 0.0)])], dots=False)) == [(2, False)]
    assert points(line_chart("x", [(0, [(1, 2.0)]), (1, [(1, 2.0), (3, 4.0)])], dots=False)) == [(1, True), (2, False)]
    chart = line_chart("x", [(7, [(0, 1.0), (50, 3.0), (100, 2.0)])], dots=True)
    assert chart is not None
    assert chart.grid == [(206.0, "1"), (157.0, "1.5"), (108.0, "2"), (59.0, "2.5"), (10.0, "3")]
    assert chart.updates == [(46.0, "0", "start"), (227.0, "50", "middle"), (408.0, "100", "end")]
    assert chart.lines == [(1, [(46.0, 206.0), (227.0, 10.0), (408.0, 108.0)], True)]
    odd = line_chart("x", [(7, [(0, 1.0), (5, 3.0)])], dots=True)
    assert odd is not None
    assert [label for _, label, _ in odd.updates] == ["0", "5"]


def test_validation_scores_with_different_signatures_are_on_different_lines(folder: Path) -> None:
    rows = [(10, "13a", 1.0), (20, "13a", 2.0), (30, "zh", 30.0)]
    text = "".join(
        json.dumps({"kind": "validation", "update": update, "bleu": bleu, "signature": signature}) + "\n"
        for update, signature, bleu in rows
    )
    (folder / "mtkit-runs/one/metrics.jsonl").write_text(text)
    page = typed("one")
    chart = re.findall("(?s)<figure.*?</figure>", page)[0]
    assert "Validation BLEU (signatures differ: lines are not comparable)" in chart
    assert [len(points.split()) for points in re.findall('points="([^"]*)"', chart)] == [2, 1]


def test_updates_and_minutes_are_those_of_the_last_checkpoint(folder: Path) -> None:
    """Metrics have a row for every so many updates."""
    checkpoints = folder / "mtkit-runs/one/checkpoints"
    last = Run(checkpoints.parent).checkpoint("last").rename(checkpoints / "update-00001234")
    (last.parent.parent / "best.json").unlink(missing_ok=True)
    state = {"format": FORMAT, "sha256": {}, **asdict(Progress(update=1234, seconds=7_500.0))}
    (last / "state.json").write_text(json.dumps(state))
    tree = Tree()
    tree.feed(typed("one"))
    table = tree.words[tree.words.index("training minutes") :]
    assert {"1,234", "125.0"} <= set(table)
    assert "training tokens/s, median" in table
    (last / "state.json").unlink()  # as an imported run has none
    (checkpoints.parent / "metrics.jsonl").unlink()
    tree = Tree()
    tree.feed(typed("one"))
    assert "125.0" not in tree.words
    assert not any("median" in word for word in tree.words)


def test_many_sides_are_one_table(folder: Path) -> None:
    for run in ("one", "two"):
        translations = folder / "mtkit-runs" / run / "translations"
        for path in [*translations.glob("test.*")]:
            for number in range(5):
                (translations / path.name.replace("test", f"more-{number}", 1)).write_bytes(path.read_bytes())
    tree = Tree()
    tree.feed(typed("one", "two"))
    assert not tree.open
    shown = " ".join(tree.words)
    assert shown.count("95% interval") == 0
    assert shown.count("nrefs:") == 3
    assert all(f"more-{number} by source length" in shown for number in range(5))
