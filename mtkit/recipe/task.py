"""The recipe's settings of built-in tasks."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from mtkit.recipe.settings import PositiveInt, Seed, Settings
from mtkit.storage.records import as_python

Length = Annotated[int, Field(gt=0, le=100_000)]
Multiple = Annotated[int, Field(gt=1, le=1_000)]


class TaskSettings(Settings):
    """A built-in task, whose segments are drawn from a seed: `mtkit tasks` lists the tasks and their options.

    Tasks of documents count documents instead of segments, and have other defaults: 100 for valid, 200 for test, and no
    longer sides.
    """

    name: str
    """Name of the task."""
    seed: Seed = 1
    """Random seed."""
    train: PositiveInt = 20_000
    """Training segments."""
    valid: PositiveInt = 500
    """Validation segments."""
    test: PositiveInt = 500
    """Segments of each test side. The training side contains no source of the validation and test sides."""
    shortest: Length | None = None
    """Minimum length in training, validation and the side `test`, in the task's unit. Default: the task's."""
    longest: Length | None = None
    """Maximum length in training, validation and the side `test`. Default: the task's."""
    longer: tuple[Multiple, ...] = (2, 4)
    """Test sides of longer segments, as multiples of `longest` in rising order: test-2x has lengths from longest + 1 to
    2 x longest, test-4x from 2 x longest + 1 to 4 x longest."""
    options: Annotated[dict[str, Any], BeforeValidator(as_python)] = Field(default_factory=dict)
    """The task's own options, e.g. `vocabulary: 50`."""

    @model_validator(mode="after")
    def _multiples_rise(self) -> Self:
        if list(self.longer) != sorted(set(self.longer)):
            raise ValueError(f"data.task.longer = {list(self.longer)}: give different numbers in rising order")
        return self


def named(task: Any) -> Any:
    """Return the settings of a task that is given by its name only."""
    return {"name": task} if isinstance(task, str) else task


Task = Annotated[TaskSettings, BeforeValidator(named, json_schema_input_type=TaskSettings | str)]


def with_task(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested settings of a recipe with its task, if there is one, in the form of a mapping.

    Options of the command line can then be merged with it.
    """
    data = settings.get("data")
    if not isinstance(data, Mapping) or not isinstance(data.get("task"), str):
        return dict(settings)
    return {**settings, "data": {**data, "task": named(data["task"])}}
