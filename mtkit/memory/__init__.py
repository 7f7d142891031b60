"""The memory of this process: what it holds at most, what it keeps, what is refused, what to do when it is full."""
