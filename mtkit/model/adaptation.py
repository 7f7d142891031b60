"""Training a part of a model: parameters frozen by name, and low-rank adapters.

Paper: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, arXiv 2106.09685, section 4.1, equation 3:
h = W0 x + (alpha / r) B A x with a frozen W0, A (r, I) drawn from a normal distribution, here of variance 1 / I, and
B (O, r) zero, so that an adapted model begins as the original model.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mtkit.errors import RecipeError, did_you_mean, shown
from mtkit.model.network import Network
from mtkit.model.sublayers import FeedForward
from mtkit.recipe import TrainingSettings
from mtkit.recipe.settings import LoraSettings

EMBEDDINGS = ("source_embedding", "target_embedding")


def train_in_part(model: Network, settings: TrainingSettings, seed: int) -> None:
    """Freeze the parameters in `training.freeze`, or add the adapters of `training.lora` and freeze all others.

    Raises: RecipeError for a name that the model does not have, and if nothing is left to train.
    """
    if settings.lora is None:
        freeze(model, settings.freeze)
    else:
        adapt(model, settings.lora, seed)


def freeze(model: Network, names: Sequence[str]) -> None:
    """Freeze the parameters of these names.

    A name is a group (embeddings, encoder, decoder, or output if it has parameters), a module (decoder.0,
    decoder.layers.0), or a part of names (feed_forward, cross_attention.q_proj, bias).

    Raises: RecipeError for a name that no parameter has, and if nothing is left to train.
    """
    for name in names:
        chosen = [parameter for known, parameter in _named(model) if _is_called(known, name)]
        if not chosen:
            hint = did_you_mean(name, _names(model))
            raise RecipeError(
                f"training.freeze: the model has no parameters {shown(name)}{hint}; name a "
                f"group ({', '.join(_groups(model))}), a layer as encoder.0, or a part as feed_forward"
            )
        for parameter in chosen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(f"training.freeze = {', '.join(names)} leaves nothing to train; leave a name out")


def trained_names(model: nn.Module) -> set[str]:
    """The names of the trained parameters, including all names of a shared one."""
    return {name for name, parameter in _named(model) if parameter.requires_grad}


def frozen_state(model: nn.Module) -> dict[str, Tensor]:
    """The entries of the model's state_dict that training does not change."""
    frozen = {name for name, parameter in _named(model) if not parameter.requires_grad}
    return {name: value for name, value in model.state_dict().items() if name in frozen}


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The other entries of the state_dict: trained parameters, and all buffers."""
    frozen = frozen_state(model)
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _is_called(known: str, name: str) -> bool:
    """Whether the name selects the parameter `known`: its group, or consecutive parts of its name."""
    if name == _group(known):
        return True
    parts, selected = _parts(known), _parts(name)
    count = len(selected)
    return any(parts[first : first + count] == selected for first in range(len(parts) - count + 1))


def _group(known: str) -> str:
    top = known.split(".", maxsplit=1)[0]
    if top in EMBEDDINGS:
        return "embeddings"
    return next((group for group in ("encoder", "output") if top.startswith(group)), "decoder")


def _groups(model: nn.Module) -> list[str]:
    """The groups of the model's parameters."""
    groups = {_group(known) for known, _ in _named(model)}
    return [group for group in ("embeddings", "encoder", "decoder", "output") if group in groups]


def _parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part != "layers"] or [name]


def _names(model: nn.Module) -> list[str]:
    """All names that select parameters."""
    names = dict.fromkeys(_groups(model))
    for known, _ in _named(model):
        parts = known.split(".")
        names |= dict.fromkeys([".".join(parts[:end]) for end in range(1, len(parts) + 1)])
        names |= dict.fromkeys(parts)
    return list(names)


PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
"""The linear maps of attentions by their names in recipes."""

FEED_FORWARD = ("inner", "gate", "outer")

Places = list[tuple[nn.Module, str, nn.Linear]]
"""Linear layers, each with the module that holds it and its name there."""


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter: x W0^T + b + (alpha / r) (x A^T) B^T."""

    def __init__(self, base: nn.Linear, settings: LoraSettings, generator: torch.Generator) -> None:
        """Weight and bias are shared with `base`, and frozen."""
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.scale = scale_of(settings)
        like = base.weight.detach()
        drawn = torch.randn(settings.rank, base.in_features, generator=generator) * base.in_features**-0.5
        self.lora_a = nn.Parameter(drawn.to(like))
        self.lora_b = nn.Parameter(like.new_zeros(base.out_features, settings.rank))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) to (..., O)."""
        low = nn.functional.linear(nn.functional.linear(x, self.lora_a), self.lora_b)
        return super().forward(x) + low * self.scale

    def merged(self) -> nn.Linear:
        """An equivalent plain layer."""
        linear = nn.Linear(self.in_features, self.out_features, device="meta")
        weight = _merged(self.weight.detach(), self.lora_a.detach(), self.lora_b.detach(), self.scale)
        linear.weight, linear.bias = nn.Parameter(weight, requires_grad=False), self.bias
        return linear


def scale_of(settings: LoraSettings) -> float:
    """alpha / r."""
    return (settings.rank if settings.alpha is None else settings.alpha) / settings.rank


def adapt(model: Network, settings: LoraSettings, seed: int) -> None:
    """Add adapters at the targets, drawn from the seed, and freeze all other parameters.

    Raises: RecipeError if an attention has no such projection, or the model no feed-forward sub-layer.
    """
    places = [place for target in settings.targets for place in _places(model, target)]
    model.requires_grad_(False)
    generator, adapted = torch.Generator().manual_seed(seed), dict[nn.Linear, AdaptedLinear]()
    for holder, name, linear in places:
        if linear not in adapted:
            adapted[linear] = AdaptedLinear(linear, settings, generator)
        setattr(holder, name, adapted[linear])


def merged_weights(weights: Mapping[str, Tensor], settings: LoraSettings) -> dict[str, Tensor]:
    """Convert the state_dict of an adapted model to a plain one: W0 + (alpha / r) B A instead of W0."""
    base = {name: value for name, value in weights.items() if not name.endswith((".lora_a", ".lora_b"))}
    for name, a in weights.items():
        layer, _, last = name.rpartition(".")
        if last == "lora_a" and f"{layer}.weight" in base and f"{layer}.lora_b" in weights:
            weight = base[f"{layer}.weight"]
            base[f"{layer}.weight"] = _merged(weight, a, weights[f"{layer}.lora_b"], scale_of(settings))
    return base


@contextmanager
def merged_in_place(model: nn.Module) -> Iterator[None]:
    """Inside, plain layers replace the adapted ones, with the weights of `merged_weights`."""
    places = [
        (holder, name, child)
        for holder in list(model.modules())
        for name, child in holder.named_children()
        if isinstance(child, AdaptedLinear)
    ]
    merged = {child: child.merged() for child in dict.fromkeys(child for *_, child in places)}
    try:
        for holder, name, child in places:
            setattr(holder, name, merged[child].train(child.training))
        yield
    finally:
        for holder, name, child in places:
            setattr(holder, name, child)


def _merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W0 + scale B A, rounded once."""
    return (weight.double() + scale * (b.double() @ a.double())).to(weight.dtype)


def _places(model: Network, target: str) -> Places:
    if target == "feed_forward":
        places = _held(model, FEED_FORWARD, FeedForward)
        if not places:
            raise RecipeError("training.lora.targets: the rnn has no feed_forward sub-layer; leave it out")
        return places
    names = [name for name, _ in model.attentions()]
    for name, attention in model.attentions():
        inner = any(name.startswith(f"{other}.") for other in names)
        if not inner and not _held(attention, (PROJECTIONS[target],)):
            available = [known for known, linear in PROJECTIONS.items() if _held(attention, (linear,))]
            mechanism = type(attention).__module__.rpartition(".")[2].replace("_", "-")
            raise RecipeError(
                f"training.lora.targets: {mechanism} in the {attention.site.role} role has no {target} projection; "
                f"it has: {', '.join(available) or 'none'}"
            )
    return [place for _, attention in model.attentions() for place in _held(attention, (PROJECTIONS[target],))]


def _held(within: nn.Module, names: tuple[str, ...], holder: type[nn.Module] = nn.Module) -> Places:
    """The linear layers of these names in modules of a kind; a layer that is held twice is listed twice."""
    return [
        (module, name, child)
        for module in within.modules()
        if isinstance(module, holder)
        for name, child in module.named_children()
        if name in names and isinstance(child, nn.Linear)
    ]
