"""The engine that decodes, by its name or as what is asked for allows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mtkit.decoding.engines.ctranslate2.conversion import why_not
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.lexicon import Lexicon
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run

if TYPE_CHECKING:
    from mtkit.decoding.engines.ctranslate2.engine import CTranslate2Engine

ENGINES = ("auto", "mtkit", "ctranslate2")
"""mtkit decodes whatever it trains; auto is ctranslate2 where that is installed and can do all of it on the CPU."""


def takes_ctranslate2(
    name: str, runs: Sequence[Run], settings: DecodingSettings, dtype: torch.dtype | None, device: torch.device
) -> bool:
    """Whether the engine of that name is CTranslate2 here.

    Raises: MtkitError for an unknown name, and for `ctranslate2` with the first reason why it cannot decode so.
    """
    if name not in ENGINES:
        hint = did_you_mean(name, list(ENGINES))
        raise MtkitError(f"no engine {shown(name)}{hint}; choose one of {', '.join(ENGINES)}")
    if name == "mtkit" or (name == "auto" and device.type != "cpu"):
        return False
    reason = why_not(runs, settings, dtype, device)
    if reason is not None and name == "ctranslate2":
        raise MtkitError(f"--engine ctranslate2 is not possible: {reason}; leave --engine out")
    return reason is None


def on_ctranslate2(
    own: ModelEngine, run: Run, checkpoint: str, *, say: Callable[[str], object]
) -> "tuple[CTranslate2Engine, str]":
    """The engine that decodes with CTranslate2 what `own` would, and its name; converts the model where needed."""
    from ctranslate2 import __version__

    from mtkit.decoding.engines.ctranslate2.conversion import converted
    from mtkit.decoding.engines.ctranslate2.engine import CTranslate2Engine
    from mtkit.decoding.engines.model_engine import networks_of

    (network,) = networks_of(own.model)
    return CTranslate2Engine(own, converted(run, checkpoint, network, say=say)), f"ctranslate2 {__version__}"


def with_lexicon(
    engine: "ModelEngine | CTranslate2Engine", lexicon: Lexicon, name: str, *, say: Callable[[str], object]
) -> "ModelEngine | CTranslate2Engine":
    """The engine, asked for by `name`, restricted to shortlists.

    With separate vocabularies it is mtkit's own, and `say` gets a message if CTranslate2 would have decoded: its map
    lacks the target pieces of names. Raises: MtkitError if `name` is ctranslate2 then.
    """
    if lexicon.separate is None or isinstance(engine, ModelEngine):
        return replace(engine, lexicon=lexicon)
    if name == "ctranslate2":
        raise MtkitError(
            "--engine ctranslate2 cannot copy names with --shortlist and separate vocabularies; leave one out"
        )
    say("with --shortlist and separate vocabularies, mtkit's own search decodes, so that names can be copied")
    return replace(engine.own, lexicon=lexicon)
