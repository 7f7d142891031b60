from pathlib import Path

from mtkit.experiments.pages.questions import LONGER, answer
from mtkit.experiments.pages.slow import slow_page
from tests.experiments.pages.results import write_results


def rows() -> list[list[str]]:
    text = slow_page(answer()[0], answer([LONGER])[0])
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]


def test_slow_mechanisms_have_their_score_after_more_updates(results: Path) -> None:
    assert [row[:3] for row in rows()] == [
        ["`additive`", "C", "40.0 -"],
        ["`topk`", "EDC", "50.0 -"],
        ["`full`", "EDC", "90.0"],
    ]
    write_results(results, longer=True)
    assert [row[:4] for row in rows()] == [
        ["`additive`", "C", "40.0 -", "89.0 ≡"],
        ["`topk`", "EDC", "50.0 -", "96.0"],
        ["`full`", "EDC", "90.0", "89.0"],
    ]
    assert [bool(row[-1]) for row in rows()] == [True, True, False]
    assert "The scores after 3,000 updates have 1 seed." in slow_page(answer()[0], answer([LONGER])[0])
