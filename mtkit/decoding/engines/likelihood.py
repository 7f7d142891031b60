"""The likelihood of given translations under a model, with all pieces in one pass."""

import torch
from torch import Tensor

from mtkit.data.tokenizer import BOS, EOS, PAD
from mtkit.decoding.engines.ensemble import mean_of, networks_of
from mtkit.model.network import Model, Network

ROWS = 1024
"""Positions whose logits over the vocabulary are in memory at the same time, for each batch that is worked on."""


def forced_log_probs(model: Model, source: Tensor, target: Tensor, *, task: Tensor | None = None) -> Tensor:
    """The log-probability of each target, EOS included, given its source: (B,) float32.

    source (B, S) and target (B, T) pieces, EOS at the end, padded on the right; task (B,).
    """
    valid = target != PAD
    log_probs = torch.zeros(target.shape, device=target.device)
    log_probs[valid] = mean_of([_of_network(each, source, target, valid, task) for each in networks_of(model)])
    return log_probs.sum(1)


def _of_network(network: Network, source: Tensor, target: Tensor, valid: Tensor, task: Tensor | None) -> Tensor:
    """The log-probability of each real piece of the targets, (M,), those before it given."""
    begin = torch.full_like(target[:, :1], BOS)
    target_in = torch.cat([begin, target[:, :-1].masked_fill(target[:, :-1] == EOS, PAD)], 1)
    output = network.forward(source, target_in, source_valid=source != PAD, target_valid=valid, task=task)
    parts = zip(output.hidden[valid].split(ROWS), target[valid].split(ROWS), strict=True)
    return torch.cat([_log_probs(network.logits(part), pieces) for part, pieces in parts])


def _log_probs(logits: Tensor, pieces: Tensor) -> Tensor:
    """The log-probabilities (M,) of pieces (M,) under logits (M, V)."""
    logits = logits.float()
    return logits.gather(1, pieces[:, None]).squeeze(1) - logits.logsumexp(1)
