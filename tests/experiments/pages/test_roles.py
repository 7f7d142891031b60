from pathlib import Path

from mtkit.attention.registry import mechanisms
from mtkit.experiments.entries import parse_entries
from mtkit.experiments.pages.findings import load, mechanism_and_role
from mtkit.experiments.pages.questions import CLOSER_QUESTIONS, ROLE_QUESTIONS, answer, scores_object
from mtkit.experiments.pages.roles import roles_page
from mtkit.experiments.pages.write import files
from tests.experiments.pages.results import pack, unpack, write_roles


def test_the_study_has_every_mechanism_in_each_of_its_roles() -> None:
    pairs = [mechanism_and_role(entry) for entry in parse_entries(load("roles")[0].settings.entries)]
    assert pairs[0] == ("full", None)
    wanted = {(name, role) for name, each in mechanisms().items() for role in each.roles if name != "full"}
    assert set(pairs[1:]) == wanted
    assert len(pairs) == len(wanted) + 1


def test_each_role_is_compared_with_full_in_all_roles(results: Path) -> None:
    write_roles(results)
    page = roles_page(answer(ROLE_QUESTIONS))
    lines = page.splitlines()
    assert " updates, 2 seeds ([roles.yaml]" in page
    assert "`full` in all roles has 90.0 and 90.0." in page
    (topk,) = [line for line in lines if line.startswith("| `topk`")]
    assert [cell.strip() for cell in topk.split("|")[3:-1]] == ["90.0 ≡"] * 4 + ["50.0 -"] * 2
    (nystrom,) = [line for line in lines if line.startswith("| `nystrom`")]
    assert [cell.strip() for cell in nystrom.split("|")[3:-1]] == ["90.0 ≡"] * 2 + ["-"] * 4
    (additive,) = [line for line in lines if line.startswith("| `additive`")]
    assert additive.count("(90.0 ≡)") == 4  # the paper has it only as attention to the source
    (cross,) = [line for line in lines if line.startswith("| cross")]
    assert [cell.strip() for cell in cross.split("|")[2:6]] == ["43", "0", "42", "1"]


def test_the_page_needs_all_roles_and_two_seeds(results: Path) -> None:
    written = files(answer(), answer(CLOSER_QUESTIONS), answer(ROLE_QUESTIONS))
    assert results / "roles.md" not in written
    assert "attention to the source last" not in written[results / "choose.md"]
    write_roles(results)
    written = files(answer(), answer(CLOSER_QUESTIONS), answer(ROLE_QUESTIONS))
    assert results / "roles.md" in written
    choose = written[results / "choose.md"]
    worse = "0 of 71 mechanisms are worse than `full` in the decoder, 0 of 74 in the encoder, and 1 of 43 in the "
    assert worse in choose
    assert "the best on `select 2x`, in the decoder only, are `band` 97.0 +, " in choose
    assert "; `full` has 90.0. " in choose
    text = unpack(results / "roles.jsonl.gz")
    pack(
        results / "roles.jsonl.gz", "".join(line for line in text.splitlines(keepends=True) if '@cross.2"' not in line)
    )
    assert results / "roles.md" not in files(answer(), answer(CLOSER_QUESTIONS), answer(ROLE_QUESTIONS))


def test_a_mechanism_shows_its_score_in_each_role(results: Path) -> None:
    write_roles(results)
    shown = [question for question in answer() if question.complete]
    assert "select in one role: encoder 90.0 ≡, decoder 90.0 ≡, cross 50.0 -;" in (
        scores_object(shown, answer(ROLE_QUESTIONS))["topk"]["row"] + ";"
    )
