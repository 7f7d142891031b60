"""The configuration of a Marian model as a recipe; what mtkit's model cannot be is refused by its name."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from mtkit.errors import RunError
from mtkit.recipe.decoding import MOST_HYPOTHESES
from mtkit.storage.files import check_regular
from mtkit.storage.records import Count, read_stored, stored

ACTIVATIONS = {"swish": "swish", "silu": "swish", "relu": "relu", "gelu": "gelu"}
"""mtkit's names of Hugging Face's activations."""

FIXED: dict[str, tuple[Any, Any]] = {
    "scale_embedding": (True, False),
    "static_position_embeddings": (True, True),
    "normalize_embedding": (False, False),
    "forced_bos_token_id": (None, None),
    "encoder_layerdrop": (0, 0),
    "decoder_layerdrop": (0, 0),
}
"""What a setting must be, and what it is where the configuration does not say: Hugging Face's own default."""

SEARCH: dict[str, Any] = {
    "num_beam_groups": 1,
    "repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "do_sample": False,
    "diversity_penalty": 0.0,
}
"""Settings of Hugging Face's search that mtkit's has not, with the value at which they do nothing."""


@stored
class Configuration(TypedDict):
    """config.json, as far as mtkit reads it."""

    model_type: str
    vocab_size: Count
    decoder_vocab_size: NotRequired[Count | None]
    d_model: Count
    encoder_layers: Count
    decoder_layers: Count
    encoder_attention_heads: Count
    decoder_attention_heads: Count
    encoder_ffn_dim: Count
    decoder_ffn_dim: Count
    activation_function: str
    max_position_embeddings: Count
    dropout: NotRequired[float]
    attention_dropout: NotRequired[float]
    activation_dropout: NotRequired[float]
    normalize_before: NotRequired[bool]
    share_encoder_decoder_embeddings: NotRequired[bool]
    tie_word_embeddings: NotRequired[bool]
    pad_token_id: Count
    eos_token_id: Count
    decoder_start_token_id: Count


@stored
class Generation(TypedDict):
    """generation_config.json, as far as mtkit reads it; the settings may stand in config.json too."""

    num_beams: NotRequired[Count | None]
    length_penalty: NotRequired[float | None]
    max_length: NotRequired[Count | None]
    no_repeat_ngram_size: NotRequired[Count | None]
    bad_words_ids: NotRequired[list[list[int]] | None]
    renormalize_logits: NotRequired[bool | None]
    early_stopping: NotRequired[bool | str | None]


def read_configuration(folder: Path) -> Configuration:
    """config.json. Raises: RunError where it is missing or damaged, or has a setting that mtkit's model lacks."""
    path = folder / "config.json"
    if path.exists():
        check_regular(folder)
    found = read_stored(path, Configuration, "give the folder of a Marian model", error=RunError)
    if found["model_type"] not in ("marian", "pegasus"):
        raise RunError(f"{path}: model_type = {found['model_type']}: mtkit imports marian and pegasus")
    if found["activation_function"] not in ACTIVATIONS:
        raise RunError(
            f"{path}: activation_function = {found['activation_function']}: mtkit's model has {', '.join(ACTIVATIONS)}"
        )
    for key, (needed, default) in FIXED.items():
        value = found.get(key, default)
        if value != needed:
            raise RunError(f"{path}: {key} = {value}: mtkit's model has {needed} alone")
    for one, other in (
        ("encoder_attention_heads", "decoder_attention_heads"),
        ("encoder_ffn_dim", "decoder_ffn_dim"),
    ):
        if found.get(one) != found.get(other):
            raise RunError(
                f"{path}: {one} = {found.get(one)} and {other} = {found.get(other)}: mtkit's model has one number"
            )
    return found


def read_generation(folder: Path) -> Generation:
    """generation_config.json, or what config.json says instead. Raises: RunError where it is damaged."""
    path = folder / "generation_config.json"
    path = path if path.exists() else folder / "config.json"
    return read_stored(path, Generation, "mend it or remove it", error=RunError)


def model_settings(found: Configuration) -> dict[str, Any]:
    """The recipe's `model` for a configuration; positions are what the weights say (`positions_of`)."""
    pre = found["model_type"] == "pegasus" or found.get("normalize_before", False)
    shared, tied = found.get("share_encoder_decoder_embeddings", True), found.get("tie_word_embeddings", True)
    return {
        "d_model": found["d_model"],
        "heads": found["encoder_attention_heads"],
        "feed_forward": found["encoder_ffn_dim"],
        "encoder_layers": found["encoder_layers"],
        "decoder_layers": found["decoder_layers"],
        "norm": "pre" if pre else "post",
        "activation": ACTIVATIONS[found["activation_function"]],
        "tie": ("all" if shared else "decoder") if tied else "none",
        "output_bias": True,
        "dropout": found.get("dropout", 0.1),
        "attention_dropout": found.get("attention_dropout", 0.0),
        "activation_dropout": found.get("activation_dropout", 0.0),
        "max_length": found["max_position_embeddings"],
    }


def decoding_settings(found: Generation, longest: int) -> dict[str, Any]:
    """The recipe's `decoding`; a translation has at most the pieces that Hugging Face's search allows."""
    beam, most = found.get("num_beams") or 1, found.get("max_length")
    penalty = found.get("length_penalty")
    return {
        "method": "beam" if beam > 1 else "greedy",
        **({"beam": min(beam, MOST_HYPOTHESES)} if beam > 1 else {}),
        "length_penalty": 1.0 if penalty is None else penalty,
        "no_repeat_ngram": found.get("no_repeat_ngram_size") or 0,
        "max_pieces": max((most or longest) - 1, 1),  # their limit counts the start mark
    }


def without_probability(found: Generation) -> set[int]:
    """Pieces, by their rows, that Hugging Face's search takes out before it normalises what is left."""
    return {word[0] for word in found.get("bad_words_ids") or [] if len(word) == 1 and found.get("renormalize_logits")}


def unheeded(found: Mapping[str, Any], never: Set[int]) -> list[str]:
    """Settings of Hugging Face's search that mtkit's does not follow, as key = value; it gives no piece of `never`."""
    given = ((key, found.get(key), nothing) for key, nothing in SEARCH.items())
    others = [f"{key} = {value}" for key, value, nothing in given if value not in (None, nothing)]
    words = [word for word in found.get("bad_words_ids") or [] if len(word) != 1 or word[0] not in never]
    others += [f"bad_words_ids = {words}"] if words else []
    if found.get("renormalize_logits") and found.get("no_repeat_ngram_size"):
        others.append("renormalize_logits = True with no_repeat_ngram_size")
    early = found.get("early_stopping") or False
    sooner = (found.get("num_beams") or 1) > 1 and early is not True
    return [*others, f"early_stopping = {early}"] if sooner else others
