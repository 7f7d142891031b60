"""Training a part of a model: parameters that are frozen, and low-rank adapters."""
