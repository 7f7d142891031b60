"""Weights of Hugging Face's Marian models as mtkit's."""

from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor

from mtkit.errors import RunError
from mtkit.interchange.marian_vocabulary import NEVER, Numbering
from mtkit.model.embedding import Sinusoidal
from mtkit.recipe import ModelSettings

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

    Raises: RunError for a missing weight, for a weight that mtkit's model lacks, and as `real`.
    """
    used = set[str]()

    def take(*names: str) -> Tensor:
        """Return the first of these weights that exists: libraries save tied weights under one of their names."""
        used.update(names)
        stored = next((name for name in names if name in theirs), None)
        if stored is None:
            raise RunError(f"the weight {names[0]} is missing")
        return real(stored, theirs[stored])

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
    if bias.is_floating_point():
        bias = bias.masked_fill(bias.isneginf(), NEVER)
    weights["output_bias"] = target.biases(real(BIAS, bias).flatten(), excluded)
    if others := sorted(theirs.keys() - used):
        raise RunError(f"mtkit's model has no place for the weight {others[0]}")
    return weights


def real(name: str, weight: Tensor) -> Tensor:
    """Return a weight in float32.

    Raises: RunError for whole numbers (a quantised model), booleans and complex numbers, and for NaN and infinities.
    """
    if not weight.is_floating_point():
        raise RunError(f"the weight {name} is {weight.dtype}: mtkit imports float32, float16 and bfloat16")
    weight = weight.float()
    if not weight.isfinite().all():
        raise RunError(f"the weight {name} has values that are NaN or infinite in float32")
    return weight


def positions_of(theirs: Mapping[str, Tensor], longest: int, width: int) -> str:
    """Return the recipe's `model.positions` for the tables among the weights; without any, Hugging Face's default.

    Raises: RunError if a table is not (longest, width) sines and cosines of a supported kind.
    """
    kinds = {_kind(name, theirs[name], longest, width) for name in POSITIONS.values() if name in theirs} or {KINDS[0]}
    if len(kinds) > 1:
        raise RunError(f"{' and '.join(POSITIONS.values())} are tables of different kinds")
    return kinds.pop()


def _kind(name: str, table: Tensor, longest: int, width: int) -> str:
    if table.shape != (longest, width):
        raise RunError(
            f"the weight {name} has the shape {(*table.shape,)}, and config.json requires {(longest, width)} "
            "(max_position_embeddings, d_model)"
        )
    for kind in KINDS:
        sines = Sinusoidal(longest, width, kind).table
        if torch.allclose(table.float(), sines, atol=2e-3):  # the rounding of float16
            return kind
    raise RunError(f"the weight {name} is not a table of sines and cosines")
