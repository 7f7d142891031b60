"""Options that several commands share, and functions that parse or apply their values."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from mtkit.cli.progress import note
from mtkit.errors import MtkitError, cut, shown

if TYPE_CHECKING:
    from pydantic import BaseModel

MOST = 10**9
"""Maximum of a benchmark's counts."""

RecipeFile = Annotated[
    Path | None, Option(help="Recipe: a YAML file or a name from `mtkit recipes`. Options override it.")
]
PreparedData = Annotated[Path | None, Option(help="Folder of prepared data.  [default: mtkit-data]")]
Preset = Annotated[
    str | None,
    Option(help="Model size: tiny, small, base or big. Settings in a recipe file override it.  [default: tiny]"),
]
AttentionOptions = Annotated[
    list[str] | None,
    Option(metavar="KEY=VALUE", help="Option of every mechanism with this option, e.g. window_radius=64."),
]
BatchTokens = Annotated[int | None, Option(help="Maximum padded tokens per batch.")]
Accumulate = Annotated[int | None, Option(help="Batches per update.")]
RunName = Annotated[str | None, Option(help="Name of the run in mtkit-runs.  [default: the latest run]")]
RunFolder = Annotated[Path | None, Option(metavar="FOLDER", help="Run folder.")]
EnsembleFolders = Annotated[
    list[Path] | None, Option(metavar="FOLDER", help="Run folder; several form an ensemble.  [default: the latest run]")
]
EnsembleNames = Annotated[
    list[str] | None, Option("--name", metavar="NAME", help="Name of the run in mtkit-runs; several form an ensemble.")
]
Checkpoint = Annotated[str, Option(help="Checkpoint: best, last, average or a name.")]
Direction = Annotated[str | None, Option(metavar="EN-FR", help="Direction; required for runs with several.")]
Translation = Annotated[str | None, Option(metavar="TEXT", help="Its translation.  [default: the run's translation]")]
Arithmetic = Annotated[str, Option(help="Arithmetic: auto (float32), bfloat16, float16, or int8 (CPU only, faster).")]
Device = Annotated[str, Option(help="Device: auto, cpu or cuda.")]
Threads = Annotated[int | None, Option(min=1, max=1024, help="CPU threads.  [default: one per core]")]


SegmentScores = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=FILE",
        help="Scores of another metric, a number per line; repeatable, one per run or file in order.",
    ),
]


def output_path(path: Path | None, default: str) -> Path:
    """Return the output file of a command. Raises: MtkitError as `check_outputs`."""
    from mtkit.storage.files import inside
    from mtkit.storage.outputs import check_outputs

    output = inside(Path(), default) if path is None else path
    check_outputs([output])
    return output


def echo_schema(settings: "type[BaseModel]") -> None:
    """Print the JSON schema of settings."""
    from mtkit.recipe.schema import json_schema
    from mtkit.storage.files import json_text

    typer.echo(json_text(json_schema(settings), indent=2, ensure_ascii=False))


def use_threads(threads: int | None) -> None:
    """Set PyTorch's number of CPU threads if the option --threads is given."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def nonempty(**settings: Any) -> dict[str, Any]:
    """Return the settings that have a value: neither None nor an empty mapping."""
    return {key: value for key, value in settings.items() if value is not None and value != {}}


def parse_options(
    texts: list[str] | None, option: str = "--attention-option", example: str = "window_radius=64"
) -> dict[str, Any]:
    """Parse the values of `option`: ["window_radius=64"] is {"window_radius": 64}. Values are YAML scalars and lists.

    Raises: MtkitError.
    """
    import yaml

    from mtkit.storage.yaml_text import load_yaml

    options: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise MtkitError(f"{option} {cut(text)}: write KEY=VALUE, as in {example}")
        if key in options:
            raise MtkitError(f"{option} {cut(text)}: {cut(key)} is given twice; keep one of them")
        try:
            options[key] = load_yaml(value)
        except yaml.YAMLError as error:
            raise MtkitError(
                f"{option} {cut(text)}: {shown(value)} is not a YAML value such as 64, true or [1, 2]"
            ) from error
    return options


def note_preset(preset: str | None, recipe: Path | None) -> None:
    """Print a note that lists the settings of --preset which the recipe file overrides with other values."""
    from mtkit.recipe.recipe import over_preset

    if preset is not None and recipe is not None and (changed := over_preset(preset, recipe)):
        note(f"the recipe {recipe} overrides settings of --preset {preset}: {', '.join(changed)}")


def parse_names(option: str, text: str | None) -> list[str]:
    """Parse the value of `option`: "full, band" is ["full", "band"], None is []. Raises: MtkitError."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if not names and text is not None:
        raise MtkitError(f"{option} is empty; give a value, or several with commas between them, or leave it out")
    return names


def parse_entries(option: str, text: str | None) -> list[str]:
    """Parse the entries in the value of `option`: "full, band[window_radius=3]" has two. Raises: MtkitError."""
    from mtkit.experiments.entries import split

    entries = split(text or "")
    if not entries and text is not None:
        raise MtkitError(f"{option} is empty; give an entry, or several with commas between them, or leave it out")
    return entries


def parse_numbers(option: str, text: str | None, most: int = MOST) -> list[int]:
    """Parse the value of `option`: "1,5" is [1, 5]; numbers are from 1 to `most`. Raises: MtkitError."""
    names = parse_names(option, text)
    for name in names:
        if not (name.isascii() and name.isdigit() and len(name) <= len(str(most)) and 1 <= int(name) <= most):
            raise MtkitError(
                f"{option} {cut(str(text))}: write whole numbers from 1 to {most:,} with commas between them, as in 1,5"
            )
    return list(map(int, names))
