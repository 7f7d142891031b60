"""The searches beam, greedy and sampling, and their shared parts."""

from mtkit.decoding.search.contract import Hypotheses, SourceBatch, begin, restrict, still_running

__all__ = ["Hypotheses", "SourceBatch", "begin", "restrict", "still_running"]
