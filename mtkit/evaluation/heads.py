"""Measures of a trained network's heads: learned numbers, entropy and distance of weights, the loss each prevents.

Heads are switched off one at a time, as by Michel, Levy and Neubig, "Are Sixteen Heads Really Better than One?",
NeurIPS 2019, arXiv 1905.10650, section 3.2: a head's output is zero before `out_proj`, and nothing is trained again.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtkit.attention import Attention, Inputs, mechanisms
from mtkit.attention.bases.head_attention import HeadAttention
from mtkit.attention.contract import ROLES
from mtkit.attention.mixed_heads import MixedHeads
from mtkit.attention.slots import SLOTS
from mtkit.data.batches import make_batch
from mtkit.data.prepared import Side, open_prepared
from mtkit.data.vocabulary import vocabulary_of
from mtkit.errors import DataError, RunError
from mtkit.evaluation.head_passes import BatchPass, switched_off
from mtkit.model.layers import Weights
from mtkit.model.network import Network
from mtkit.runs import Run

BATCH_TOKENS = 2048
"""Maximum padded pieces per side in a batch: each head has a weight for every pair of pieces."""


@dataclass
class LayerHeads:
    """The heads of one attention; each tensor is on the CPU, in float64, with a number for each head."""

    role: str
    layer: int
    """Counted from 1 in each role."""
    mechanism: str
    """Its name, with the content of its slots."""
    heads: int
    """Heads that can be switched off; 1 for a mechanism without heads, which is switched off as a whole."""
    learned: dict[str, Tensor] = field(default_factory=dict)
    """`Attention.learned_numbers`: (H,) or (H, n)."""
    entropy: Tensor | None = None
    """(H,) entropy of a query's weights, in nats: the mean over queries; None if there are no weights."""
    distance: Tensor | None = None
    """(H,) mean |i - j| of query i and key j under the weights, in pieces. In the cross role i is the place in the
    source that corresponds to the target position: the two begin together and end together."""
    cost: Tensor | None = None
    """(heads,) loss with the head switched off minus the loss, in nats per target piece."""
    cost_error: Tensor | None = None
    """(heads,) standard error of the cost over segments; None for a sample of one."""


@dataclass(frozen=True)
class Heads:
    """All heads of a network, measured on a sample of a side."""

    layers: list[LayerHeads]
    """By role, then by layer from below."""
    segments: int
    tokens: int
    """Target pieces, end marks counted."""
    loss: float | None
    """Nats per target piece; None without a sample."""

    def as_object(self) -> dict[str, Any]:
        """Return the same as plain lists and numbers, for JSON; a head that has no number has null."""
        names = ("learned", "entropy", "distance", "cost", "cost_error")
        layers = [
            {
                "role": layer.role,
                "layer": layer.layer,
                "mechanism": layer.mechanism,
                **{name: _plain(getattr(layer, name)) for name in names},
            }
            for layer in self.layers
        ]
        return {"segments": self.segments, "tokens": self.tokens, "loss": self.loss, "layers": layers}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(numbers) for name, numbers in value.items()}
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, list):
        return [_plain(number) for number in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def validation_side(run: Run, data: Path | None = None) -> Side:
    """Return the validation side of prepared data, by default the data in the run's recipe.

    Raises: DataError if there is none; RunError if its pieces or its directions are not the run's; as `Run.tokenizers`.
    """
    _ = run.tokenizers  # raises here if they are damaged; else the data would be blamed
    prepared = open_prepared(run.recipe.data.folder if data is None else data)
    if vocabulary_of(prepared.folder / "tokenizer") != run.vocabulary or prepared.directions != run.directions:
        raise RunError(
            f"{prepared.folder} has other pieces or directions than {run.folder}; "
            "give the prepared data that it was trained on with --data"
        )
    return prepared.valid


def sample_rows(side: Side, segments: int, seed: int, longest: int) -> np.ndarray:
    """Return the rows of at most `segments` segments that fit the model, drawn by the seed, shortest first.

    Raises: DataError if no segment fits.
    """
    lengths = np.maximum(side.source.lengths, side.target.lengths) + 1
    fitting = np.flatnonzero(lengths <= longest)
    if not len(fitting):
        raise DataError(f"no segment of this side has at most {longest} pieces, the limit of the model")
    rows = np.random.default_rng(seed).permutation(fitting)[:segments]
    return rows[np.argsort(lengths[rows], kind="stable")]


def batches_of(side: Side, rows: np.ndarray) -> list[np.ndarray]:
    """Return the rows, shortest first, in batches of at most `BATCH_TOKENS` padded pieces per side, or of one row."""
    batches: list[list[int]] = [[]]
    for row in rows.tolist():
        width = max(int(side.source.lengths[row]), int(side.target.lengths[row])) + 1
        if batches[-1] and width * (len(batches[-1]) + 1) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return [np.array(batch) for batch in batches]


@torch.no_grad()
def examine(
    network: Network,
    side: Side | None,
    *,
    segments: int = 200,
    seed: int = 1,
    costs: bool = True,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Heads:
    """Examine all heads of a network over a sample of a side, in evaluation mode; without a side, its parameters.

    `costs`: whether to switch heads off, which takes one pass over the sample for each head of the network.
    `on_progress` gets the number of passes done and of all.

    Raises: DataError if no segment fits the model.
    """
    attentions = attentions_of(network)
    if side is None:
        return Heads([_new_layer(*entry) for entry in attentions], 0, 0, None)
    training = network.training
    network.eval()
    try:
        return _examined(network, side, attentions, segments, seed, costs, on_progress)
    finally:
        network.train(training)


def entropies(network: Network, side: Side, segments: int) -> dict[str, float]:
    """Return the mean entropy of each head's weights in nats, by names as `entropy_encoder_1_2`: role, layer and head.

    The segments are the same ones in each call. Mechanisms without weights have no entropies. Raises: DataError as
    `examine`.
    """
    return {
        f"entropy_{layer.role}_{layer.layer}_{head}": float(entropy)
        for layer in examine(network, side, segments=segments, costs=False).layers
        if layer.entropy is not None
        for head, entropy in enumerate(layer.entropy, start=1)
    }


def _examined(
    network: Network,
    side: Side,
    attentions: Sequence[tuple[str, int, Attention]],
    segments: int,
    seed: int,
    costs: bool,
    on_progress: Callable[[int, int], object],
) -> Heads:
    rows = sample_rows(side, segments, seed, min(network.longest_source, network.longest_target))
    batches = batches_of(side, rows)
    layers = [_LayerSums(*entry) for entry in attentions]
    offs = [(sums, head) for sums in layers for head in range(sums.heads if costs else 0)]
    device, base, done = next(network.parameters()).device, list[Tensor](), 0
    for rows_of_batch in batches:
        batch = make_batch(side, rows_of_batch)
        run = BatchPass(network, batch, device)
        base.append(_observed(run, layers))
        on_progress(done := done + 1, len(batches) * (1 + len(offs)))
        for sums, head in offs:
            with switched_off(sums.attention, head):
                sums.off[head].append(run.losses(again=sums.role == "encoder"))
            on_progress(done := done + 1, len(batches) * (1 + len(offs)))
    counts = torch.cat([torch.from_numpy(side.target.lengths[batch] + 1) for batch in batches]).double()
    losses = torch.cat(base)
    finished = [sums.finished(losses, counts) for sums in layers]
    return Heads(finished, len(rows), int(counts.sum()), float(losses.sum() / counts.sum()))


def attentions_of(network: Network) -> list[tuple[str, int, Attention]]:
    """Return the role, the layer from 1 and the attention of each sub-layer, by role; attentions inside others are
    parts of them.
    """
    outer: list[tuple[str, Attention]] = []
    for name, attention in network.attentions():
        if not any(name.startswith(f"{other}.") for other, _ in outer):
            outer.append((name, attention))
    by_role = {role: [one for _, one in outer if one.site.role == role] for role in ROLES}
    return [(role, layer, one) for role, stack in by_role.items() for layer, one in enumerate(stack, start=1)]


def _head_count(attention: Attention) -> int:
    if isinstance(attention, MixedHeads):
        return attention.site.heads
    if not isinstance(attention, HeadAttention):
        return 1
    return attention.projection.joined_width // attention.projection.value_width


def _new_layer(role: str, layer: int, attention: Attention) -> LayerHeads:
    learned = {key: value.double().cpu() for key, value in attention.learned_numbers().items()}
    return LayerHeads(role, layer, _name(attention), _head_count(attention), learned)


def _name(attention: Attention) -> str:
    """Return the mechanism's name with the content of its slots; of a mix, the names and heads of its kinds."""
    if isinstance(attention, MixedHeads):
        return " + ".join(f"{_name(part)}:{part.site.heads}" for part in attention.parts)
    names = {mechanism.kind: name for name, mechanism in mechanisms().items()}
    slots = {slot: getattr(attention.site, slot) for slot in SLOTS}
    filled = [value if isinstance(value, str) else value["name"] for value in slots.values() if value is not None]
    return " + ".join([names.get(type(attention), type(attention).__name__), *filled])


class _LayerSums:
    """Sums over batches for one attention."""

    def __init__(self, role: str, layer: int, attention: Attention) -> None:
        self.role, self.attention = role, attention
        self.result = _new_layer(role, layer, attention)
        self.heads = self.result.heads
        self.off: list[list[Tensor]] = [[] for _ in range(self.heads)]
        self.learned: dict[str, Tensor] = {}
        self.tokens = 0
        self.entropy: Tensor | float = 0.0
        self.distance: Tensor | float = 0.0
        self.queries: Tensor | float = 0.0

    def read(self, _: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Add the learned numbers of a forward pass; a hook of the attention."""
        inputs = Inputs(*positional, **named)
        tokens = inputs.query.shape[:2].numel() if inputs.query_valid is None else int(inputs.query_valid.sum())
        for name, value in self.attention.learned_numbers(inputs).items():
            self.learned[name] = self.learned.get(name, 0.0) + value.double().cpu() * tokens
        self.tokens += tokens

    def weigh(self, weights: Tensor, query_valid: Tensor, key_valid: Tensor) -> None:
        """Add entropies and distances of weights (B, H, T, S); query_valid (B, T), key_valid (B, S)."""
        weights = weights.float() * key_valid[:, None, None]
        total = weights.sum(-1)  # below 1 if keys that are no tokens have weights
        counted = query_valid[:, None] & (total > 0)
        shares = weights / total.where(total > 0, 1.0).unsqueeze(-1)
        self.entropy += _sums(torch.special.entr(shares).sum(-1), counted)
        distance = _distances(query_valid, key_valid, cross=self.role == "cross")
        self.distance += _sums((shares * distance[:, None]).sum(-1), counted)
        self.queries += counted.sum((0, 2)).double().cpu()

    def finished(self, losses: Tensor, counts: Tensor) -> LayerHeads:
        """Return the means, from the losses (segments,) of whole targets and their pieces (segments,)."""
        result = self.result
        if self.tokens:
            result.learned = {name: value / self.tokens for name, value in self.learned.items()}
        if isinstance(self.queries, Tensor):
            result.entropy, result.distance = self.entropy / self.queries, self.distance / self.queries
        if self.off[0]:
            more = torch.stack([torch.cat(parts) for parts in self.off]) - losses
            result.cost = more.sum(1) / counts.sum()
            residual = more - result.cost[:, None] * counts
            if len(counts) > 1:
                variance = residual.square().sum(1) * len(counts) / (len(counts) - 1)
                result.cost_error = variance.sqrt() / counts.sum()
        return result


def _sums(values: Tensor, counted: Tensor) -> Tensor:
    """Return the sums (H,) of the values (B, H, T) that are counted."""
    return values.masked_fill(~counted, 0.0).double().sum((0, 2)).cpu()


def _distances(query_valid: Tensor, key_valid: Tensor, *, cross: bool) -> Tensor:
    """Return |i - j| (B, T, S), with i on the diagonal of the real tokens in the cross role."""
    i = torch.arange(query_valid.shape[1], device=query_valid.device).float().expand(query_valid.shape)
    if cross:
        last_query, last_key = (valid.sum(1, keepdim=True) - 1 for valid in (query_valid, key_valid))
        i = i * last_key / last_query.clamp(min=1)
    j = torch.arange(key_valid.shape[1], device=key_valid.device)
    return (i.unsqueeze(-1) - j).abs()


def _observed(run: BatchPass, layers: Sequence[_LayerSums]) -> Tensor:
    """Return the losses of a batch; add learned numbers and weights to the sums of all layers."""
    weights: Weights = {role: [] for role in ROLES}
    with ExitStack() as stack:
        for sums in layers:
            hook = sums.attention.register_forward_pre_hook(sums.read, with_kwargs=True)
            stack.callback(hook.remove)
        losses = run.losses(weights)
    by_role = {role: iter(stack_of_role) for role, stack_of_role in weights.items()}
    for sums in layers:
        attention_weights = next(by_role[sums.role], None)
        if attention_weights is not None:
            query_valid = run.source_valid if sums.role == "encoder" else run.target_valid
            key_valid = run.target_valid if sums.role == "decoder" else run.source_valid
            sums.weigh(attention_weights, query_valid, key_valid)
    return losses
