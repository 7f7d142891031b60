"""The description of a built-in task: its generator, options, default lengths and documentation."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtkit.errors import RecipeError, did_you_mean, shown
from mtkit.recipe.task import TaskSettings

Value = int | float
Words = Sequence[str]
Generator = Callable[[random.Random, Mapping[str, Any], int], tuple[Words, Words]]
"""Draws one segment: (generator of random numbers, options, length) -> (source words, target words)."""


@dataclass(frozen=True)
class Option:
    """An option of a task: a number in a range."""

    default: Value
    about: str
    """One line of documentation."""
    least: float
    most: float

    @property
    def values(self) -> str:
        """The accepted values, for people."""
        return f"{self.least:,} to {self.most:,}"

    def check(self, key: str, value: Any) -> Value:
        """Return the value. Raises: RecipeError if it is not accepted."""
        kinds = (int,) if isinstance(self.default, int) else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not self.least <= value <= self.most:
            what = "a whole number" if isinstance(self.default, int) else "a number"
            raise RecipeError(f"{key} = {shown(value)}: give {what} from {self.least:,} to {self.most:,}")
        return type(self.default)(value)


@dataclass(frozen=True)
class BuiltinTask:
    """A task: every source has exactly one correct target."""

    name: str
    summary: str
    """Its question, in one line."""
    generate: Generator
    lengths: tuple[int, int]
    """Default minimum and maximum length in training."""
    unit: str
    """Unit of lengths, as "symbols"."""
    probes: str
    """The ability that it needs, in a few words."""
    options: Mapping[str, Option] = field(default_factory=dict)
    paper: str = ""
    """Its source."""
    check: Callable[[Mapping[str, Any], int], str | None] = lambda options, longest: None
    """Returns what is wrong with options for segments up to a length, or None."""
    minimum: int = 1
    """Minimum length."""
    languages: tuple[str, str] = ("input", "output")
    """Names of the source and target language, which are also the suffixes of text files."""
    tokenizer: Mapping[str, Any] = field(default_factory=lambda: {"kind": "words", "byte_fallback": False})
    """Default settings of the tokenizer."""

    def resolve(self, options: Mapping[str, Any]) -> dict[str, Value]:
        """Return all options, defaults included. Raises: RecipeError for an unknown option or a wrong value."""
        for key in options:
            if key not in self.options:
                common = [name for name in TaskSettings.model_fields if name not in ("name", "options")]
                hint, listed = did_you_mean(key, [*self.options, *common]), ", ".join(self.options) or "none"
                raise RecipeError(
                    f"the task {self.name} has no option {shown(key)}{hint}; its options: {listed}; "
                    f"all tasks have: {', '.join(common)}"
                )
        return {
            key: option.check(f"data.task.options.{key}", options.get(key, option.default))
            for key, option in self.options.items()
        }
