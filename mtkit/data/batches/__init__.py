"""Batches by padded tokens: a plan of an epoch that is a pure function of its seed, and a thread that makes ahead."""

from mtkit.data.batches.batch import Batch, blank_batch, make_batch, prefetched
from mtkit.data.batches.epoch import EpochPart, EpochPlan, plan, plan_epoch

__all__ = ["Batch", "EpochPart", "EpochPlan", "blank_batch", "make_batch", "plan", "plan_epoch", "prefetched"]
