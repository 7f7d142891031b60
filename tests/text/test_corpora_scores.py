"""Pairs left out by their scores: the same ones from every kind of corpus, in the reader and in prepared data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from mtkit.data.prepare import prepare
from mtkit.data.report import summary
from mtkit.errors import DataError
from mtkit.recipe.data import Corpus, DataSettings
from mtkit.text.corpora import line_count, measure_corpus, read_corpus
from mtkit.text.text_files import Repairs

SOURCES = ["a", "b", "", "c", "d", "e"]
TARGETS = ["v", "w", "", "x", "y", "z"]
SCORES = [0.5, 0.25, 0.0, -1.0, 1e3, 0.49999]
KEPT = [(1, "a", "v", 1), (3, "", "", 1), (5, "d", "y", 2)]


def lines(path: Path, *texts: object) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), newline="")
    return path


def as_files(folder: Path, scores: list[Any]) -> dict[str, Any]:
    columns = {"source": SOURCES, "target": TARGETS, "scores": scores}
    return {name: lines(folder / name, *column) for name, column in columns.items()}


def as_tsv(folder: Path, scores: list[Any]) -> dict[str, Any]:
    rows = ["\t".join(map(str, row)) for row in zip(scores, SOURCES, TARGETS, strict=True)]
    return {"file": lines(folder / "a.tsv", *rows), "source": 2, "target": 3, "scores": 1}


def as_jsonl(folder: Path, scores: list[Any]) -> dict[str, Any]:
    rows = [{"en": en, "de": de, "meta": {"s": s}} for en, de, s in zip(SOURCES, TARGETS, scores, strict=True)]
    return {
        "file": lines(folder / "a.jsonl", *map(json.dumps, rows)),
        "source": "en",
        "target": "de",
        "scores": "meta.s",
    }


def as_parquet(folder: Path, scores: list[Any]) -> dict[str, Any]:
    pq.write_table(pa.table({"en": SOURCES, "de": TARGETS, "s": scores}), folder / "a.parquet")
    return {"file": folder / "a.parquet", "source": "en", "target": "de", "scores": "s"}


KINDS = [as_files, as_tsv, as_jsonl, as_parquet]


@pytest.mark.parametrize("write", KINDS)
def test_pairs_with_a_lower_score_are_left_out_and_blank_lines_kept(
    tmp_path: Path, write: Callable[..., dict[str, Any]]
) -> None:
    corpus, repairs = Corpus(**write(tmp_path, SCORES), least_score=0.5, documents="empty-lines"), Repairs()
    assert [tuple(pair) for pair in read_corpus(corpus, repairs)] == KEPT
    assert repairs.low_scores == 3
    assert [pair.line for pair in read_corpus(corpus, rows=range(1, 3))] == [3, 5]
    assert line_count(corpus) is None
    facts = measure_corpus(corpus)
    assert (facts.lines, facts.low_scores) == (3, 3)


@pytest.mark.parametrize("write", KINDS[:3])
@pytest.mark.parametrize("score", ["", "good", "nan"])
def test_what_is_no_score_is_named_by_its_line(
    tmp_path: Path, write: Callable[..., dict[str, Any]], score: str
) -> None:
    corpus = Corpus(**write(tmp_path, [*SCORES[:3], score, *SCORES[4:]]), least_score=0.5)
    with pytest.raises(DataError, match=rf"line 4: '{score}' is not a score"):
        list(read_corpus(corpus))


def test_a_number_that_no_float_can_hold_is_no_score(tmp_path: Path) -> None:
    corpus = Corpus(**as_jsonl(tmp_path, [*SCORES[:3], 10**400, *SCORES[4:]]), least_score=0.5)
    with pytest.raises(DataError, match=r"line 4: '1000.*' is not a score"):
        list(read_corpus(corpus))


@pytest.mark.parametrize("write", KINDS[1:])
@pytest.mark.parametrize("name", ["scores", "documents"])
def test_scores_and_documents_of_one_file_are_columns(
    tmp_path: Path, write: Callable[..., dict[str, Any]], name: str
) -> None:
    file = lines(tmp_path / "m.scores", *SCORES)
    corpus = Corpus.model_validate({**write(tmp_path, SCORES), name: file, "least_score": 0.5})
    with pytest.raises(
        DataError, match=r"m\.scores is a file: documents and scores of this corpus are columns too"
    ) as raised:
        list(read_corpus(corpus))
    assert "\n" not in str(raised.value)


def test_as_many_scores_as_lines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"scores has 5 lines and .*source has 6; .*or the score, of line N"):
        list(read_corpus(Corpus(**as_files(tmp_path, SCORES[:5]), least_score=0.5)))


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    text = {"source": "a", "target": "b"}
    for settings in ({"scores": "s"}, {"least_score": 0.5}):
        with pytest.raises(ValidationError, match="scores and least_score of a corpus go together"):
            Corpus(**text, **settings)
    with pytest.raises(ValidationError, match="valid side has scores, which apply to training corpora only"):
        DataSettings(train=text, valid={**text, "scores": "s", "least_score": 0})


def test_prepared_data_is_that_of_the_pairs_that_are_left(tmp_path: Path) -> None:
    pairs = [(f"the {number} dogs see a house", f"die {number} Hunde sehen ein Haus") for number in range(200)]
    scores = [number * 7 % 10 / 10 for number in range(200)]
    kept = [pair for pair, score in zip(pairs, scores, strict=True) if score >= 0.3]
    valid = {"source": lines(tmp_path / "v.en", "a dog"), "target": lines(tmp_path / "v.de", "ein Hund")}

    def prepared(name: str, chosen: list[tuple[str, str]], **about: Any) -> DataSettings:
        source, target = (
            lines(tmp_path / f"{name}.{side}", *column)
            for side, column in zip(("en", "de"), zip(*chosen, strict=True), strict=True)
        )
        return DataSettings(folder=tmp_path / name, train={"source": source, "target": target, **about}, valid=valid)

    scored = prepared("scored", pairs, scores=lines(tmp_path / "scores", *scores), least_score=0.3)
    plain = prepared("plain", kept)
    one, other = prepare(scored), prepare(plain)
    for file in ("tokenizer/joint.model", "tokenizer/source.model"):
        if (plain.folder / file).exists():
            assert (scored.folder / file).read_bytes() == (plain.folder / file).read_bytes()
    assert one.record["sides"]["train"]["segments"] == other.record["sides"]["train"]["segments"] == len(kept)
    assert one.record["fingerprint"] == other.record["fingerprint"]
    assert "60 pairs with a score below least_score left out" in summary(one, 1024)
    assert prepare(scored).unchanged
    changed = scored.model_copy(update={"train": (scored.train[0].model_copy(update={"least_score": 0.4}),)})
    with pytest.raises(DataError, match="train: other content"):
        prepare(changed)
