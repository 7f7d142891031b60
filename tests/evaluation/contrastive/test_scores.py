"""Contrastive evaluation: scores compared with forced steps of the model, tests with enumeration."""

import json
import math
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtkit.decoding import translator as module
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError, MtkitError
from mtkit.evaluation.contrastive import scores as scoring
from mtkit.evaluation.contrastive.files import ContrastiveFile
from mtkit.evaluation.contrastive.report import contrastive_object, contrastive_text
from mtkit.evaluation.contrastive.scores import (
    ContrastiveScores,
    Group,
    compare_contrastive,
    mcnemar,
    score_contrastive,
    scores_path,
)
from mtkit.evaluation.scores import wilson
from mtkit.evaluation.seeds import holm
from mtkit.runs import Run
from mtkit.text.tokenizer import BREAK, EOS
from tests.decoding.test_contexts import by_steps
from tests.decoding.trained import make_run, sentences


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("documents"), documents=22).run


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("single")).run


def write(path: Path, rows: list[dict[str, Any]]) -> ContrastiveFile:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return ContrastiveFile(path)


def rows_of(count: int, *, context: int = 0) -> list[dict[str, Any]]:
    """Random items, each with two wrong translations and up to that many context sentences."""
    rows = []
    for number in range(count):
        source, right, *wrong = sentences(4, seed=number)
        before = sentences(number % (context + 1), seed=1000 + number)
        row = {
            "source": source,
            "right": right,
            "wrong": wrong,
            "labels": {"distance": number % 3, "odd": number % 2 > 0},
        }
        rows.append({**row, "source_context": before, "target_context": before[::-1]})
    return rows


def expected(run: Run, row: dict[str, Any], alpha: float = 0.0) -> list[float]:
    """The scores of the translations of an item, right one first, by the steps of a search."""
    encode = run.tokenizers.source.encode, run.tokenizers.target.encode
    before = [
        list(chain.from_iterable([*encode[side](text), BREAK] for text in row[name]))
        for side, name in enumerate(("source_context", "target_context"))
    ]
    source, scores = [*before[0], *encode[0](row["source"]), EOS], []
    for text in (row["right"], *row["wrong"]):
        pieces = [*encode[1](text), EOS]
        log_probs = by_steps(run, source, [*before[1], *pieces])[len(before[1]) :]
        scores.append(sum(log_probs) / len(pieces) ** alpha)
    return scores


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_right_translation_must_beat_every_wrong_one(single: Run, tmp_path: Path, alpha: float) -> None:
    rows = [{**row, "source_context": [], "target_context": []} for row in rows_of(12)]
    found = score_contrastive(Translator([single]), write(tmp_path / "pairs.jsonl", rows), length_penalty=alpha)
    scores = [expected(single, row, alpha) for row in rows]
    assert found.margins == pytest.approx([right - max(wrong) for right, *wrong in scores], abs=1e-3)
    assert found.right.tolist() == [right > max(wrong) for right, *wrong in scores]
    assert 0 < found.right.sum() < 12
    assert found.path == single.folder / "contrastive" / "pairs.jsonl"
    kept = [json.loads(line) for line in found.path.read_text().splitlines()]
    assert [row["log_probs"][0] for row in kept] == pytest.approx([expected(single, row)[0] for row in rows], abs=1e-3)


def test_contexts_precede_the_segment_in_runs_trained_on_documents(documents: Run, tmp_path: Path) -> None:
    rows, said = rows_of(6, context=1), list[str]()
    file = write(tmp_path / "pairs.jsonl", rows)
    found = score_contrastive(Translator([documents]), file, say=said.append)
    assert not said
    scores = [expected(documents, row) for row in rows]
    assert found.margins == pytest.approx([right - max(wrong) for right, *wrong in scores], abs=1e-3)
    alone = score_contrastive(Translator([documents]), file, documents=False, say=said.append)
    assert not said
    scores = [expected(documents, {**row, "source_context": [], "target_context": []}) for row in rows]
    assert alone.margins == pytest.approx([right - max(wrong) for right, *wrong in scores], abs=1e-3)
    assert not np.allclose(found.margins, alone.margins, atol=1e-3)


def test_all_translations_of_a_segment_get_the_same_context(documents: Run, tmp_path: Path) -> None:
    before = ["The tree.", "One cat."]
    size, *sizes = (len(documents.tokenizers.target.encode(text)) for text in ("dog", *before))
    wrong = " ".join(["dog"] * ((22 - sum(sizes) - 2) // size + 1))  # a piece too long for both sentences before it
    row = {
        "source": "The dog.",
        "right": "A cat.",
        "wrong": [wrong],
        "source_context": ["A tree.", "One bird."],
        "target_context": before,
    }
    said: list[str] = []
    found = score_contrastive(Translator([documents]), write(tmp_path / "a.jsonl", [row]), say=said.append)
    (kept,) = map(json.loads, found.path.read_text().splitlines())
    assert (kept["context"], kept["context_given"]) == (1, 2)  # both fit before the right translation
    nearest = {**row, "source_context": ["One bird."], "target_context": ["One cat."]}
    assert kept["log_probs"] == pytest.approx(expected(documents, nearest), abs=1e-3)
    assert len(said) == 1
    assert said[0].startswith("contexts were cut to their nearest sentences (1)")


def test_a_run_of_single_sentences_leaves_contexts_out(single: Run, tmp_path: Path) -> None:
    file, said = write(tmp_path / "contexts.jsonl", rows_of(5, context=2)), list[str]()
    found = score_contrastive(Translator([single]), file, say=said.append)
    assert said == [
        f"the run was trained on single sentences, so the contexts of 3 segments are left out ({single.folder})"
    ]
    again = score_contrastive(Translator([single]), file, documents=False, say=said.append)
    assert len(said) == 1
    assert (again.margins == found.margins).all()
    with pytest.raises(MtkitError, match="--documents needs a run trained on documents"):
        score_contrastive(Translator([single]), file, documents=True)


def test_ties_are_wrong_and_repeated_texts_are_scored_once(
    single: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"source": "The dog.", "right": "A cat.", "wrong": "A cat."}
    errors = [{"type": "x", "contrastive": text} for text in ("a", "b", "c")]
    lingeval = {"source": "The dog.", "reference": "A cat.", "errors": errors}
    force, sizes = module.force_lines, list[int]()

    def counting(engine: Any, tokenizers: Any, lines: Any, *rest: Any, **more: Any) -> Any:
        sizes.append(len(lines.lines))
        return force(engine, tokenizers, lines, *rest, **more)

    monkeypatch.setattr(module, "force_lines", counting)
    done: list[int] = []
    file = write(tmp_path / "pairs.jsonl", [row, lingeval, row])
    found = score_contrastive(Translator([single]), file, on_progress=done.append)
    assert sizes == [4]
    assert sum(done) == len(found.right) == 5
    assert found.right[[0, 4]].tolist() == [False, False]
    assert found.margins[[0, 4]].tolist() == [0, 0]
    assert found.repeated == 2
    assert found.chances.tolist() == [1 / 2] * 5


def test_a_text_that_is_too_long_is_named_by_its_line(single: Run, tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", [*rows_of(2), {"source": "a", "right": "b", "wrong": "c " * 30}])
    with pytest.raises(DataError, match=r"pairs\.jsonl: target line 3 has \d+ pieces"):
        score_contrastive(Translator([single]), file)


def test_a_killed_call_goes_on(single: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "pairs.jsonl", rows_of(8))
    whole = score_contrastive(Translator([single]), file)
    monkeypatch.setattr(scoring, "CHUNK", 3)
    score, calls, said = scoring._score_items, list[int](), list[str]()

    def dying(translator: Any, items: Any, *rest: Any) -> Any:
        calls.append(items[0].number)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score(translator, items, *rest)

    monkeypatch.setattr(scoring, "_score_items", dying)
    with pytest.raises(KeyboardInterrupt):
        score_contrastive(Translator([single]), file)
    done: list[int] = []
    again = score_contrastive(Translator([single]), file, say=said.append, on_progress=done.append)
    assert calls == [1, 4, 4, 7]
    assert said[0].startswith("resuming after line 3")
    assert sum(done) == 8
    assert again.margins == pytest.approx(whole.margins, abs=1e-4)
    assert again.labels == whole.labels


def test_replaced_scores_of_another_file_are_reported(single: Run, tmp_path: Path) -> None:
    rows, said = [{**row, "source_context": [], "target_context": []} for row in rows_of(8)], list[str]()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = write(tmp_path / "one" / "names.jsonl", rows[:4]), write(tmp_path / "two" / "names.jsonl", rows[4:])
    found = score_contrastive(Translator([single]), one, say=said.append)
    score_contrastive(Translator([single]), one, say=said.append)
    assert not said
    score_contrastive(Translator([single]), two, say=said.append)
    assert said == [
        f"replaced the scores of other segments in {found.path}; to keep both, give files of different names"
    ]
    found.path.write_text("[]\n")
    score_contrastive(Translator([single]), two, say=said.append)
    assert len(said) == 2


def test_the_direction_is_the_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path, directions=("en-de", "en-fr")).run
    file = write(tmp_path / "pairs.jsonl", rows_of(4))
    with pytest.raises(MtkitError, match="--direction: en-de, en-fr"):
        score_contrastive(Translator([run]), file)
    german, french = (score_contrastive(Translator([run]), file, direction=way).margins for way in run.directions)
    assert not np.allclose(german, french, atol=1e-3)


def test_files_go_into_the_run(single: Run) -> None:
    assert scores_path(single, Path("far/contra.pro.jsonl.gz")) == single.folder / "contrastive" / "contra.pro.jsonl"


def system(right: list[bool], labels: list[dict[str, Any]] | None = None) -> ContrastiveScores:
    margins = np.where(right, 1.0, -1.0)
    return ContrastiveScores(Path("a"), margins, np.full(len(right), 0.5), labels or [{} for _ in right], 0)


def test_accuracies_by_label() -> None:
    values = [4, ">10k", None, True, "b", 1, "a", ">3", 4, False, 2.5]
    labels = [{"x": value, "y": "z"} if value is not None else {"y": "z"} for value in values]
    right = [True, False] * 5 + [True]
    overall, *groups = compare_contrastive([system(right, labels)])
    assert (overall.label, overall.value, overall.segments, overall.chance) == ("all", None, 11, 50)
    assert overall.accuracies[0].right == 6
    assert (overall.accuracies[0].low, overall.accuracies[0].high) == wilson(6, 11)
    # False and 1 are two values, although True equals 1
    assert [(group.label, group.value) for group in groups] == [
        ("x", value) for value in (False, True, 1, 2.5, ">3", 4, ">10k", "a", "b")
    ] + [("y", "z")]
    by_value = {(type(group.value), group.value): group for group in groups}
    assert by_value[int, 4].segments == 2
    assert by_value[int, 4].accuracies[0].value == 100
    assert by_value[str, ">10k"].accuracies[0].value == 0


def test_systems_are_compared_on_the_same_segments() -> None:
    random = np.random.default_rng(1)
    rights = [random.random(60) < share for share in (0.4, 0.7, 0.5)]
    labels = [{"d": number % 3} for number in range(60)]
    groups = compare_contrastive([system(right.tolist(), labels) for right in rights])
    assert len(groups) == 4
    for group in groups:
        picked = np.array([group.value is None or row["d"] == group.value for row in labels])
        for paired, right in zip(group.paired, rights[1:], strict=True):
            one, other = rights[0][picked], right[picked]
            assert paired.value == pytest.approx(100 * (other.mean() - one.mean()))
            assert (paired.only_first, paired.only_this) == (sum(one > other), sum(other > one))
            assert paired.p == mcnemar(paired.only_first, paired.only_this)
    assert [test.p_holm for test in groups[0].paired] == holm([test.p for test in groups[0].paired])
    of_label = [test for group in groups[1:] for test in group.paired]
    assert [test.p_holm for test in of_label] == holm([test.p for test in of_label])
    with pytest.raises(DataError, match="score again"):
        compare_contrastive([system([True]), system([True, False])])


def test_mcnemar_is_the_two_sided_binomial_test() -> None:
    """Probabilities of a fair coin, added up as fractions."""
    for one in range(0, 40, 3):
        for other in range(0, 40, 3):
            tosses = one + other
            below = sum(Fraction(math.comb(tosses, k), 2**tosses) for k in range(min(one, other) + 1))
            assert mcnemar(one, other) == pytest.approx(float(min(Fraction(1), 2 * below)), rel=1e-9)
    assert mcnemar(0, 5000) < 1e-300
    assert mcnemar(49_000, 51_000) == pytest.approx(math.erfc(1999 / math.sqrt(100_000) / math.sqrt(2)), rel=1e-3)


def test_tables_and_objects() -> None:
    labels = [{"kind": kind, "distance": distance} for kind in ("name", "pronoun") for distance in (1, 16, 2)]
    right = [True, False, True, True, False, True]
    systems = [system(right, labels), system([not value for value in right], labels)]
    groups = compare_contrastive(systems[:1])
    lines = contrastive_text("f.jsonl", ["one"], groups).splitlines()
    assert lines[0] == (
        "f.jsonl: share of segments in which the right translation has the highest log-probability, in per cent"
    )
    assert lines[2].split() == ["label", "value", "segments", "chance", "accuracy", "95%", "interval"]
    assert [line.split()[:3] for line in lines[3:]] == [
        ["all", "6", "50.0"],
        ["kind", "name", "3"],
        ["pronoun", "3", "50.0"],
        ["distance", "1", "2"],
        ["2", "2", "50.0"],
        ["16", "2", "50.0"],
    ]
    groups = compare_contrastive(systems)
    both = contrastive_text("f.jsonl", ["one", "two"], groups, 1.0)
    assert "log-probability / length^1" in both
    assert "adjusted by Holm's method" in both
    assert "0.6875" in both  # 4 of 6 segments are only right in the first system
    many = compare_contrastive([system([True] * 60), system([False] * 60)])
    assert "<0.0001 *" in contrastive_text("f.jsonl", ["one", "two"], many)
    assert both.count(" two ") == 6
    content = contrastive_object("f.jsonl", ["one", "two"], systems, groups)
    assert json.loads(json.dumps(content)) == content
    assert content["all"]["systems"][1]["difference"]["only_first"] == 4
    assert [row["value"] for row in content["labels"]["distance"]] == [1, 2, 16]
    assert content["all"]["systems"][0]["difference"] is None


def test_groups_of_one_segment() -> None:
    (group,) = compare_contrastive([system([True]), system([True])])
    assert isinstance(group, Group)
    assert group.paired[0].p == group.paired[0].p_holm == 1
    assert group.accuracies[0].high == 100


def test_a_label_on_which_the_terminal_would_act_is_escaped() -> None:
    group = Group("kind", "a\rb\x1b[31m\0", 1, 50.0, [scoring.Accuracy(1, 100.0, 20.0, 100.0)], [])
    assert "a\\rb\\x1b[31m\\x00  " in contrastive_text("file", ["run"], [group])
