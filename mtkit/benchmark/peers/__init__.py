"""Other programs that mtkit is compared with if they are installed; mtkit needs none of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mtkit.errors import MtkitError, did_you_mean, shown

if TYPE_CHECKING:
    from mtkit.benchmark.decoding import Decoder
    from mtkit.benchmark.training import Trainer
    from mtkit.data.prepared import Prepared
    from mtkit.decoding.lexicon import Lexicon
    from mtkit.model.network import Network
    from mtkit.recipe import Recipe
    from mtkit.runs import Run
    from mtkit.terminal import Say
    from mtkit.training.world import World


@dataclass(frozen=True)
class Peer:
    """Another program."""

    package: str
    install: str
    """Command that installs it in the environment of mtkit."""
    decoder: str
    """Module of this folder, and its class that decodes."""
    trainer: str | None = None
    """Module of this folder, and its class that trains; None if the program does not train."""


PEERS = {
    "huggingface": Peer(
        "transformers",
        "pip install transformers",
        "huggingface_decoding.HuggingFaceDecoder",
        "huggingface_training.HuggingFaceTrainer",
    ),
    "ctranslate2": Peer("ctranslate2", "pip install 'mtkit[ctranslate2]'", "ctranslate2.CTranslate2"),
    # the requirements of these would replace packages that mtkit needs
    "joeynmt": Peer(
        "joeynmt",
        "pip install --no-deps joeynmt && pip install tensorboard subword-nmt importlib_metadata",
        "joeynmt.JoeyDecoder",
        "joeynmt.JoeyTrainer",
    ),
    "eole": Peer("eole", "pip install --no-deps eole pyonmttok", "eole.EoleDecoder", "eole.EoleTrainer"),
    "sockeye": Peer("sockeye", "pip install --no-deps sockeye", "sockeye.SockeyeDecoder", "sockeye.SockeyeTrainer"),
}


def check_peers(names: Sequence[str], work: str) -> None:
    """Raise MtkitError for a program that is unknown, not installed, or cannot do the work, "train" or "decode"."""
    able = [name for name, peer in PEERS.items() if work == "decode" or peer.trainer]
    for name in names:
        if name not in PEERS:
            raise MtkitError(f"no program {shown(name)}{did_you_mean(name, list(PEERS))}; there are {', '.join(PEERS)}")
        if name not in able:
            raise MtkitError(f"{name} does not {work}; --beside takes {', '.join(able)} here")
        if find_spec(PEERS[name].package) is None:
            raise MtkitError(f"--beside {name} needs the package {PEERS[name].package}: {PEERS[name].install}")


def peer_trainers(
    names: Sequence[str], recipe: "Recipe", prepared: "Prepared", world: "World", precisions: Sequence[str]
) -> "list[Trainer]":
    """Make trainers of the programs' models, in each of these precisions that a program supports."""
    kinds = [_class(peer.trainer) for name, peer in PEERS.items() if name in names and peer.trainer]
    return [
        kind(recipe, prepared, world, precision)
        for kind in kinds
        for precision in precisions
        if precision in kind.precisions
    ]


def peer_decoders(
    names: Sequence[str],
    run: "Run",
    model: "Network",
    lexicons: "Sequence[Lexicon | None]" = (None,),
    left_out: "Say | None" = None,
) -> "list[Decoder]":
    """Make the programs' decoders in each arithmetic of the model's device, CTranslate2's also with each lexicon.

    `left_out` gets a message for a program that does not support the model; without it, the program is an error.

    Raises: MtkitError for such a program.
    """
    decoders = []
    for name in names:
        kind = _class(PEERS[name].decoder)
        chosen = [(lexicon,) for lexicon in lexicons] if name == "ctranslate2" else [()]
        try:
            decoders += [
                kind(run, model, run.recipe.decoding, arithmetic, *lexicon)
                for arithmetic in kind.arithmetics[model.output_weight.device.type]
                for lexicon in chosen
            ]
        except MtkitError as error:
            if left_out is None:
                raise
            left_out(f"{run.folder} is measured without {name}: {error}")
    return decoders


def _class(path: str) -> Any:
    module, name = path.split(".")
    return getattr(import_module(f"{__name__}.{module}"), name)
