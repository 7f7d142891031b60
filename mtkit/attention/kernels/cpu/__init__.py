"""Loops compiled to machine code, for the CPU: one pass over memory where PyTorch takes a dozen operations.

A decoding step computes little, so most of its time is the overhead of its operations. numba compiles a loop when its
module is first imported, in a second or two, and caches the code on disk. Callers therefore import these modules only
when they need them. A loop releases Python's GIL: batches that are decoded in parallel do not wait for one another.
"""
