"""A trial of other packages' mechanisms before training: whole sequences and steps of an untrained model.

Training computes whole sequences only. Without a trial, a mistake in the steps shows at the first validation.
"""

import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from mtkit.errors import MtkitError, cut_words
from mtkit.memory import is_oom
from mtkit.model.network import Network
from mtkit.text.tokenizer import EOS

STEPS = 4
ALIKE = 1e-2
"""Difference between logits of steps and of whole sequences, relative to the largest logit, that rounding explains."""


def try_packages(model: Network, packages: Mapping[str, str]) -> None:
    """Decode one batch of the model on the CPU, whose mechanisms of other packages are `packages`, by their names.

    Raises: MtkitError with the packages and the place of the error in their code, if that fails, or if steps compute
    other logits than whole sequences do.
    """
    names = " and ".join(f"attention '{name}' of {package}" for name, package in packages.items())
    is_training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            difference = _difference(model.eval())
    except Exception as error:  # of the package's code
        if isinstance(error, RuntimeError) and is_oom(error):
            raise
        raise MtkitError(
            f"{names} failed in a trial before training ({type(error).__name__}: {cut_words(str(error))}"
            f"{_place(error)}); repair that package"
        ) from error
    finally:
        model.train(is_training)
    if not difference < ALIKE:
        raise MtkitError(
            f"{names}: in a trial before training, step by step decoding does not compute what whole sequences do "
            f"(logits differ by {difference:.2g} of the largest); repair that package"
        )


def _place(error: Exception) -> str:
    """Return the innermost line of the error that is neither mtkit's nor PyTorch's, if there is one."""
    known = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    lines = [line for line in traceback.extract_tb(error.__traceback__) if not line.filename.startswith(known)]
    return f"; {lines[-1].filename}, line {lines[-1].lineno}" if lines else ""


def _difference(model: Network) -> float:
    """The largest difference between logits of whole sequences and of steps, relative to the largest logit.

    A batch has two sources of different lengths; the two hypotheses of each have the same pieces.
    """
    vocabulary = model.target_embedding.tokens.num_embeddings
    pieces = torch.arange(2 * STEPS).reshape(2, STEPS) * 7 % vocabulary
    source = (pieces + 1) % model.source_embedding.tokens.num_embeddings
    source[:, -1] = EOS
    valid = torch.ones_like(source, dtype=torch.bool)
    valid[1, -1] = False
    encoded = model.encode(source, valid, task=torch.zeros(2, dtype=torch.long))
    whole = model.logits(model.decode(encoded, pieces, None).hidden)
    state = model.start(encoded, hypotheses=2)
    steps = []
    for step in range(STEPS):
        logits, state, _ = model.step(pieces[:, step, None].expand(-1, 2), state)
        steps.append(logits.whole()[:, 1])
    return float((torch.stack(steps, 1) - whole).abs().max() / whole.abs().max().clamp(min=1e-9))
