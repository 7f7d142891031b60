"""Values of options that several commands take: KEY=VALUE, names and numbers with commas between them."""

from typing import Any

from mtkit.errors import MtkitError, cut, shown

MOST = 10**9
"""Of anything that a benchmark is asked for."""


def parse_options(texts: list[str]) -> dict[str, Any]:
    """{"window_radius": 64} from ["window_radius=64"]; values are YAML scalars and lists. Raises: MtkitError."""
    import yaml

    from mtkit.storage.yaml_text import load_yaml

    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise MtkitError(f"--attention-option {cut(text)}: write KEY=VALUE, as in window_radius=64")
        if key in options:
            raise MtkitError(f"--attention-option {cut(text)}: {cut(key)} is given twice; keep one of them")
        try:
            options[key] = load_yaml(value)
        except yaml.YAMLError as error:
            raise MtkitError(
                f"--attention-option {cut(text)}: {shown(value)} is not a YAML value such as 64, true or [1, 2]"
            ) from error
    return options


def parse_names(option: str, text: str | None) -> list[str]:
    """["full", "band"] from "full, band", the value of `option`; none if it is not given. Raises: MtkitError."""
    names = [each.strip() for each in (text or "").split(",") if each.strip()]
    if not names and text is not None:
        raise MtkitError(f"{option} is empty; give a value, or several with commas between them, or leave it out")
    return names


def parse_numbers(option: str, text: str | None, most: int = MOST) -> list[int]:
    """[1, 5] from "1,5", the value of `option`; each from 1 to `most`. Raises: MtkitError."""
    numbers = []
    for each in parse_names(option, text):
        if not (each.isascii() and each.isdigit() and len(each) <= len(str(most)) and 1 <= int(each) <= most):
            raise MtkitError(
                f"{option} {cut(str(text))}: write whole numbers from 1 to {most:,} with commas between them, as in 1,5"
            )
        numbers.append(int(each))
    return numbers
