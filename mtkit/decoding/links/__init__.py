"""Links between the words of a line and those of its translation."""
