"""What all groups of settings in a recipe are, and the bounds of their numbers."""

from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

RUNS = Path("mtkit-runs")
"""Default folder of runs."""


def run_folder_of(named: Path) -> Path:
    """The folder of a run that is given by its folder, or by its name under `RUNS`.

    A plain name is that of a folder only if the folder is a run, which has a run.json.
    """
    return RUNS / named if named.name == str(named) and not (named / "run.json").is_file() else named


MOST = 2**31 - 1
"""Of what can be counted: more is a slip of the keyboard, and overflows in what computes with it."""

LEAST = 1e-37
"""Of what must not be 0: float32, and processors that flush denormal numbers, take less for 0."""

PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
PositiveFloat = Annotated[float, Field(ge=LEAST, le=MOST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MOST)]

Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""What every generator takes."""


class Settings(BaseModel):
    """A frozen group of settings; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes false for 0: `ema: false` would be an average that forgets everything."""
        if isinstance(value, bool) and not _takes_bool(cls.model_fields[str(info.field_name)].annotation):
            raise PydanticCustomError("boolean", "should not be true or false")
        return value


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_takes_bool, get_args(annotation)))
