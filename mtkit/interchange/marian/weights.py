"""The weights of a Marian model by name: which of mtkit's stands under which of Hugging Face's."""

from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor

from mtkit.errors import RunError
from mtkit.interchange.marian.vocabulary import Numbering
from mtkit.model.embedding import Sinusoidal
from mtkit.recipe import ModelSettings

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
