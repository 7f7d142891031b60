"""Mixed heads: mechanisms of several kinds in the heads of one layer, named as in "full:4+band:4".

Each kind computes its own share of the heads with its own projections, as wide as the heads of a plain layer: head by
head, the outputs equal multi-head attention (Vaswani et al., 2017, section 3.2.2). A product of the concatenated
heads with one output matrix is the sum over kinds of products with slices of this matrix, so the layer's output is the
sum of the kinds' outputs. Child et al., "Generating Long Sequences with Sparse Transformers", 2019, arXiv 1904.10509,
section 4.3, divide heads between two patterns in this way.
Cost: the kinds' costs, each with its share of the heads.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mtkit.attention.contract import Attended, Attention, Beginning, Inputs, Site, State
from mtkit.errors import MtkitError, shown

KIND = r"[a-z0-9]+(?:-[a-z0-9]+)*:[0-9]+"
MIX = re.compile(rf"\s*{KIND}(?:\s*\+\s*{KIND})*\s*")
"""A mix in texts: kinds with their numbers of heads. A part after "+" that has no number is not a kind."""

FORM = "write NAME:HEADS for each kind, as in full:4+band:4"


def kinds_of(name: str) -> list[tuple[str, int]] | None:
    """Return the kinds of a mix and their numbers of heads; None for a name that is not a mix.

    Raises: MtkitError for a mix that is written wrongly.
    """
    if ":" not in name and "+" not in name:
        return None
    kinds = [(kind, int(count)) for kind, _, count in (part.strip().partition(":") for part in _parts(name))]
    if len(kinds) < 2 or any(count < 1 for _, count in kinds):
        raise MtkitError(f"{shown(name)} must have two kinds or more, of one head or more each; {FORM}")
    return kinds


def _parts(name: str) -> list[str]:
    if not MIX.fullmatch(name):
        raise MtkitError(f"cannot understand the attention {shown(name)}; {FORM}")
    return name.split("+")


class MixedHeads(Attention):
    """Several kinds of heads in one layer: some heads have one mechanism, others another."""

    def __init__(self, site: Site, parts: Sequence[Attention]) -> None:
        """`parts` are built for this site, each with its own number of heads and `layer_heads` of the site."""
        super().__init__(site)
        self.parts: Sequence[Attention] = nn.ModuleList(parts)  # type: ignore[assignment]
        for number, part in enumerate(self.parts):
            _scale_as_one_layer(part)
            if number and isinstance(part.out_proj, nn.Linear):
                part.out_proj.register_parameter("bias", None)  # the sum needs one bias
        self.weights = all(part.weights for part in self.parts)  # type: ignore[misc]
        self.reads_query = any(part.reads_query for part in self.parts)
        self.reads_marks = any(part.reads_marks for part in self.parts)
        self.learns_by_steps = all(part.learns_by_steps for part in self.parts)
        self.longest = min((part.longest for part in self.parts if part.longest is not None), default=None)

    def attend(self, inputs: Inputs) -> Attended:
        """Return the sum of the kinds' outputs; their weights are joined if all have them."""
        pairs = zip(self.parts, self._carries(inputs.carry), strict=True)
        need = inputs.need_weights and self.weights
        return self._joined([part.attend(replace(inputs, carry=carry, need_weights=need)) for part, carry in pairs])

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return the states of all kinds under their numbers."""
        pairs = zip(self.parts, self._carries(inputs.carry), strict=True)
        begun = [part.begin(replace(inputs, carry=carry)) for part, carry in pairs]
        return {str(number): state for number, (state, _) in enumerate(begun)}, _carried([carry for _, carry in begun])

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        """Return the same as `attend` for the next token; a step costs what the kinds' steps cost."""
        need = inputs.need_weights and self.weights
        steps = [
            part.advance(replace(inputs, carry=carry, need_weights=need), state[str(number)])
            for number, (part, carry) in enumerate(zip(self.parts, self._carries(inputs.carry), strict=True))
        ]
        return self._joined([attended for attended, _ in steps]), {
            str(number): after for number, (_, after) in enumerate(steps)
        }

    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Return the numbers of all kinds, with rows of NaN for the heads of the others.

        If two kinds have numbers of one name and different widths, the kind's class or first head is part of the name.
        """
        learned: dict[str, Tensor] = {}
        for part, first in self.firsts():
            for name, value in part.learned_numbers(inputs).items():
                rows = value.new_full((self.site.heads, *value.shape[1:]), float("nan"))
                names = [name, f"{name} ({type(part).__name__})", f"{name} (from head {first + 1} on)"]
                label = next(text for text in names if text not in learned or learned[text].shape == rows.shape)
                known = learned.setdefault(label, rows)
                known[first : first + part.site.heads] = _by_head(value, part.site.heads)
        return learned

    def adopt(self, full_state: Mapping[str, Tensor]) -> None:
        """Load a state of the same mix, or give each kind its heads' slices of `full`'s projections."""
        super().adopt(full_state)
        for number, (part, first) in enumerate(self.firsts()):
            if sliced := _slices(full_state, first, part.site):
                part.adopt({name: value for name, value in sliced.items() if number == 0 or name != "out_proj.bias"})

    def firsts(self) -> list[tuple[Attention, int]]:
        """Return the parts, each with the number of its first head in the layer."""
        heads = [part.site.heads for part in self.parts]
        return [(part, sum(heads[:number])) for number, part in enumerate(self.parts)]

    def _carries(self, carry: Any) -> Sequence[Any]:
        return [None] * len(self.parts) if carry is None else carry

    def _joined(self, results: Sequence[Attended]) -> Attended:
        output, weights, losses, log_prob = results[0].output, None, dict[str, Tensor](), results[0].log_prob
        for result in results[1:]:
            output = output + result.output
            if result.log_prob is not None:
                log_prob = result.log_prob if log_prob is None else log_prob + result.log_prob
        maps = [result.weights for result in results if result.weights is not None]
        if len(maps) == len(results):
            weights = torch.cat(maps, 1)
        for result in results:
            for name, loss in result.losses.items():
                losses[name] = losses[name] + loss if name in losses else loss
        return Attended(output, _carried([result.carry for result in results]), weights, losses, log_prob)


def as_full(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a mix's state with the projections and slot `nearby` of `full` added if all kinds have them.

    Another state is returned unchanged.
    """
    result, count = dict(state), 0
    while f"parts.{count}.out_proj.weight" in state:
        count += 1
    for name, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("out_proj", 1)):
        weights, biases = ([state.get(f"parts.{n}.{name}.{kind}") for n in range(count)] for kind in ("weight", "bias"))
        present = [weight for weight in weights if weight is not None]
        if count and len(present) == count:
            result[f"{name}.weight"] = torch.cat(present, dim)
        ends = [bias for bias in (biases[:1] if dim else biases) if bias is not None]
        if ends and len(ends) == (1 if dim else count):
            result[f"{name}.bias"] = torch.cat(ends)
    for name in [key.removeprefix("parts.0.") for key in state if key.startswith("parts.0.nearby.")]:
        rows = [state[key] for n in range(count) if (key := f"parts.{n}.{name}") in state]
        if len(rows) == count and len({row.shape[1:] for row in rows}) == 1:
            result[name] = torch.cat(rows)
    return result


def _carried(carries: Sequence[Any]) -> Sequence[Any] | None:
    """Return the carries of all kinds, or None if none has one."""
    return None if all(carry is None for carry in carries) else tuple(carries)


def _by_head(value: Tensor, heads: int) -> Tensor:
    """Return numbers (H, ...), (1, ...) or of another number of softmaxes as one row per head; NaN if none fits."""
    if len(value) in (1, heads):
        return value.expand(heads, *value.shape[1:])
    return torch.full_like(value[:1], float("nan")).expand(heads, *value.shape[1:])


def _slices(full_state: Mapping[str, Tensor], first: int, site: Site) -> dict[str, Tensor]:
    """Return the rows and columns of the heads from `first` on; empty if the state is not a `full` attention's."""
    width, heads = site.head_width, site.layer_heads or site.heads
    total, some = heads * width, slice(first * width, (first + site.heads) * width)
    sliced = {
        f"{name}.{kind}": full_state[f"{name}.{kind}"][some]
        for name in ("q_proj", "k_proj", "v_proj")
        for kind in ("weight", "bias")
        if f"{name}.{kind}" in full_state and len(full_state[f"{name}.{kind}"]) == total
    }
    if "out_proj.weight" in full_state and full_state["out_proj.weight"].shape[1] == total:
        sliced["out_proj.weight"] = full_state["out_proj.weight"][:, some]
    if "out_proj.bias" in full_state:
        sliced["out_proj.bias"] = full_state["out_proj.bias"]
    kernels = {name: rows for name, rows in full_state.items() if name.startswith("nearby.") and len(rows) == heads}
    return sliced | {name: rows[first : first + site.heads] for name, rows in kernels.items()}


@torch.no_grad()
def _scale_as_one_layer(part: Attention) -> None:
    """Scale the projections' initial weights to Xavier's range for the matrices of a layer with all heads."""
    share = (part.site.layer_heads or part.site.heads) / part.site.heads
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        linear = getattr(part, name, None)
        if isinstance(linear, nn.Linear):
            inner, outer = linear.in_features, linear.out_features
            all_heads = inner * share + outer if name == "out_proj" else inner + outer * share
            linear.weight.mul_(((inner + outer) / all_heads) ** 0.5)
