"""In JSON schemas, the strings under fields are their descriptions."""

from mtkit.recipe import Recipe
from mtkit.recipe.schema import json_schema


def test_fields_of_all_groups_are_described_as_in_the_source() -> None:
    schema = json_schema(Recipe)
    heads = schema["$defs"]["ModelSettings"]["properties"]["heads"]
    assert heads["description"] == "Number of attention heads. It must divide d_model."
    assert schema["properties"]["seed"]["description"]
