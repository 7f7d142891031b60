import json
from pathlib import Path

from mtkit.experiments.entries import parse_entries
from mtkit.experiments.pages.choose import choose_page, seeds
from mtkit.experiments.pages.findings import load
from mtkit.experiments.pages.questions import CLOSER_QUESTIONS, answer, good_at, letters, scores_object
from tests.experiments.pages.results import pack, unpack


def test_entries_of_the_study_are_mechanisms() -> None:
    assert len(parse_entries(load("probes")[0].settings.entries)) == 79


def test_entries_may_have_different_numbers_of_seeds(results: Path) -> None:
    lines = unpack(results / "probes.jsonl.gz").splitlines(keepends=True)
    pack(results / "probes.jsonl.gz", "".join(line for line in lines if ".gau.2" not in line))
    answers = answer()
    first = answers[0]
    assert first.complete
    assert list(first.seeds.items()) == [(1, 1), (2, 78)]
    assert seeds(first) == "1 to 2 seeds"
    assert first.measured["topk"].mark == "-", "all entries share one variance"
    text = choose_page(answers, answer(CLOSER_QUESTIONS))
    assert "| 1 to 2 |" in " ".join(text.split())
    pack(results / "probes.jsonl.gz", "".join(line for line in lines if '"gau"' not in line))
    assert not answer()[0].complete


def test_letters_are_the_roles_of_the_paper() -> None:
    assert [letters(name) for name in ("full", "nystrom", "additive", "band")] == ["EDC", "E", "C", "ED"]


def test_what_a_mechanism_is_good_at(results: Path) -> None:
    lines = [json.loads(line) for line in unpack(results / "probes.jsonl.gz").splitlines()]
    for each in lines:
        small = each["entry"].startswith(("band", "topk"))
        each["state_bytes"] = {"100": 600 if small else 1000}
        if each["entry"] == "gau":
            each["state_bytes"] = {}
    pack(results / "probes.jsonl.gz", "".join(f"{json.dumps(each)}\n" for each in lines))
    shown = [question for question in answer() if question.complete]
    good = good_at(shown)
    assert good["band"] == ["selection", "length", "small state", "long texts"]
    assert good["topk"] == []  # a small state and a fast layer, but worse than full
    assert good["gau"] == ["selection", "length"]  # its loss is full's, so it computes the same
    assert good["full"] == []
    row = scores_object(shown)["band"]["row"]
    assert row == (
        "select 97.0 + (full 90.0); select 2x 97.0 + (full 90.0); "
        "speed 3.1 at 2,048, 12 at 16,384 tokens; state 600 bytes"
    )
    assert scores_object(shown)["full"] == {"good_at": "", "row": "select 90.0; select 2x 90.0; state 1000 bytes"}
