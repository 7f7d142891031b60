from pathlib import Path

from mtkit.experiments.pages.claims import claims_page
from mtkit.experiments.pages.questions import answer


def test_the_claims_have_computed_verdicts(results: Path) -> None:
    lines = claims_page(answer()).splitlines()
    said = {line.split("`")[1]: line.rpartition(" | ")[2].strip(" |") for line in lines if line.startswith("| `")}
    assert len(said) == 79
    assert said["band"] == "held"
    assert said["topk"] == "worse after this training"
    assert said["linear"] == "not measured"  # its task has no results
