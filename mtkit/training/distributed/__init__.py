"""Several processes that train one model: what they decide together, and who of them still lives."""
