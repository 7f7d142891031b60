"""One page about runs: what they are, how they learned, what they score, and where they look."""
