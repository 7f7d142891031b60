"""The searches beam, greedy and sampling, and their shared parts."""

from mtkit.decoding.search.contract import Hypotheses, SourceBatch, begin, ending, restrict, still_running

__all__ = ["Hypotheses", "SourceBatch", "begin", "ending", "restrict", "still_running"]
