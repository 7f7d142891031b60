"""Values of numpy as Python's own, without numpy."""

from collections.abc import Mapping
from typing import Any


def as_python(value: Any) -> Any:
    """The value, and all within its lists and mappings: numbers and arrays of numpy become numbers and lists.

    JSON knows no others, and `isinstance(value, int)` does not either.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: as_python(each) for key, each in value.items()}
    return type(value)(map(as_python, value)) if type(value) in (list, tuple) else value
