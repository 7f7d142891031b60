"""Hugging Face's Marian: configuration, vocabulary and weights, in both directions."""
