"""A preview of a training: its first updates, to estimate the time and memory that it needs."""

from contextlib import closing
from dataclasses import replace
from time import monotonic

import torch

from mtkit.memory import in_words, memory_bytes, peak_bytes
from mtkit.training.loop import Training
from mtkit.training.progress import Outcome

PREVIEWED, PREVIEW_SECONDS = 3, 10.0
"""Minimum updates and seconds of a preview."""

SLOW_SECONDS = 60.0
"""Seconds after which a preview ends with the update in progress, even if it is the first."""


ROOM = 0.9
"""Share of a GPU's memory that batches can use; the rest is lost between the blocks that PyTorch allocates."""


def fitting_tokens(tokens: int, held: float, peak: float, memory: float) -> int:
    """Return the tokens of the largest batch that fits in `memory`, if batches of `tokens` reach `peak`.

    `held` is the memory of weights and moments, which does not grow with the batch. All are bytes.
    """
    return int(tokens * (ROOM * memory - held) / max(peak - held, 1.0))


def preview_training(training: Training) -> Outcome:
    """Make the first updates for some seconds, and print the time and memory that the training would take.

    The training is then of no further use.
    """
    training.set_limits()
    training.introduce()
    training.updater.dry_run(training.data.largest())  # later batches need no more memory
    first, begin, stop, signal, device = training.progress, monotonic(), 0, 0, training.world.device
    start = begin
    with closing(training.data.updates(0, 0)) as updates:
        while not stop and not signal and not training.limits.reached(training.progress):
            work, number = next(updates), training.progress.update + 1
            if number == 2:  # libraries are initialised in the first
                first, begin = training.progress, monotonic()
            training.updater.run(work, number, rate=training.schedule(number, 0.0), total_updates=number)
            training.progress = training.progress.after_update(work.epoch, work.batch, work.tokens)
            training.updater.first_failed()  # waits for the device
            seconds = monotonic() - begin
            slow = monotonic() - start >= SLOW_SECONDS
            enough = slow or (number >= PREVIEWED and seconds >= PREVIEW_SECONDS)
            stop, signal = map(int, training.world.agree(enough, training.interruption.signal or 0))
    if made := training.progress.update - first.update:
        tokens = (training.progress.tokens - first.tokens) / seconds
        training.say(
            f"{seconds / made:.3g} s per update and {tokens:,.0f} target tokens/s in {made} updates; "
            f"peak memory {in_words(peak_bytes(device))} of {in_words(memory_bytes(device))}"
        )
        if device.type == "cuda":
            batch_tokens = training.recipe.training.batch_tokens
            computed = min(batch_tokens, training.updater.max_batch_size or batch_tokens)  # at once
            held = torch.cuda.memory_allocated(device)
            fitting = fitting_tokens(computed, held, peak_bytes(device), memory_bytes(device))
            training.say(f"about {fitting:,} tokens per batch fit; training.batch_tokens is {batch_tokens:,}")
        left = training.limits.seconds_left(replace(training.progress, seconds=0.0), seconds / made)
        spent = "no end" if left is None else f"{left / 60:,.1f} minutes"
        training.say(f"estimate until {training.limits.describe()}, without validation and checkpoints: {spent}")
    return Outcome(training.folder, training.progress, None, training.progress.update, signal or None)
