import json
from pathlib import Path

import pytest

from mtkit.attention import mechanisms
from mtkit.experiments.pages import findings
from mtkit.experiments.pages.findings import Claim, Measured, claims, load, long_costs, measure, speeds, verdict
from mtkit.experiments.pages.questions import QUESTIONS
from mtkit.experiments.pooled import Pooled
from mtkit.experiments.setup import task_label
from tests.experiments.pages.results import pack, rows_of


def measured(difference: float, low: float, p: float | None) -> Measured:
    score = Pooled(80 + difference, 70.0, 90.0, difference, low, p)
    return Measured("band", "band", [{}] * 3, [80 + difference] * 3, score)


@pytest.mark.parametrize(
    ("case", "mark", "equal", "better"),
    [
        (measured(5, 3, 0.01), "+", "held", "held"),
        (measured(0.5, -1, 0.6), "=", "held", "not seen at this size"),
        (measured(-1, -5, 0.6), "", "not seen at this size", "not seen at this size"),
        (measured(-9, -12, 0.01), "-", "worse after this training", "worse after this training"),
        (measured(-1, -1.5, 0.01), "-", "worse after this training", "worse after this training"),
    ],
)
def test_the_verdict_follows_the_measurement(case: Measured, mark: str, equal: str, better: str) -> None:
    assert case.mark == mark
    assert verdict(Claim(claim="x", task="probes/sort"), case) == equal
    assert verdict(Claim(claim="x", task="probes/sort", expect="better"), case) == better


def test_without_a_test_nothing_is_said() -> None:
    assert measured(5, 3, None).mark == ""
    assert verdict(Claim(claim="x", task="probes/sort"), measured(5, 3, None)) == "not measured"
    assert verdict(Claim(claim="x"), measured(5, 3, 0.01)) == "not measured"
    assert verdict(Claim(claim="x", task="probes/sort"), None) == "not measured"


def test_rows_of_a_task_become_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    assert load("probes")[1] == []
    scores = {"full": [90.0, 92.0], "band[window_radius=4]": [95.0, 97.0], "topk[keys=4]": [50.0]}
    failed = {**rows_of({"additive": [1.0]}, "sort")[0], "failed": "why"}
    rows = [*rows_of(scores, "selective-copy"), *rows_of({"full": [10.0]}, "sort"), failed]
    pack(tmp_path / "probes.jsonl.gz", "".join(f"{json.dumps(each)}\n" for each in rows))
    study, good = load("probes")
    found = measure(study, good, "selective-copy", "token")
    assert {name: each.values for name, each in found.items()} == {
        "full": [90.0, 92.0], "band": [95.0, 97.0], "topk": [50.0],
    }  # fmt: skip
    assert found["band"].entry == "band[window_radius=4]"
    assert found["band"].score.difference == 5.0
    assert found["topk"].mark == "-"
    assert list(measure(study, good, "sort", "token")) == ["full"]
    assert measure(study, good, "copy", "token") == {}


def test_a_mechanism_that_computes_the_same_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    rows = rows_of({"full": [90.0, 92.0], "band[window_radius=4]": [90.0, 92.0], "gau": [90.0, 92.0]}, "sort")
    for each in rows:
        each["valid"] = {"nll": 0.5 + (each["entry"] == "gau" and each["seed"] == 2)}
    pack(tmp_path / "probes.jsonl.gz", "".join(f"{json.dumps(each)}\n" for each in rows))
    found = measure(*load("probes"), "sort", "token")
    assert {name: each.mark for name, each in found.items()} == {"full": "", "gau": "", "band": "≡"}
    assert verdict(Claim(claim="x", task="probes/sort"), found["band"]) == "not measured"


def test_costs_are_relative_to_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    case = {"attention": "band", "work": "forward-backward", "form": "sub-layer", "length": 2048}
    ratios = {"flops": 4.0, "seconds": 3.0}
    cases = [{**case, "full_by_this": ratios}, {**case, "form": "attention", "full_by_this": {"flops": 8.0}}]
    cases += [{**case, "length": 32, "full_by_this": {"flops": 1.0, "seconds": 0.5}}]
    for repeats in (1, 3):
        run = {"setting": {"repeats": repeats}, "measurements": cases}
        (tmp_path / "attention-encoder.json").write_text(json.dumps(run))
        assert long_costs() == {"band": 0.25}
        assert speeds() == ({} if repeats == 1 else {"band": {2048: 3.0, 32: 0.5}})


def test_every_mechanism_has_a_claim_about_a_task_that_exists() -> None:
    found = claims()
    assert set(found) == {name for name, mechanism in mechanisms().items() if mechanism.package is None}
    tasks = [task_label(task) for task in load("probes")[0].settings.tasks]
    later = {"probes/mqar"}
    places = {question.place for question in QUESTIONS}
    assert {claim.task for claim in found.values()} <= {None, *places, *later}
    assert {question.task for question in QUESTIONS if question.study == "probes"} == set(tasks)
