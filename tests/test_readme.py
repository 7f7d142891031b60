"""What the README and the pages that it links to tell people to type exists, and their Python runs."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer

from mtkit.cli.app import app
from tests.decoding.trained import make_run

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "data/README.md",
    ROOT / "recipes/README.md",
    ROOT / "studies/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
SCREENS = 120
"""Lines of a page in docs/, at most: three screens."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[page], flags=re.DOTALL)


def typed(page: str) -> list[str]:
    """The lines that begin with mtkit, those behind `&&` and behind torchrun's `-m` too."""
    joined = (block.replace("\\\n", " ") for block in blocks(page, "bash"))
    lines = (line.strip() for block in joined for line in re.split(r"\n|&&|(?<=-m )(?=mtkit )", block))
    return [line for line in lines if line.startswith("mtkit ")]


def test_the_readme_shows_every_command() -> None:
    shown = {line.split()[1] for line in typed("README.md")}
    named = set(re.findall(r"`mtkit (\w+)`", TEXTS["README.md"]))
    assert {"prepare", "train", "translate", "score", "compare"} <= shown
    assert shown | named == set(typer.main.get_command(app).commands)


@pytest.mark.parametrize("line", [line for page in TEXTS for line in typed(page)])
def test_every_command_shown_parses(line: str) -> None:
    words = shlex.split(re.sub(r" (<|>|\||<<<) .*", "", line), comments=True)
    command, name, given = typer.main.get_command(app), "mtkit", words[1:]
    while given and given[0] in getattr(command, "commands", {}):
        name = given.pop(0)
        command = command.commands[name]
    if given or not hasattr(command, "commands"):
        command.make_context(name, given)  # raises an error for an unknown option or a value of another type


@pytest.mark.parametrize("page", TEXTS)
def test_every_module_shown_exists(page: str) -> None:
    names = set(re.findall(r"python -m ((?:mtkit|tests)[\w.]*)", TEXTS[page]))
    assert {name for name in names if not find_spec(name)} == set()


@pytest.mark.parametrize("block", [block for page in TEXTS for block in blocks(page, "python")])
def test_the_python_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, name="mine")
    monkeypatch.chdir(tmp_path)
    names = {"tokens": torch.randn(2, 9, 256), "valid": torch.ones(2, 9, dtype=torch.bool)}
    exec(block, names)
    if "output" in names:
        assert names["output"].shape == (2, 9, 256)
    else:  # a line for each translation; the page on mechanisms defines one and prints nothing
        assert capsys.readouterr().out.count("\n") == (2 if "print(" in block else 0)


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXTS[page])
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("page", [page for page in TEXTS if page.startswith("docs/")])
def test_pages_are_short_and_linked_from_the_readme(page: str) -> None:
    assert TEXTS[page].count("\n") <= SCREENS
    assert f"]({page})" in TEXTS["README.md"]
