"""Scores for people and programs."""

import json

from mtkit.evaluation.report import as_objects, table
from mtkit.evaluation.scores import Score

BLEU, TER = Score("BLEU", 31.4159, "nrefs:1|case:mixed", 30.0, 33.333), Score("TER", 50.0, "nrefs:1", 45.5, 55.5)


def test_the_table_shows_value_interval_and_signature_in_columns() -> None:
    head, bleu, ter = table([BLEU, TER]).split("\n")
    assert "31.42" in bleu
    assert "30.00 to 33.33" in bleu
    assert bleu.endswith("nrefs:1|case:mixed")
    assert head.index("signature") == bleu.index("nrefs") == ter.index("nrefs")


def test_the_table_leaves_out_intervals_that_nobody_asked_for() -> None:
    assert "interval" not in table([Score("BLEU", 1.0, "s")])
    assert "interval" in table([BLEU])


def test_objects_hold_unrounded_numbers() -> None:
    (found,) = json.loads(json.dumps(as_objects([BLEU])))
    assert found == {"name": "BLEU", "value": 31.4159, "signature": "nrefs:1|case:mixed", "low": 30.0, "high": 33.333}
