"""The table and the pages of mechanisms show all there is."""

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mtkit.attention import catalogue, mechanisms
from mtkit.attention.catalogue import describe, table, year_table, years
from mtkit.attention.contract import Attention, Site
from mtkit.attention.registry import Mechanism, _only_mechanism_in
from mtkit.errors import MtkitError


def test_the_table_has_a_row_for_each_mechanism() -> None:
    rows, _, note = table().rpartition("\n\n")
    first_words = [line.split()[0] for line in rows.split("\n")[1:]]
    assert sorted(first_words) == sorted(mechanisms())
    assert note.startswith("good at: ")


def test_scores_are_shown_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"band": {"good_at": "sorting", "row": "sort 91.0 + (full 88.0)"}, "linear": {"good_at": "", "row": "x 1"}}
    monkeypatch.setattr(catalogue, "measured", lambda: known)
    (line,) = (line for line in table().split("\n") if line.startswith("band "))
    assert "sorting" in line
    assert "  good at  sorting\n  measured sort 91.0 + (full 88.0) (+ better than full" in describe("band")
    assert "good at  " not in describe("linear")
    assert "measured x 1" in describe("linear")
    assert "measured " not in describe("full").split("options (")[0]


def test_the_committed_scores_are_of_all_mechanisms() -> None:
    assert set(catalogue.measured()) == set(mechanisms())


def test_the_list_by_year_has_every_mechanism_in_order_of_its_paper() -> None:
    rows = [line.split()[:2] for line in year_table().split("\n")[1:]]
    assert sorted(name for _, name in rows) == sorted(mechanisms())
    assert [year for year, _ in rows] == sorted(year for year, _ in rows)
    found = {name: int(year) for year, name in rows}
    expected = {"full": 2017, "longformer": 2020, "rfa": 2021, "latent": 2024, "nadaraya-watson": 1964}
    assert {name: found[name] for name in expected} == expected


def test_the_list_of_some_years() -> None:
    rows = [line.split()[:2] for line in year_table(2023, 2024).split("\n")[1:]]
    assert {year for year, _ in rows} == {"2023", "2024"}
    assert ["2024", "latent"] in rows
    assert years("2021") == (2021, 2021)
    assert years("2021-2026") == (2021, 2026)
    with pytest.raises(MtkitError, match="no mechanism of 1800-1801"):
        year_table(1800, 1801)


@pytest.mark.parametrize("text", ["full", "2021-", "2026-2021", "20211", ""])
def test_what_is_no_year_is_refused(text: str) -> None:
    with pytest.raises(MtkitError, match="is no year; write 2021 or 2021-2026"):
        years(text)


def test_a_paper_without_a_year_is_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    full = mechanisms()["full"]
    known = {"mine": replace(full, name="mine", paper="Someone, arXiv 2004.05150"), "full": full}
    monkeypatch.setattr("mtkit.attention.catalogue.mechanisms", lambda: known)
    assert [line.split()[0] for line in year_table().split("\n")[1:]] == ["2017", "mine"]
    assert "mine" not in year_table(2000, 2030)


def test_the_page_of_families_lists_every_mechanism_in_its_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    listed = {
        section.partition("\n")[0]: re.findall(r"`([a-z0-9-]+)` (\d{4})", section)
        for section in page.split("\n## ")[1:]
    }
    for family in {mechanism.family for mechanism in mechanisms().values()}:
        expected = {(name, str(its.year)) for name, its in mechanisms().items() if its.family == family}
        assert set(listed[family]) == expected, f"docs/families.md: the table of {family} does not fit the registry"


@pytest.mark.parametrize("name", sorted(mechanisms()))
def test_a_page_names_roles_cost_and_every_option(name: str) -> None:
    mechanism, page = mechanisms()[name], describe(name)
    for word in [mechanism.paper, mechanism.complexity, *mechanism.roles, *mechanism.options]:
        assert word in page


def test_a_page_says_what_options_mean() -> None:
    assert "window_radius: number of tokens seen on each side" in describe("band")


def test_a_page_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "stdout_width", lambda: 80)
    for name in mechanisms():
        assert max(map(len, describe(name).split("\n"))) <= 80, name


def test_a_page_does_not_divide_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "stdout_width", lambda: 80)
    assert (
        "    softmax between landmarks, the heads are\n"
        "      F Z B V + DConv(V),  Z_0 = M^T / (|M|_1 |M|_inf),\n"
        "      Z <- 1/4 Z (13 I - M Z (15 I - M Z (7 I - M Z))),\n"
        "    which iterates Z"
    ) in describe("nystrom")
    assert "\n  K: the norm" not in describe("gated-delta")  # K ends a sentence, and begins a line of the docstring


@pytest.mark.parametrize(
    ("name", "option", "default"),
    [
        ("strided", "stride", "the square root of model.max_length, rounded"),
        ("longformer", "global_tokens", "1 in the encoder, 0 in the decoder"),
        ("routing", "local_heads", "half of the heads in the self roles, none in the cross role"),
        ("global", "global_tokens", "1 in the self roles, 8 in the cross role"),
        ("performer", "features", "K ln K"),
        ("image-2d", "image_flange", "[8, 16]"),
        ("luna", "tie_kv", "true"),
    ],
)
def test_a_page_says_what_each_option_is_by_default(name: str, option: str, default: str) -> None:
    lines = describe(name).partition("\noptions")[2].split("\n")
    line = next(line for line in lines if line.startswith(f"  {option} "))
    assert line.split(None, 1)[1].startswith(f"{default}  ")


@pytest.mark.parametrize("mechanism", mechanisms().values(), ids=list(mechanisms()))
def test_a_default_of_null_is_explained(mechanism: Mechanism) -> None:
    lines = describe(mechanism.name).partition("\noptions")[2].split("\n")
    for option in mechanism.options:
        line = next(line for line in lines if line.startswith(f"  {option} "))
        assert line.split()[1] != "null", line


def test_a_class_that_declares_too_little_is_told_what_is_missing() -> None:
    module = ModuleType("mine")
    module.Mine = type("Mine", (Attention,), {"__module__": "mine", "paper": "", "growth": 1})  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"Mine in mine does not declare: roles, published, complexity"):
        _only_mechanism_in(module)


def test_a_mechanism_without_a_method_says_which_and_who_needs_it() -> None:
    class Mine(Attention):
        pass

    mine, x = Mine(Site("decoder", 8, 2)), torch.zeros(1, 2, 8)
    with pytest.raises(NotImplementedError, match=r"^Mine has no attend, which all roles need$"):
        mine(x)
    with pytest.raises(NotImplementedError, match=r"^Mine has no begin, which the decoder and cross roles need$"):
        mine.start(1)
    with pytest.raises(NotImplementedError, match=r"^Mine has no advance, which the decoder and cross roles need$"):
        mine.step(x, {})


def test_the_meaning_of_each_option_begins_a_line() -> None:
    lines = describe("longformer").split("\n")
    for option in mechanisms()["longformer"].options:
        assert any(line.startswith(f"  {option}: ") for line in lines)
    for item in ("Paper", "Departures", "Cost"):
        assert any(line.startswith(f"  {item}: ") for line in lines)
