"""The state of a training between updates: its place, and whether its loss has diverged."""
