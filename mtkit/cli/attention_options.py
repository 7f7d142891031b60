"""`--attention-option KEY=VALUE`, as several commands take it."""

from typing import Any

from mtkit.errors import MtkitError


def parse_options(texts: list[str]) -> dict[str, Any]:
    """{"window_radius": 64} from ["window_radius=64"]; values are YAML scalars and lists. Raises: MtkitError."""
    import yaml

    from mtkit.yaml_text import load_yaml

    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise MtkitError(f"--attention-option {text}: write KEY=VALUE, as in window_radius=64")
        if key in options:
            raise MtkitError(f"--attention-option {text}: {key} is given twice; keep one of them")
        try:
            options[key] = load_yaml(value)
        except yaml.YAMLError as error:
            raise MtkitError(f"--attention-option {text}: {value!r} is no YAML value, as 64, true or [1, 2]") from error
    return options
