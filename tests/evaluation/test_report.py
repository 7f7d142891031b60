"""Scores for people and programs."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

from mtkit.evaluation.report import side_object, side_text, sides_text, table
from mtkit.evaluation.scores import Score
from mtkit.evaluation.side_scores import SideScores
from mtkit.evaluation.significance import Comparison, Difference
from mtkit.evaluation.statistics import LengthRow
from mtkit.evaluation.systems import Translated

BLEU, TER = Score("BLEU", 31.4159, "nrefs:1|case:mixed", 30.0, 33.333), Score("TER", 150.0, "nrefs:1", 145.5, 155.5)
BETTER = Difference("BLEU", 1.234, 0.0123, 0.4567, "nrefs:1|bs:1000|ar:10000|seed:12345")
WORSE = Difference("TER", -0.5, None, 0.5, "nrefs:1|ar:10000|seed:12345")
ONE, TWO = (Translated(name, Path(f"{name}.de"), (Path("reference.de"),)) for name in ("one", "two"))
ALONE, BOTH = Comparison([[BLEU, TER]], []), Comparison([[BLEU, TER]] * 2, [[BETTER, WORSE]])
ROWS = [
    LengthRow(1, 10, 1200, {"BLEU": 40.0, "TER": 9.0}, 0.98765),
    LengthRow(61, None, 3, {"BLEU": 1, "TER": 80}, None),
]


def side(comparison: Comparison, directions: list[str], lengths: list[list[LengthRow]]) -> SideScores:
    files = [ONE, TWO][: len(comparison.scores)]
    return SideScores("test", files, 1203, comparison, {way: (600, comparison) for way in directions}, lengths, [])


def test_the_table_shows_value_interval_and_signature_in_columns() -> None:
    head, bleu, ter = table([BLEU, TER]).split("\n")
    assert "31.42" in bleu
    assert "30.00 to 33.33" in bleu
    assert bleu.endswith("nrefs:1|case:mixed")
    assert head.index("signature") == bleu.index("nrefs") == ter.index("nrefs")
    assert bleu.index("31.42") + 5 == ter.index("150.00") + 6  # numbers end at one place


def test_the_table_leaves_out_intervals_that_nobody_asked_for() -> None:
    assert "interval" not in table([Score("BLEU", 1.0, "s")])
    assert "interval" in table([BLEU])


def test_objects_hold_unrounded_numbers() -> None:
    found, _ = json.loads(json.dumps(side_object(side(ALONE, [], []))["systems"][0]["scores"]))
    assert found == {"name": "BLEU", "value": 31.4159, "signature": "nrefs:1|case:mixed", "low": 30.0, "high": 33.333}


def test_one_system_is_shown_with_its_scores() -> None:
    assert side_text(side(ALONE, [], [])) == f"one.de against reference.de\n\n{table([BLEU, TER])}"


def test_several_systems_are_shown_with_their_differences_and_signatures() -> None:
    title, scores, signatures, legend = side_text(side(BOTH, [], [])).split("\n\n")
    assert title == "one.de, two.de against reference.de"
    head, *lines = scores.split("\n")
    assert [line.split()[:3] for line in lines] == [
        ["BLEU", "one", "31.42"],
        ["BLEU", "two", "31.42"],
        ["TER", "one", "150.00"],
        ["TER", "two", "150.00"],
    ]
    assert lines[1].split()[-4:] == ["+1.23", "0.0123", "*", "0.4567"]
    assert lines[3].split()[-2:] == ["-0.50", "0.5000"]
    assert lines[1].index("0.4567") == lines[3].index("0.5000")
    assert "p bootstrap" in head
    assert "direction" not in head
    assert [line.split()[-1] for line in signatures.split("\n")[1:]] == [BETTER.signature, WORSE.signature]
    assert "two minus one" in legend


def test_directions_follow_all_of_them() -> None:
    _, scores, signatures = side_text(side(ALONE, ["en-fr", "en-de"], [])).split("\n\n")
    head, *lines = scores.split("\n")
    assert head.split()[:3] == ["metric", "direction", "segments"]
    assert [line.split()[:3] for line in lines[:3]] == [
        ["BLEU", "all", "1,203"],
        ["BLEU", "en-fr", "600"],
        ["BLEU", "en-de", "600"],
    ]
    assert signatures.count("nrefs") == 2


def test_lengths_are_shown_for_every_system() -> None:
    head, *lines = side_text(side(BOTH, [], [ROWS, ROWS])).split("\n\n")[-1].split("\n")
    assert head.split() == ["words", "in", "source", "segments", "system", "BLEU", "TER", "length", "ratio"]
    assert lines[0].split() == ["1-10", "1,200", "one", "40.00", "9.00", "0.988"]
    assert [line.split()[-4:] for line in lines[2:]] == [["3", name, "1.00", "80.00"] for name in ("one", "two")]
    assert "system" not in side_text(side(ALONE, [], [ROWS]))


def test_the_object_carries_everything() -> None:
    found = json.loads(json.dumps(side_object(side(BOTH, ["en-fr"], [ROWS, ROWS]))))
    assert (found["name"], found["segments"]) == ("test", 1203)
    one, two = found["systems"]
    assert (one["name"], one["hypothesis"], one["references"]) == ("one", "one.de", ["reference.de"])
    assert one["differences"] == []
    assert two["differences"][0] == {
        "metric": "BLEU",
        "value": 1.234,
        "bootstrap_p": 0.0123,
        "randomisation_p": 0.4567,
        "signature": BETTER.signature,
    }
    (way,) = two["by_direction"]
    assert (way["direction"], way["segments"]) == ("en-fr", 600)
    assert way["scores"] == two["scores"] == [asdict(BLEU), asdict(TER)]
    assert two["by_length"][1]["words"] == "over 60"
    assert two["by_length"][0]["length_ratio"] == 0.98765
    assert side_object(side(ALONE, [], []))["systems"][0]["by_length"] == []


def test_many_directions_make_one_matrix() -> None:
    ways = [f"{one}-{other}" for one in ("de", "en", "fr", "ja") for other in ("de", "en", "fr", "ja") if one != other]
    title, scores, signatures = sides_text([side(ALONE, ways, [])]).split("\n\n")
    assert title == "one.de against reference.de"
    head, *lines = scores.split("\n")
    assert head.split() == ["side", "direction", "segments", "BLEU", "95%", "interval", "TER", "95%", "interval"]
    assert [line.split()[1] for line in lines] == ["all", *ways]
    assert lines[1].split()[2:] == ["600", "31.42", "30.00", "to", "33.33", "150.00", "145.50", "to", "155.50"]
    assert signatures.count("nrefs") == 2
    assert "used for" not in signatures


def test_many_sides_of_several_systems_make_one_matrix() -> None:
    sure = Comparison(BOTH.scores, [[replace(BETTER, randomisation_p=0.01), WORSE]])
    sides = [replace(side(sure if number else BOTH, [], []), name=f"side-{number}") for number in range(6)]
    title, scores, signatures, legend = sides_text(sides).split("\n\n")
    assert title == "6 sides in ."
    lines = scores.split("\n")
    assert len(lines) == 1 + 6 * 2
    assert lines[2].split() == ["side-0", "1,203", "two", "31.42", "+1.23", "150.00", "-0.50"]
    assert lines[4].split() == ["side-1", "1,203", "two", "31.42", "+1.23", "*", "150.00", "-0.50"]
    assert signatures.count("nrefs") == 2
    assert "minus the score of one" in legend


def test_signatures_that_differ_name_their_sides() -> None:
    other = Comparison([[replace(BLEU, signature="tok:zh"), TER]], [])
    sides = [replace(side(other if number == 3 else ALONE, [], []), name=f"s{number}") for number in range(5)]
    *_, signatures = sides_text(sides).split("\n\n")
    assert "nrefs:1|case:mixed  s0, s1, s2, s4\n" in signatures
    assert re.search(r"^BLEU +tok:zh +s3$", signatures, re.MULTILINE)


def test_few_sides_have_a_block_each() -> None:
    assert sides_text([side(ALONE, [], [])] * 3) == "\n\n".join([side_text(side(ALONE, [], []))] * 3)
