"""The choice of the decoding engine, by its name or by what CTranslate2 supports."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch

from mtkit.decoding.engines.model_engine import ModelEngine, dtype_name, networks_of
from mtkit.decoding.engines.plain import GROUPED, unlike_plain
from mtkit.decoding.lexicon import Lexicon
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.model.build import choose_attention
from mtkit.recipe import DecodingSettings, Recipe
from mtkit.runs import Run
from mtkit.terminal import Say

ENGINES = ("auto", "mtkit", "ctranslate2")
"""mtkit decodes every model it trains; auto is ctranslate2 if it is installed and supports the model on the CPU."""


def uses_ctranslate2(
    name: str, runs: Sequence[Run], settings: DecodingSettings, dtype: torch.dtype | None, device: torch.device
) -> bool:
    """Return whether the engine of that name is CTranslate2 for these runs.

    Raises: MtkitError for an unknown name, and for `ctranslate2` with the first reason why it cannot decode them.
    """
    if name not in ENGINES:
        hint = did_you_mean(name, list(ENGINES))
        raise MtkitError(f"no engine {shown(name)}{hint}; choose one of {', '.join(ENGINES)}")
    if name == "mtkit" or (name == "auto" and device.type != "cpu"):
        return False
    reason = next(reasons_against(runs, settings, dtype, device), None)
    if reason is not None and name == "ctranslate2":
        raise MtkitError(f"--engine ctranslate2 is not possible: {reason}; leave --engine out")
    return reason is None


def reasons_against(
    runs: Sequence[Run], settings: DecodingSettings, dtype: torch.dtype | None, device: torch.device
) -> Iterator[str]:
    """Yield the reasons why CTranslate2 cannot decode these runs, each computed only when it is read."""
    if find_spec("ctranslate2") is None:
        yield "the package is not installed (pip install 'mtkit[ctranslate2]')"
    if len(runs) > 1:
        yield "several runs form an ensemble, and it decodes single models"
    part = unsupported_part(runs[0].recipe)
    if part is not None:
        yield f"its format has no {part}"
    if settings.method == "sample":
        yield "decoding.method = sample: its random numbers are others, and not repeatable"
    if settings.coverage_penalty:
        yield f"decoding.coverage_penalty = {settings.coverage_penalty}: it does not return the penalty itself"
    if settings.no_repeat_ngram:
        yield (
            f"decoding.no_repeat_ngram = {settings.no_repeat_ngram}: "
            "it divides the probability of forbidden pieces among the others"
        )
    import ctranslate2

    if device.type == "cuda" and not ctranslate2.get_cuda_device_count():
        yield "it finds no CUDA device"
    if device.type not in ("cpu", "cuda"):
        yield f"it has no device {device.type}"
    if dtype_name(dtype) not in ctranslate2.get_supported_compute_types(device.type):
        yield f"it has no {dtype_name(dtype)} on this {device.type.upper()}"


def unsupported_part(recipe: Recipe) -> str | None:
    """Return the first part of the model that CTranslate2's format lacks, in a recipe's words; None: it has all."""
    part = unlike_plain(recipe, extra=(*GROUPED, "rotary"))
    if part is None and recipe.model.positions != "none":
        for role, (first, *_) in choose_attention(recipe).items():
            # it ignores the absolute positions of a side whose first layer has rotary ones
            if first.options.get("positions"):
                return f"model.positions {recipe.model.positions} with the rotary positions of {role} attention"
    return part


def make_ctranslate2_engine(own: ModelEngine, run: Run, checkpoint: str, *, say: Say) -> ModelEngine:
    """CTranslate2's engine for the model of mtkit's `own`; converts the model if necessary."""
    from mtkit.decoding.engines.ctranslate2_conversion import converted
    from mtkit.decoding.engines.ctranslate2_engine import CTranslate2Engine

    (network,) = networks_of(own.model)
    return CTranslate2Engine(own.model, own.settings, own.dtype, files=converted(run, checkpoint, network, say=say))


def with_lexicon(engine: ModelEngine, lexicon: Lexicon, name: str, *, say: Say) -> ModelEngine:
    """Return the engine, requested by `name`, restricted to shortlists.

    With separate vocabularies it is mtkit's own, and `say` gets a message if CTranslate2 would have decoded: its map
    lacks the target pieces of names. Raises: MtkitError if `name` is ctranslate2 then.
    """
    if lexicon.separate is not None and engine is not engine.own:
        if name == "ctranslate2":
            raise MtkitError(
                "--engine ctranslate2 cannot copy names with --shortlist and separate vocabularies; leave one out"
            )
        say("with --shortlist and separate vocabularies, mtkit's own search decodes, so that names can be copied")
        engine = engine.own
    return replace(engine, lexicon=lexicon)
