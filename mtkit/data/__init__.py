"""Text pairs, the built-in corpus, the tokenizer, prepared data on disk, and batches by tokens."""
