"""A Marian configuration as a recipe."""

from typing import Any

import pytest

from mtkit.interchange.marian import model_settings

CONFIGURATION: dict[str, Any] = {
    "model_type": "marian",
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "activation_function": "swish",
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("shared", "tied", "tie"),
    [(True, True, "all"), (False, True, "decoder"), (True, False, "none"), (False, False, "none"), (None, None, "all")],
)
def test_embeddings_are_tied_as_the_configuration_says(shared: bool | None, tied: bool | None, tie: str) -> None:
    said = {"share_encoder_decoder_embeddings": shared, "tie_word_embeddings": tied}
    found = model_settings({**CONFIGURATION, **{name: value for name, value in said.items() if value is not None}})  # type: ignore[typeddict-item]
    assert found["tie"] == tie
