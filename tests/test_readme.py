"""What the README tells people to type exists, and its Python runs."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import typer

from mtkit.cli.app import app

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
TYPED = [
    line
    for language, block in BLOCKS
    if language == "bash"
    for line in re.split(r"\n|&&", block.replace("\\\n", " "))
    if line.split("#")[0].strip().startswith("mtkit ")
]


def test_the_readme_shows_every_command() -> None:
    shown = {line.split()[1] for line in TYPED}
    assert shown == set(typer.main.get_command(app).commands)


@pytest.mark.parametrize("line", TYPED)
def test_every_option_shown_exists(line: str) -> None:
    words = shlex.split(line, comments=True)
    command, given = typer.main.get_command(app), words[1:]
    while given and given[0] in getattr(command, "commands", {}):
        command = command.commands[given.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in given if word.startswith("-") and word != "-"} <= known


@pytest.mark.parametrize("block", [block for language, block in BLOCKS if language == "python"])
def test_the_python_runs(block: str) -> None:
    names = {"tokens": torch.randn(2, 9, 256), "valid": torch.ones(2, 9, dtype=torch.bool)}
    exec(block, names)
    assert names["output"].shape == (2, 9, 256)
