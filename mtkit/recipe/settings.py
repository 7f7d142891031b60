"""Base class of the recipe's settings groups, and the bounds of their numbers.

Presets: named model sizes with matching training settings; `mtkit.recipe` documents the settings.
"""

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


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "model": {"d_model": 128, "heads": 4, "feed_forward": 512, "encoder_layers": 2, "decoder_layers": 2},
        "training": {"max_updates": 1_000},
    },
    "small": {
        "model": {"d_model": 256, "heads": 4, "feed_forward": 1024, "encoder_layers": 3, "decoder_layers": 3},
        "training": {
            "batch_tokens": 1_000,
            "cooldown": 0.25,
            "max_updates": 30_000,
            "validate_every": 2_000,
        },
    },
    "base": {
        "model": {
            "d_model": 512,
            "heads": 8,
            "feed_forward": 2048,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "norm": "post",
        },
        "training": {
            "batch_tokens": 25_000,
            "schedule": "noam",
            "peak_rate": 1.0,
            "warmup_updates": 4_000,
            "clip_norm": 0.0,
            "max_updates": 100_000,
            "validate_every": 2_000,
        },
    },
    "big": {
        "model": {
            "d_model": 1024,
            "heads": 16,
            "feed_forward": 4096,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "norm": "post",
            "dropout": 0.3,
        },
        "training": {
            "batch_tokens": 25_000,
            "schedule": "noam",
            "peak_rate": 1.0,
            "warmup_updates": 4_000,
            "clip_norm": 0.0,
            "max_updates": 300_000,
            "validate_every": 2_000,
        },
    },
}
"""Base and big are the models of "Attention Is All You Need" (Vaswani et al., 2017), table 3."""
