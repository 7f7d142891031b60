"""Hugging Face's Marian models: configuration, vocabulary and weights, mapped to mtkit's.

vocab.json numbers the pieces of one or two sentencepiece models in its own order. In mtkit the special pieces come
first, then the others in that order. A sentencepiece piece that vocab.json lacks, which Marian reads as unknown, gets
an id too, with the weights of the unknown piece.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

import torch
from torch import Tensor
from typing_extensions import TypedDict

from mtkit.errors import DataError, RunError
from mtkit.model.embedding import Sinusoidal
from mtkit.recipe import ModelSettings
from mtkit.recipe.settings import MOST_HYPOTHESES
from mtkit.storage.files import check_regular
from mtkit.storage.records import Count, read_stored, stored
from mtkit.text.model_file import ModelFile, ModelPiece, PieceType
from mtkit.text.tokenizer import BOS, BREAK, EOS, PAD, SPECIALS, UNK

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
    no_repeat_ngram_size: NotRequired[Count | None]
    bad_words_ids: NotRequired[list[list[int]] | None]
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
    return {
        "method": "beam" if beam > 1 else "greedy",
        **({"beam": min(beam, MOST_HYPOTHESES)} if beam > 1 else {}),
        "length_penalty": 1.0 if penalty is None else penalty,
        "no_repeat_ngram": generation.get("no_repeat_ngram_size") or 0,
        "max_pieces": max((generation.get("max_length") or longest) - 1, 1),  # their limit counts the start mark
    }


def excluded_rows(generation: Generation) -> set[int]:
    """Return the rows of pieces that Hugging Face's search excludes before it normalises the probabilities again."""
    if not generation.get("renormalize_logits"):
        return set()
    return {word[0] for word in generation.get("bad_words_ids") or [] if len(word) == 1}


def unsupported_search(generation: Mapping[str, Any], never: Set[int]) -> list[str]:
    """List the settings of Hugging Face's search that mtkit ignores, as "key = value".

    mtkit's search never predicts the rows `never`.
    """
    others = [f"{key} = {generation[key]}" for key, off in SEARCH.items() if generation.get(key) not in (None, off)]
    words = [word for word in generation.get("bad_words_ids") or [] if len(word) != 1 or word[0] not in never]
    others += [f"bad_words_ids = {words}"] if words else []
    if generation.get("renormalize_logits") and generation.get("no_repeat_ngram_size"):
        others.append("renormalize_logits = True with no_repeat_ngram_size")
    early = generation.get("early_stopping") or False
    if (generation.get("num_beams") or 1) > 1 and early is not True:
        others.append(f"early_stopping = {early}")
    return others


FIRST = len(SPECIALS)
"""Id of the first piece after the special ones."""

MARKS = {PAD: "<pad>", UNK: "<unk>", EOS: "</s>"}
"""Marian's spelling of the special pieces."""

NEVER = -100.0
"""Output bias of a piece that Marian's model lacks: its probability is 0 in float32."""

UNUSED_TYPE = {"unigram": PieceType.UNUSED, "bpe": PieceType.CONTROL}
"""Type of vocabulary pieces that the sentencepiece model lacks. In BPE, any other type would change the merges."""


def ordinary(model: ModelFile) -> dict[str, ModelPiece]:
    """Return the pieces that occur in segmented text, by their spelling."""
    text = (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.BYTE)
    return {piece.text: piece for piece in model.pieces if piece.type in text}


def renumbered(model: ModelFile, vocabulary: Sequence[str], marks: Sequence[str] = ()) -> ModelFile:
    """Return the model with mtkit's special pieces first, then the vocabulary in its order. It segments text as before.

    The vocabulary has all `ordinary` pieces of the model; its other pieces never occur in segmented text, and `marks`
    among them are decoded as the empty string.

    Raises: ValueError if a piece is missing, repeated or special, and if the model is neither unigram nor bpe.
    """
    if model.kind not in UNUSED_TYPE:
        raise ValueError(f"it cuts text by the algorithm {model.kind}, not unigram or bpe")
    known, silent, other = ordinary(model), set(marks), UNUSED_TYPE[model.kind]
    every = [*SPECIALS, *vocabulary]
    if len(set(every)) < len(every) or "" in every:
        twice = next(piece for place, piece in enumerate(every) if not piece or piece in every[:place])
        raise ValueError(f"the piece {twice!r} is empty or comes twice")
    if missing := known.keys() - set(every):
        raise ValueError(f"its piece {min(missing)!r} is not in the vocabulary")
    types = [PieceType.UNKNOWN if place == UNK else PieceType.CONTROL for place in range(FIRST)]
    specials = [ModelPiece(text, type=kind) for text, kind in zip(SPECIALS, types, strict=True)]
    others = (
        known.get(text, ModelPiece(text, type=PieceType.CONTROL if text in silent else other)) for text in vocabulary
    )
    return model.with_specials((*specials, *others))


@dataclass(frozen=True)
class Numbering:
    """Pieces of one side, numbered by mtkit's ids."""

    pieces: tuple[str, ...]
    """Pieces after the special ones."""
    rows: tuple[int | None, ...]
    """Row of Marian's weights for each id; None if Marian has none."""
    added: frozenset[int]
    """Ids that share a row with another id, or have none: the model never predicts them."""

    @property
    def languages(self) -> list[str]:
        """Target languages that the first piece of a source can select, e.g. fra for >>fra<<."""
        return [piece[2:-2] for piece in self.pieces if is_tag(piece)]

    @property
    def marks(self) -> list[str]:
        """Pieces that are not text: tags, and rows without a name."""
        return [piece for piece in self.pieces if is_tag(piece) or piece.startswith("< ")]

    def embeddings(self, weight: Tensor) -> Tensor:
        """Reorder Marian's rows (V', D) to mtkit's (V, D), zeros for missing rows. Raises: RunError for another V'."""
        self._check(len(weight), "embeddings")
        zeros = weight.new_zeros(1, weight.shape[1])
        index = [len(weight) if row is None else row for row in self.rows]
        return torch.cat([weight, zeros])[index]

    def biases(self, bias: Tensor, excluded: Set[int] = frozenset()) -> Tensor:
        """Reorder Marian's logit biases (V',) to mtkit's (V,): `NEVER` for rows in `excluded` and ids in `added`."""
        self._check(len(bias), "biases")
        reordered = bias[[row or 0 for row in self.rows]].clone()
        never = [number for number, row in enumerate(self.rows) if number in self.added or row in excluded]
        reordered[never] = NEVER
        return reordered

    @property
    def count(self) -> int:
        """Number of rows in Marian's weights."""
        return max(row for row in self.rows if row is not None) + 1

    def _check(self, count: int, what: str) -> None:
        if count != self.count:
            raise RunError(f"the weights have {count:,} {what}, but config.json has {self.count:,}")


def is_tag(piece: str) -> bool:
    """Return whether a piece selects a target language."""
    return piece.startswith(">>") and piece.endswith("<<")


def number(
    vocabulary: Mapping[str, int], models: Sequence[ModelFile], *, size: int, pad: int, eos: int, start: int
) -> Numbering:
    """Number the pieces of a vocabulary {piece: id} with `size` rows, and the models' pieces that it lacks.

    Raises: DataError if the ids are not a valid Marian vocabulary.
    """
    names = {row: piece for piece, row in vocabulary.items()}
    if len(names) < len(vocabulary):
        raise DataError("two of its pieces have one id")
    if MARKS[UNK] not in vocabulary:
        raise DataError(f"it has no piece {MARKS[UNK]}")
    unknown = vocabulary[MARKS[UNK]]
    if outside := [piece for piece, row in vocabulary.items() if not 0 <= row < size]:
        raise DataError(f"the id {vocabulary[outside[0]]} of {outside[0]} is outside the {size:,} rows of the weights")
    if beyond := [row for row in (pad, eos, start) if not 0 <= row < size]:
        raise DataError(f"the id {beyond[0]} of a special piece is outside the {size:,} rows of the weights")
    if vocabulary.get(MARKS[EOS], eos) != eos:
        raise DataError(f"{MARKS[EOS]} has the id {vocabulary[MARKS[EOS]]}, but eos_token_id is {eos}")
    special = {PAD: pad, UNK: unknown, EOS: eos, BOS: start, BREAK: vocabulary.get(SPECIALS[BREAK])}
    taken: dict[int | None, int] = {}
    for mark, row in special.items():  # the first mark with a row owns it
        taken.setdefault(row, mark)
    added = {mark for mark, row in special.items() if row is None or taken[row] != mark}
    rows: list[int | None] = [special[mark] for mark in range(FIRST)]
    others = [row for row in range(size) if row not in taken]
    pieces = [names.get(row, f"< {row}>") for row in others]
    known = {*pieces, *(names[row] for row in taken if row in names)}
    of_models = dict.fromkeys(piece for model in models for piece in ordinary(model))
    more = [piece for piece in of_models if piece not in known]
    added |= set(range(FIRST + len(pieces), FIRST + len(pieces) + len(more)))
    return Numbering((*pieces, *more), (*rows, *others, *[unknown] * len(more)), frozenset(added))


OUTPUT, BIAS, SHARED = "lm_head.weight", "final_logits_bias", "model.shared.weight"
TABLES = {side: f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")}
POSITIONS = {side: f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}

KINDS = ("sinusoidal-halves", "sinusoidal")
"""Supported tables of positions, as the recipe names them; the first is Hugging Face's default."""

_PARTS = {
    "attention": "self_attn",
    "attention_residual.norm": "self_attn_layer_norm",
    "self_attention": "self_attn",
    "self_residual.norm": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "cross_residual.norm": "encoder_attn_layer_norm",
    "feed_forward.inner": "fc1",
    "feed_forward.outer": "fc2",
    "feed_forward_residual.norm": "final_layer_norm",
}
_OF_SIDE = {
    "encoder": ("attention", "attention_residual.norm"),
    "decoder": ("self_attention", "self_residual.norm", "cross_attention", "cross_residual.norm"),
}
_OF_BOTH = ("feed_forward.inner", "feed_forward.outer", "feed_forward_residual.norm")


def layer_names(settings: ModelSettings) -> Iterator[tuple[str, str]]:
    """Yield (mtkit's name, Hugging Face's name) of each weight except embeddings, positions and output."""
    for side, layers in (("encoder", settings.encoder_layers), ("decoder", settings.decoder_layers)):
        for layer in range(layers):
            for part in (*_OF_SIDE[side], *_OF_BOTH):
                projections = ("q_proj.", "k_proj.", "v_proj.", "out_proj.") if part.endswith("attention") else ("",)
                for name in (f"{projection}{kind}" for projection in projections for kind in ("weight", "bias")):
                    yield f"{side}.{layer}.{part}.{name}", f"model.{side}.layers.{layer}.{_PARTS[part]}.{name}"
        if settings.norm == "pre":
            for kind in ("weight", "bias"):
                yield f"{side}_norm.{kind}", f"model.{side}.layer_norm.{kind}"


def converted_weights(
    theirs: Mapping[str, Tensor],
    settings: ModelSettings,
    source: Numbering,
    target: Numbering,
    excluded: Set[int] = frozenset(),
) -> dict[str, Tensor]:
    """Return Hugging Face's weights under mtkit's names, in float32, with mtkit's order of pieces.

    The search never predicts target pieces of the rows `excluded`.

    Raises: RunError for a missing weight, and for a weight that mtkit's model lacks.
    """
    used = set[str]()

    def take(*names: str) -> Tensor:
        """Return the first of these weights that exists: libraries save tied weights under one of their names."""
        used.update(names)
        weight = next((theirs[name] for name in names if name in theirs), None)
        if weight is None:
            raise RunError(f"the weight {names[0]} is missing")
        return weight.float()

    weights = {ours: take(name) for ours, name in layer_names(settings)}
    if settings.tie == "all":
        table = source.embeddings(take(SHARED, OUTPUT, *TABLES.values()))
        weights |= dict.fromkeys(("source_embedding.tokens.weight", "target_embedding.tokens.weight"), table)
    else:
        tied = (OUTPUT,) if settings.tie == "decoder" else ()
        shared = () if settings.tie == "decoder" else (SHARED,)
        weights["source_embedding.tokens.weight"] = source.embeddings(take(TABLES["encoder"], *shared))
        weights["target_embedding.tokens.weight"] = target.embeddings(take(TABLES["decoder"], *tied, *shared))
        if settings.tie == "none":
            weights["output.weight"] = target.embeddings(take(OUTPUT))
    used.update({BIAS, *POSITIONS.values()})
    bias = theirs.get(BIAS, torch.zeros(target.count))
    weights["output_bias"] = target.biases(bias.float().flatten(), excluded)
    if others := sorted(theirs.keys() - used):
        raise RunError(f"mtkit's model has no place for the weight {others[0]}")
    return weights


def positions_of(theirs: Mapping[str, Tensor]) -> str:
    """Return the recipe's `model.positions` for the tables among the weights; without any, Hugging Face's default.

    Raises: RunError if a table does not have the sines and cosines of a supported kind.
    """
    kinds = {_kind(name, theirs[name]) for name in POSITIONS.values() if name in theirs} or {KINDS[0]}
    if len(kinds) > 1:
        raise RunError(f"{' and '.join(POSITIONS.values())} are tables of different kinds")
    return kinds.pop()


def _kind(name: str, table: Tensor) -> str:
    for kind in KINDS:
        sines = Sinusoidal(table.shape[0], table.shape[1], kind).table
        if torch.allclose(table.float(), sines, atol=2e-3):  # the rounding of float16
            return kind
    raise RunError(f"the weight {name} is not a table of sines and cosines")
