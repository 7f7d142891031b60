import json
from pathlib import Path

import pytest

from mtkit.experiments.pages.questions import CLOSER_QUESTIONS, ROLE_QUESTIONS, answer
from mtkit.experiments.pages.write import DOCS, SCORES, files, main
from tests.experiments.pages.results import pack, unpack

ROOT = Path(__file__).parents[3]


def test_the_committed_files_are_what_the_results_make() -> None:
    made = files(answer(), answer(CLOSER_QUESTIONS), answer(ROLE_QUESTIONS))
    pages = [DOCS / name for name in ("choose.md", "roles.md", "slow-learners.md", "claims.md")]
    assert list(made) == [*pages, SCORES]
    for path, text in made.items():
        assert (ROOT / path).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("hole", ['"gau"', '.gau.2"'])
def test_a_study_with_a_hole_makes_no_page(results: Path, hole: str) -> None:
    lines = unpack(results / "probes.jsonl.gz").splitlines(keepends=True)
    pack(results / "probes.jsonl.gz", "".join(line for line in lines if hole not in line))
    main()
    assert not (results / "choose.md").exists()


def test_the_files_are_written(results: Path) -> None:
    pytest.importorskip("matplotlib")
    main()
    assert (results / "choose.png").stat().st_size > 10_000
    assert (results / "choose.md").read_text().startswith("# Which attention?")
    assert (results / "claims.md").exists()
    assert len(json.loads((results / "scores.json").read_text())) == 79
