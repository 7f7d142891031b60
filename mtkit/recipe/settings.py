"""What all groups of settings in a recipe are."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen group of settings; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
