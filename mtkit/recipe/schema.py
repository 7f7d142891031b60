"""JSON schemas of settings; the string under a field is its description.

pydantic can read these strings when a class is created, but reads its source then, which takes half of the import.
"""

import ast
import inspect
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema


class _Described(GenerateJsonSchema):
    """Schemas with the descriptions of fields."""

    def model_schema(self, schema: Any) -> dict[str, Any]:
        made = super().model_schema(schema)
        for name, text in _descriptions(schema["cls"]).items():
            made["properties"][name]["description"] = text
        return made


def _descriptions(settings: type[BaseModel]) -> dict[str, str]:
    """Return the strings under the fields of a class, by field."""
    (definition,) = ast.parse(inspect.getsource(settings)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(description))):
                found[name] = inspect.cleandoc(description)
    return found


def json_schema(settings: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a settings class, which must be defined at the top level of its module."""
    standard = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return standard | settings.model_json_schema(schema_generator=_Described)
