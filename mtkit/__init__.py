"""mtkit: translation models in which the attention mechanism is a choice."""

__version__ = "0.1.0"
