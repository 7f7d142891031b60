"""Parameters that are not trained: chosen by name, and told apart from the others in what is saved."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from mtkit.errors import RecipeError, did_you_mean, shown
from mtkit.model.adaptation.lora import adapt
from mtkit.model.network import Network
from mtkit.recipe import TrainingSettings

EMBEDDINGS = ("source_embedding", "target_embedding")


def train_in_part(model: Network, settings: TrainingSettings, seed: int) -> None:
    """Freeze what the settings name, or all but the adapters that they ask for, drawn from the seed.

    Raises: RecipeError for what the model does not have, and where nothing is left to train.
    """
    if settings.lora is None:
        freeze(model, settings.freeze)
    else:
        adapt(model, settings.lora, seed)


def freeze(model: Network, names: Sequence[str]) -> None:
    """Take the gradient from the parameters of these names.

    A name is a group (embeddings, encoder, decoder, or output where it has its own parameters), a module (decoder.0,
    decoder.layers.0), or a part wherever it occurs (feed_forward, cross_attention.q_proj, bias).

    Raises: RecipeError for a name that no parameter has, and where nothing is left to train.
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
    """The names of the trained parameters, of one that is shared all its names."""
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
    """Whether the name stands for the parameter `known`: for its group, or for neighbouring parts of its own name."""
    if name == _group(known):
        return True
    parts, wanted = _parts(known), _parts(name)
    return any(parts[first : first + len(wanted)] == wanted for first in range(len(parts) - len(wanted) + 1))


def _group(known: str) -> str:
    top = known.split(".", maxsplit=1)[0]
    if top in EMBEDDINGS:
        return "embeddings"
    return next((group for group in ("encoder", "output") if top.startswith(group)), "decoder")


def _groups(model: nn.Module) -> list[str]:
    """The groups that the model has parameters of."""
    there = {_group(known) for known, _ in _named(model)}
    return [group for group in ("embeddings", "encoder", "decoder", "output") if group in there]


def _parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part != "layers"] or [name]


def _names(model: nn.Module) -> list[str]:
    """What parameters can be called."""
    names = dict.fromkeys(_groups(model))
    for known, _ in _named(model):
        parts = known.split(".")
        names |= dict.fromkeys([".".join(parts[:end]) for end in range(1, len(parts) + 1)])
        names |= dict.fromkeys(parts)
    return list(names)
