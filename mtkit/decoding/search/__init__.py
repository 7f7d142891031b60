"""The searches: beam, greedy and sampling, and what they share."""

from mtkit.decoding.search.contract import Hypotheses, Model, Network, SourceBatch, begin, restrict, still_running

__all__ = ["Hypotheses", "Model", "Network", "SourceBatch", "begin", "restrict", "still_running"]
