"""Hugging Face's Marian models: their configuration and search settings as mtkit's."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from mtkit.errors import RunError
from mtkit.recipe.settings import MOST_HYPOTHESES
from mtkit.storage.files import check_regular
from mtkit.storage.records import Count, read_stored, stored

ACTIVATIONS = {"swish": "swish", "silu": "swish", "relu": "relu", "gelu": "gelu"}
"""{Hugging Face's name: mtkit's name}."""

FIXED: dict[str, tuple[Any, Any]] = {
    "scale_embedding": (True, False),
    "static_position_embeddings": (True, True),
    "normalize_embedding": (False, False),
    "forced_bos_token_id": (None, None),
    "encoder_layerdrop": (0, 0),
    "decoder_layerdrop": (0, 0),
}
"""{setting of config.json: (the only value that mtkit supports, Hugging Face's default)}."""

SEARCH: dict[str, Any] = {
    "num_beam_groups": 1,
    "repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "do_sample": False,
    "diversity_penalty": 0.0,
}
"""{setting of Hugging Face's search that mtkit lacks: the value that disables it}."""


@stored
class Configuration(TypedDict):
    """The keys of config.json that mtkit reads."""

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
    """The keys of generation_config.json, or of config.json in its place, that mtkit reads."""

    num_beams: NotRequired[Count | None]
    length_penalty: NotRequired[float | None]
    max_length: NotRequired[Count | None]
    max_new_tokens: NotRequired[Count | None]
    no_repeat_ngram_size: NotRequired[Count | None]
    bad_words_ids: NotRequired[list[list[int]] | None]
    suppress_tokens: NotRequired[list[int] | None]
    renormalize_logits: NotRequired[bool | None]
    early_stopping: NotRequired[bool | str | None]


def read_configuration(folder: Path) -> Configuration:
    """Read config.json. Raises: RunError if it is missing or damaged, or has a value that mtkit does not support."""
    path = folder / "config.json"
    if path.exists():
        check_regular(folder)
    config = read_stored(path, Configuration, "give the folder of a Marian model", error=RunError)
    if config["model_type"] not in ("marian", "pegasus"):
        raise RunError(f"{path}: model_type = {config['model_type']}: mtkit imports marian and pegasus")
    if (activation := config["activation_function"]) not in ACTIVATIONS:
        raise RunError(f"{path}: activation_function = {activation}: mtkit's model supports {', '.join(ACTIVATIONS)}")
    for key, (needed, default) in FIXED.items():
        value = config.get(key, default)
        if value != needed:
            raise RunError(f"{path}: {key} = {value}: mtkit's model supports only {needed}")
    sides = config["encoder_attention_heads"], config["decoder_attention_heads"]
    widths = config["encoder_ffn_dim"], config["decoder_ffn_dim"]
    for key, (encoder, decoder) in (("attention_heads", sides), ("ffn_dim", widths)):
        if encoder != decoder:
            raise RunError(
                f"{path}: encoder_{key} = {encoder} and decoder_{key} = {decoder}: mtkit's model has one number"
            )
    return config


def read_generation(folder: Path) -> Generation:
    """Read generation_config.json, or config.json if it is missing. Raises: RunError if the file is damaged."""
    path = folder / "generation_config.json"
    path = path if path.exists() else folder / "config.json"
    return read_stored(path, Generation, "mend it or remove it", error=RunError)


def model_settings(config: Configuration) -> dict[str, Any]:
    """Return the recipe's `model` section, without `positions` (`positions_of`)."""
    pre = config["model_type"] == "pegasus" or config.get("normalize_before", False)
    shared, tied = config.get("share_encoder_decoder_embeddings", True), config.get("tie_word_embeddings", True)
    return {
        "d_model": config["d_model"],
        "heads": config["encoder_attention_heads"],
        "feed_forward": config["encoder_ffn_dim"],
        "encoder_layers": config["encoder_layers"],
        "decoder_layers": config["decoder_layers"],
        "norm": "pre" if pre else "post",
        "activation": ACTIVATIONS[config["activation_function"]],
        "tie": ("all" if shared else "decoder") if tied else "none",
        "output_bias": True,
        "dropout": config.get("dropout", 0.1),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "activation_dropout": config.get("activation_dropout", 0.0),
        "max_length": config["max_position_embeddings"],
    }


def decoding_settings(generation: Generation, longest: int) -> dict[str, Any]:
    """Return the recipe's `decoding` section, with Hugging Face's maximum length, by default `longest`."""
    beam, penalty = generation.get("num_beams") or 1, generation.get("length_penalty")
    most = generation.get("max_new_tokens") or (generation.get("max_length") or longest) - 1  # less the start mark
    return {
        "method": "beam" if beam > 1 else "greedy",
        **({"beam": min(beam, MOST_HYPOTHESES)} if beam > 1 else {}),
        "length_penalty": 1.0 if penalty is None else penalty,
        "no_repeat_ngram": generation.get("no_repeat_ngram_size") or 0,
        "max_pieces": max(most, 1),
    }


def excluded_rows(generation: Generation) -> set[int]:
    """Return the rows of pieces that Hugging Face's search excludes before it normalises the probabilities again."""
    if not generation.get("renormalize_logits"):
        return set()
    words = {word[0] for word in generation.get("bad_words_ids") or [] if len(word) == 1}
    return words.union(generation.get("suppress_tokens") or [])


def unsupported_search(generation: Mapping[str, Any], never: Set[int | None]) -> list[str]:
    """List the settings of Hugging Face's search that mtkit ignores, as "key = value".

    mtkit's search never predicts the rows `never`.
    """
    others = [f"{key} = {generation[key]}" for key, off in SEARCH.items() if generation.get(key) not in (None, off)]
    pieces = [piece for piece in generation.get("suppress_tokens") or [] if piece not in never]
    others += [f"suppress_tokens = {pieces}"] if pieces else []
    words = [word for word in generation.get("bad_words_ids") or [] if len(word) != 1 or word[0] not in never]
    others += [f"bad_words_ids = {words}"] if words else []
    if generation.get("renormalize_logits") and generation.get("no_repeat_ngram_size"):
        others.append("renormalize_logits = True with no_repeat_ngram_size")
    early = generation.get("early_stopping") or False
    if (generation.get("num_beams") or 1) > 1 and early is not True:
        others.append(f"early_stopping = {early}")
    return others
