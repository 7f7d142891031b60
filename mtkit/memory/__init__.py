"""Process memory: peak usage, reuse of freed memory, refusal of oversized models, recovery from out-of-memory."""
