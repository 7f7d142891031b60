"""Loops compiled to machine code, for the CPU: one pass over memory where PyTorch takes a dozen operations.

A step of decoding computes little, so that most of its time goes to the number of its operations. numba compiles a loop
when its module is imported for the first time, in a second or two, and keeps the code on disk. Callers therefore import
these modules where they need them. Python's lock is not held while a loop runs: batches that are decoded side by side
do not wait for one another.
"""
