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


FIRST = len(SPECIALS)
"""The number of the first piece of the vocabulary."""

NEVER_CUT = {"unigram": PieceType.UNUSED, "bpe": PieceType.CONTROL}
"""What pieces are that the model itself does not know. In BPE any other type would take part in merges."""


def ordinary(model: ModelFile) -> dict[str, ModelPiece]:
    """The pieces that text can be cut into, by their spelling."""
    text = (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.BYTE)
    return {each.text: each for each in model.pieces if each.type in text}


def renumbered(model: ModelFile, vocabulary: Sequence[str], marks: Sequence[str] = ()) -> ModelFile:
    """The model with mtkit's special pieces, then the vocabulary in its order.

    It cuts text as before. The vocabulary has all `ordinary` pieces of the model; into its others text is never cut,
    and `marks` among them are decoded as nothing.

    Raises: ValueError where a piece is missing, comes twice or is one of the special ones, and for a model of another
    kind than unigram and bpe.
    """
    if model.kind not in NEVER_CUT:
        raise ValueError(f"it cuts text by the algorithm {model.kind}, not unigram or bpe")
    known, silent, other = ordinary(model), set(marks), NEVER_CUT[model.kind]
    every = [*SPECIALS, *vocabulary]
    if len(set(every)) < len(every) or "" in every:
        twice = next(each for place, each in enumerate(every) if not each or each in every[:place])
        raise ValueError(f"the piece {twice!r} is empty or comes twice")
    if missing := known.keys() - set(every):
        raise ValueError(f"its piece {min(missing)!r} is not in the vocabulary")
    types = [PieceType.UNKNOWN if place == UNK else PieceType.CONTROL for place in range(FIRST)]
    specials = [ModelPiece(text, type=kind) for text, kind in zip(SPECIALS, types, strict=True)]
    others = (
        known.get(text, ModelPiece(text, type=PieceType.CONTROL if text in silent else other)) for text in vocabulary
    )
    return model.with_specials((*specials, *others))


MARKS = {PAD: "<pad>", UNK: "<unk>", EOS: "</s>"}
"""Spelling of the special pieces in Marian."""

NEVER = -100.0
"""Output bias of a piece that Marian's model lacks: its probability is 0 in float32."""


@dataclass(frozen=True)
class Numbering:
    """Pieces of one side, numbered by mtkit's ids."""

    pieces: tuple[str, ...]
    """Pieces after the special ones."""
    rows: tuple[int | None, ...]
    """Row of Marian's weights for each id; None if Marian has none."""
    added: frozenset[int]
    """Ids without a row of their own: the model never predicts them."""

    @property
    def languages(self) -> list[str]:
        """Target languages that a source can select by its first piece, as fra for >>fra<<."""
        return [each[2:-2] for each in self.pieces if is_tag(each)]

    @property
    def marks(self) -> list[str]:
        """Pieces that are not text: tags, and rows without a name."""
        return [each for each in self.pieces if is_tag(each) or each.startswith("< ")]

    def embeddings(self, weight: Tensor) -> Tensor:
        """Reorder Marian's rows (V', D) to mtkit's (V, D), zeros for missing rows. Raises: RunError for another V'."""
        self._check(len(weight), "embeddings")
        zeros = weight.new_zeros(1, weight.shape[1])
        index = [len(weight) if row is None else row for row in self.rows]
        return torch.cat([weight, zeros])[index]

    def biases(self, bias: Tensor, without: Set[int] = frozenset()) -> Tensor:
        """Reorder Marian's logit biases (V',) to mtkit's (V,): `NEVER` for rows in `without` and ids in `added`."""
        self._check(len(bias), "biases")
        found = bias[[row or 0 for row in self.rows]].clone()
        found[[number for number, row in enumerate(self.rows) if number in self.added or row in without]] = NEVER
        return found

    def _check(self, there: int, what: str) -> None:
        rows = max(row for row in self.rows if row is not None) + 1
        if there != rows:
            raise RunError(f"the weights have {there:,} {what}, and config.json says {rows:,}")


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
        raise DataError(f"{MARKS[EOS]} has the id {vocabulary[MARKS[EOS]]}, and eos_token_id is {eos}")
    special = {PAD: pad, UNK: unknown, EOS: eos, BOS: start, BREAK: vocabulary.get(SPECIALS[BREAK])}
    taken: dict[int | None, int] = {}
    for mark, row in special.items():  # the first mark with a row owns it
        taken.setdefault(row, mark)
    added = {mark for mark, row in special.items() if row is None or taken[row] != mark}
    rows: list[int | None] = [special[mark] for mark in range(FIRST)]
    others = [row for row in range(size) if row not in taken]
    pieces = [names.get(row, f"< {row}>") for row in others]
    known = {*pieces, *(names[row] for row in taken if row in names)}
    more = [
        piece for piece in dict.fromkeys(each for model in models for each in ordinary(model)) if piece not in known
    ]
    added |= set(range(FIRST + len(pieces), FIRST + len(pieces) + len(more)))
    return Numbering((*pieces, *more), (*rows, *others, *[unknown] * len(more)), frozenset(added))


OUTPUT, BIAS, SHARED = "lm_head.weight", "final_logits_bias", "model.shared.weight"

TABLES = {side: f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")}
KINDS = ("sinusoidal-halves", "sinusoidal")
"""What a table of positions may be, as the recipe names it: the first is Hugging Face's own."""

POSITIONS = {side: f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}

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
    """mtkit's name and Hugging Face's of each weight that belongs to no vocabulary."""
    for side, layers in (("encoder", settings.encoder_layers), ("decoder", settings.decoder_layers)):
        for number in range(layers):
            for part in (*_OF_SIDE[side], *_OF_BOTH):
                projections = ("q_proj.", "k_proj.", "v_proj.", "out_proj.") if part.endswith("attention") else ("",)
                for name in (f"{each}{kind}" for each in projections for kind in ("weight", "bias")):
                    yield f"{side}.{number}.{part}.{name}", f"model.{side}.layers.{number}.{_PARTS[part]}.{name}"
        if settings.norm == "pre":
            for kind in ("weight", "bias"):
                yield f"{side}_norm.{kind}", f"model.{side}.layer_norm.{kind}"


def own_weights(
    theirs: Mapping[str, Tensor],
    settings: ModelSettings,
    source: Numbering,
    target: Numbering,
    without: Set[int] = frozenset(),
) -> dict[str, Tensor]:
    """Hugging Face's weights under mtkit's names, in float32, the vocabulary with mtkit's numbers.

    Rows `without` probability are target pieces that the search never gives.

    Raises: RunError for a weight that is missing, and for one that mtkit's model has no place for.
    """
    names, used = dict(layer_names(settings)), set[str]()

    def take(*known: str) -> Tensor:
        """The first of these weights that is there: libraries write tied ones under one of their names."""
        used.update(known)
        found = next((theirs[name] for name in known if name in theirs), None)
        if found is None:
            raise RunError(f"the weight {known[0]} is missing")
        return found.float()

    found = {own: take(name) for own, name in names.items()}
    if settings.tie == "all":
        table = source.embeddings(take(SHARED, OUTPUT, *TABLES.values()))
        found |= dict.fromkeys(("source_embedding.tokens.weight", "target_embedding.tokens.weight"), table)
    else:
        tied = (OUTPUT,) if settings.tie == "decoder" else ()
        shared = () if settings.tie == "decoder" else (SHARED,)
        found["source_embedding.tokens.weight"] = source.embeddings(take(TABLES["encoder"], *shared))
        found["target_embedding.tokens.weight"] = target.embeddings(take(TABLES["decoder"], *tied, *shared))
        if settings.tie == "none":
            found["output.weight"] = target.embeddings(take(OUTPUT))
    used.update({BIAS, *POSITIONS.values()})
    rows = max(row for row in target.rows if row is not None) + 1
    found["output_bias"] = target.biases(theirs.get(BIAS, torch.zeros(rows)).float().flatten(), without)
    if others := sorted(theirs.keys() - used):
        raise RunError(f"mtkit's model has no place for the weight {others[0]}")
    return found


def positions_of(theirs: Mapping[str, Tensor]) -> str:
    """The recipe's `model.positions` for the tables among the weights; Hugging Face's own where there are none.

    Raises: RunError where a table is neither kind of sines and cosines.
    """
    kinds = {_kind(name, theirs[name]) for name in POSITIONS.values() if name in theirs} or {KINDS[0]}
    if len(kinds) > 1:
        raise RunError(f"{' and '.join(POSITIONS.values())} are tables of different kinds")
    return kinds.pop()


def _kind(name: str, table: Tensor) -> str:
    for kind in KINDS:
        if torch.allclose(
            table.float(), Sinusoidal(table.shape[0], table.shape[1], kind).table, atol=2e-3
        ):  # what float16 rounds off
            return kind
    raise RunError(f"the weight {name} is another table than sines and cosines")
