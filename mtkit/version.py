"""Version of mtkit, in a module that imports nothing, so that every other module can import it."""

__version__ = "0.1.0"
