from pathlib import Path

from mtkit.experiments.pages.choose import choose_page
from mtkit.experiments.pages.findings import load
from mtkit.experiments.pages.questions import CLOSER_QUESTIONS, answer
from tests.experiments.pages.results import pack, rows_of, unpack, write_results, write_rows


def page() -> str:
    return choose_page(answer(), answer(CLOSER_QUESTIONS))


def test_the_page_names_the_best_and_the_worst(results: Path) -> None:
    text = page()
    assert "which compare 78 mechanisms with `full`" in text
    assert "1000 updates of Muon with 512 tokens per batch" in text.replace("1,000", "1000")
    (line,) = (line for line in text.splitlines() if "(`select`: the task selective-copy)" in line)
    _, _, best, cheap, full, seeds, differ, _ = (cell.strip() for cell in line.split("|"))
    assert best.startswith("`band` ED 97.0 +, `full` EDC 90.0, ")
    assert cheap.startswith("`band` ED 97.0 +, ")
    assert "`full`" not in cheap
    assert "1 of the 78 others are significantly better" in text
    assert "worse than `full` on `select` are `additive` 40.0, `topk` 50.0 ([why]" in text
    # a step of 1 around 90 is 1 / 60 of a radian, so the interval ends 1.99 / 2 / 60 radian, or 1.0 points, from 90
    assert (full, seeds, differ) == ("90.0 (89.0 to 91.0)", "2", "3 of 78")
    assert "(`sort`: the task sort), 0 trainings of 79 entries (`mtkit compare --study probes`; a seed" in text
    assert "a seed of all takes about 118 minutes" in text  # 79 times 1.5


def test_the_fastest_are_mechanisms_that_are_not_worse(results: Path) -> None:
    (line,) = (line for line in page().splitlines() if line.startswith("| a layer that is fast at 16,384 tokens"))
    assert line.split("|")[3].strip() == "`band` ED 12, `full` EDC 1"  # topk is faster, and has a -


def test_every_mechanism_has_a_row_with_scores_and_costs(results: Path) -> None:
    rows = [line for line in page().split("## Every mechanism")[1].splitlines() if line.startswith("| `")]
    assert len(rows) == 79
    cells = [cell.strip() for cell in rows[0].split("|")[1:-1]]
    assert cells[:3] == ["`band`", "sparse", "ED"]
    assert cells[4:9] == ["97.0 +", "97.0 +", "0.20", "3.1", "12"]
    (topk,) = (row for row in rows if row.startswith("| `topk`"))
    assert [cell.strip() for cell in topk.split("|")][7:10] == ["0.05", "10", "20"]


def test_after_more_updates_some_are_only_slow(results: Path) -> None:
    assert "reach 90" not in page()
    write_results(results, longer=True)
    text = page()
    assert "Of the 2 lowest, 1 reach 90 after 3,000 updates instead of 1,000" in text
    assert "`additive` 89.0 do not." in text


def test_a_task_with_one_seed_has_no_marks(results: Path) -> None:
    names = [each.entry for each in answer()[0].measured.values()]
    copied = unpack(results / "probes.jsonl.gz")
    write_rows(results / "probes.jsonl.gz", rows_of({name: [80.0] for name in names}, "sort"))
    pack(results / "probes.jsonl.gz", copied + unpack(results / "probes.jsonl.gz"))
    text = page()
    assert "- `sort`: no test with one seed; differences of a few points may be chance." in text
    (line,) = (line for line in text.splitlines() if "(`sort`: the task sort)" in line)
    assert [cell.strip() for cell in line.split("|")][4:7] == ["80.0", "1", "no test"]
    assert line.split("|")[2].strip().startswith("`full` EDC 80.0, ")


def test_the_leads_on_captions_after_longer_training(results: Path) -> None:
    first = {each.name: 50.0 + (each.name == "star") for each in load("sentences")[0].entries}
    write_captions(results / "sentences.jsonl.gz", first)
    assert "Does the lead" not in page()
    longer = {each.name: 60.0 + 3 * (each.name == "nystrom") for each in load("sentences-longer")[0].entries}
    write_captions(results / "sentences-longer.jsonl.gz", longer)
    line = about_the_lead()
    assert "`full` has 60.0 chrF." in line
    assert "`nystrom` +3.0 (+0.0)" in line
    assert "`star` +0.0 (+1.0)" in line
    assert line.endswith("(1 seed).")
    write_captions(results / "sentences-parts.jsonl.gz", {"full": 50.0, "nystrom[conv_kernel=0]": 48.0})
    assert "has 48.0 chrF, with the convolution 50.0; `full` has 50.0 (1 seed)." in about_the_lead()


def about_the_lead() -> str:
    (line,) = (line for line in page().splitlines() if "Does the lead on `captions` last?" in line)
    return line


def write_captions(path: Path, scores: dict[str, float]) -> None:
    rows = rows_of({name: [score] for name, score in scores.items()}, None)
    for each in rows:
        each["scores"] = {"test": {"chrF": each["scores"]["test"]["token"]}}
    write_rows(path, rows)
