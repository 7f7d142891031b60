"""Base class of the recipe's settings groups, and the bounds of their numbers."""

from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

RUNS = Path("mtkit-runs")
"""Default folder of runs."""


def run_folder_of(named: Path) -> Path:
    """Return the folder of a run from its folder or from its name in `RUNS`.

    A plain name is a folder only if this folder contains a run.json.
    """
    return RUNS / named if named.name == str(named) and not (named / "run.json").is_file() else named


MOST = 2**31 - 1
"""Maximum of a number: larger values are typing errors and would overflow in computations."""

LEAST = 1e-37
"""Minimum of a positive number: float32, and processors that flush denormals, round smaller values to 0."""

PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
PositiveFloat = Annotated[float, Field(ge=LEAST, le=MOST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MOST)]

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""Random seed that every generator accepts."""


class Settings(BaseModel):
    """A frozen group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans as numbers: pydantic would convert `ema: false` to 0."""
        if isinstance(value, bool) and not _takes_bool(cls.model_fields[str(info.field_name)].annotation):
            raise PydanticCustomError("boolean", "should not be true or false")
        return value


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_takes_bool, get_args(annotation)))
