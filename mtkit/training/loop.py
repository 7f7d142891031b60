"""The training loop of one process: update, validate, write checkpoints, and stop."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import monotonic

import numpy as np
from torch import Tensor

from mtkit.data.prepared import Prepared
from mtkit.errors import RunError
from mtkit.evaluation.metrics import missing_tokenizer
from mtkit.memory import OOM_ERRORS, forget_peak, is_oom
from mtkit.model.adaptation import frozen_state, trained_names
from mtkit.model.network import Network
from mtkit.product_rate import arithmetic_of, product_rate
from mtkit.recipe import Recipe
from mtkit.runs import Run
from mtkit.terminal import Say
from mtkit.text.languages import languages_of
from mtkit.training.checkpoint import Checkpoints, read_progress, verified_tensors
from mtkit.training.data_loader import DataLoader, UpdateBatches
from mtkit.training.flops import flops_per_token, training_operations
from mtkit.training.interruption import Interruption
from mtkit.training.limits import ENDLESS, Limits
from mtkit.training.metrics import Interval, Metrics, ProgressLine
from mtkit.training.optimization.schedule import build_schedule
from mtkit.training.precision import Precision, why_not_exact
from mtkit.training.precision_choice import resolve_precision
from mtkit.training.progress import Outcome, Progress
from mtkit.training.run_folder import (
    record,
)
from mtkit.training.update import Updater
from mtkit.training.validation import (
    Validation,
    dry_run_validation,
    scoring_fingerprint,
    validate,
    with_comparable_scores,
)
from mtkit.training.world import World

AGAIN = "the same command resumes it"
"""Advice printed after a signal."""

COUNTED = 20
"""Batches from which segments are taken to count their products."""


class Training:
    """One process's part in the training of one run."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        folder: Path,
        model: Network,
        world: World,
        interruption: Interruption,
        say: Say,
    ) -> None:
        settings = recipe.training
        self.recipe, self.prepared, self.folder = recipe, prepared, folder
        self.model, self.world, self.interruption = model, world, interruption
        self.precision = Precision(settings.precision, world.device)
        self.longest = min(model.longest_source, model.longest_target)
        sides = {"train": prepared.train, "valid": prepared.valid}
        self.too_long = {name: side.too_long(self.longest) for name, side in sides.items()}
        """Segments of each side that are too long for the model: left out of training and of the validation loss."""
        self.data = DataLoader(recipe, prepared, self.longest, world)
        self.schedule = build_schedule(settings, recipe.model.d_model)
        self.progress = Progress(judged_by=scoring_fingerprint(recipe), best_by=settings.best_by)
        self.checkpoints = Checkpoints(
            folder,
            keep_last=max(settings.keep_last, settings.average_last),
            keep_best=settings.keep_best,
            fingerprint=self.progress.judged_by,
            best_by=settings.best_by,
        )
        self.say = say
        # epoch and rows of the updates since the losses were last checked
        self._unchecked: dict[int, tuple[int, list[np.ndarray]]] = {}
        self._warned = False
        if world.first:  # before the model is sharded
            dry_run_validation(model, recipe, prepared)
        self.updater = Updater(model, recipe, world, self.precision, say=self._say_above_bar)

    def run(self) -> Outcome:
        """Train from the last checkpoint, or from the start, until a limit or a signal."""
        self.set_limits()
        self._restore()
        self.introduce()
        begin, earlier = monotonic(), self.progress.seconds
        first = self.progress.update
        self.metrics = Metrics(self.folder, first, validated=self.checkpoints.validated) if self.world.first else None
        self.line = ProgressLine(self.say, update=first, shown=self.world.first)
        self.interval = Interval()
        batches = self.data.updates(self.progress.epoch, self.progress.batch)
        try:
            if self.world.device.type == "cuda" and not self.limits.reached(self.progress):
                self.interval.full_rate = self._full_rate()
                # later batches are no larger, except for the pieces that subword regularisation adds
                self.updater.dry_run(self.data.largest())
            while True:
                signal, seconds = self.world.agree(self.interruption.signal or 0, earlier + monotonic() - begin)
                self.progress = replace(self.progress, seconds=seconds)
                limit = self.limits.reached(self.progress)
                if signal:
                    return self._stop(int(signal), first)
                if self._validation_is_due(limit):
                    with self.interval.paused():
                        self._validate()
                elif limit:
                    return self._finish(limit, first)
                else:
                    self._update(batches)
        finally:
            batches.close()  # ends its thread now, not when an error's frames are freed
            self.line.close()
            if self.metrics is not None:
                self.metrics.close()

    def set_limits(self) -> None:
        """Choose the precision, and compute the limits of the training."""
        self.precision = resolve_precision(self.recipe, self.folder, self.model, self.data, self.world, self.say)
        self.updater.precision = self.precision
        self.limits = Limits(self.recipe.training, self.data.updates_per_epoch, self._flops_per_token())

    def _flops_per_token(self) -> float | None:
        """Return the FLOPs per target token for a limit of FLOPs: as recorded, or counted by the first process."""
        recorded = Run(self.folder).about.get("flops_per_token")
        if self.recipe.training.max_flops is None or recorded is not None:
            return recorded
        self.say("counting the training FLOPs per target token on the CPU")
        (counted,) = self.world.agree(flops_per_token(self.recipe, self.prepared) if self.world.first else 0.0)
        forget_peak()  # reports compare the peak memory of training
        if self.world.first:
            record(self.folder, "flops_per_token", counted)
        self.say(f"{counted:,.0f} training FLOPs per target token")
        return counted

    def _full_rate(self) -> float | None:
        """Return the target tokens per second if all GPUs only multiplied, at the rate measured now.

        Neither products of padding count nor products that the backward pass repeats. None for the rnn, whose
        products in cuDNN cannot be counted, for sharded models, and for models that are trained in part.
        """
        settings, whole = self.recipe.training, all(weight.requires_grad for weight in self.model.parameters())
        sharded = settings.shard and self.world.size > 1
        if sharded or not whole or self.recipe.model.architecture == "rnn":
            return None
        rows = np.concatenate([*islice(self.data.plan(0), COUNTED)])
        try:
            rate = product_rate(arithmetic_of(self.precision.name), self.world.device, ())
            operations = training_operations(self.model, self.data.side(0), rows) * (2 if settings.r_drop else 1)
        except OOM_ERRORS as error:
            if not is_oom(error):
                raise
            return None
        finally:
            forget_peak()  # reports compare the peak memory of training
        return None if rate is None else self.world.size * rate.best / operations

    def _restore(self) -> None:
        """Restore model, optimiser, average and place in training from the last checkpoint, if there is one."""
        if self.world.first:
            self.checkpoints.clean()
        self.world.agree()
        last = self.checkpoints.last()
        if last is not None:
            self.progress = with_comparable_scores(read_progress(last), self.recipe, self.say)
            files = ("model", "optimizer", "ema") if self.updater.average else ("model", "optimizer")
            tensors = {name: verified_tensors(last, name) for name in files}
            if self.checkpoints.base.is_dir():
                tensors["model"] |= verified_tensors(self.checkpoints.base, "model")
            self.updater.restore(self.progress, tensors, last)
        elif (frozen := self.updater.frozen()) and self.world.first:
            self.checkpoints.save_base(frozen)
        most, fewest = self.world.agree(self.progress.update, -self.progress.update)
        if most != -fewest:
            raise RunError(
                f"not all processes find the same checkpoint in {self.folder}; "
                "it must be one folder that all machines share"
            )

    def introduce(self) -> None:
        """Print sizes, precision, limits, and where training starts."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        trained = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        too_long, limit = self.too_long, f"over {self.longest:,} pieces"
        self.say(
            (f"{count:,} parameters" if trained == count else f"{trained:,} of {count:,} parameters trained")
            + f"; {len(self.prepared.train) - too_long['train']:,} training segments in "
            f"{self.data.batches_per_epoch:,} batches"
            + (f" ({too_long['train']:,} left out: {limit})" if too_long["train"] else "")
            + f"; {self.precision.name} on {self.world.device.type}"
            + (f", {self.world.size} processes" if self.world.size > 1 else "")
            + f"; until {self.limits.describe()}"
        )
        if too_long["valid"]:
            self.say(f"{too_long['valid']:,} validation segments are not in the validation loss: {limit}")
        if note := why_not_exact(self.world.device, deterministic=self.recipe.training.deterministic):
            self.say(note)
        languages = [languages_of(direction)[1] for direction in self.prepared.directions]
        if note := missing_tokenizer(languages, self.recipe.scoring.tokenize):
            self.say(f"note: {note}")
        if self.progress.update and not self.limits.reached(self.progress):
            self.say(f"resuming {self.folder} from update {self.progress.update}")

    def _say_above_bar(self, line: str) -> None:
        self.line.say(line)

    def _update(self, batches: Iterator[UpdateBatches]) -> None:
        """Train on the next update's batches."""
        settings, number, begin = self.recipe.training, self.progress.update + 1, monotonic()
        with self.interval.waiting():
            work = next(batches)
        rate = self.schedule(number, self.limits.done(self.progress))
        self.updater.run(work, number, rate=rate, total_updates=self.limits.total_updates(self.progress))
        self.interval.count(work.tokens, work.batches)
        self._unchecked[number] = (self.progress.epoch, work.rows)
        self.progress = self.progress.after_update(work.epoch, work.batch, work.tokens)
        self.line.expect(*self._total_updates())
        self.line.advance()
        if self.world.device.type == "cpu" or number % settings.log_every == 0:
            self._check_losses()
        self.progress = replace(self.progress, training_seconds=self.progress.training_seconds + monotonic() - begin)
        if number % settings.log_every == 0:
            self._log(rate)

    def _check_losses(self) -> None:
        """Raises: RunError if a loss or gradient since the last check is not finite, or if training has diverged."""
        slower = "train with a lower --peak-rate under another --name"
        if failed := self.updater.first_failed():
            lines = self.data.name_lines(*self._unchecked[failed])
            raise RunError(
                f"the loss or its gradient is not finite at update {failed}, which trains on {lines}; "
                f"{self._last_good()}; look at these lines, or {slower}"
            )
        if diverged := self.updater.divergence.describe():
            raise RunError(f"{diverged}; {self._last_good()}; {slower}")
        if self.precision.exhausted:
            raise RunError(
                f"gradients overflow in float16 at every loss scale by update {self.progress.update}; "
                "train with --precision float32, or a lower --peak-rate, under another --name"
            )
        self._unchecked.clear()

    def _last_good(self) -> str:
        good = self.checkpoints.last_good()
        return f"the last good checkpoint is {good}" if good else "there is no good checkpoint"

    def _total_updates(self) -> tuple[int | None, bool]:
        """Return the training's number of updates, None if it is unknown, and whether it is an estimate."""
        total = self.limits.total_updates(self.progress)
        return (None if total == ENDLESS else total), self.limits.is_estimate(total)

    def _log(self, rate: float) -> None:
        """Read the measurements since the last time; show and store them."""
        row = self.interval.read(self.updater.read(), rate)
        left = self.limits.seconds_left(self.progress, self.interval.seconds_per_update)
        self.line.measure(self.progress.update, row, left)
        if self.metrics is not None:
            about = {name: getattr(self.progress, name) for name in ("epoch", "tokens", "seconds")}
            self.metrics.write("train", self.progress.update, **row, **about)

    def _validation_is_due(self, limit: str | None) -> bool:
        update = self.progress.update
        scheduled = update % self.recipe.training.validate_every == 0 or limit is not None
        return update > 0 and scheduled and self.progress.validated != update

    def _validate(self) -> None:
        """Write a checkpoint, validate on all processes, count patience, and add the scores to the checkpoint."""
        self._check_losses()
        with self._saving():
            result = self._validation()
        bleu, nll, score = self.world.agree(*(result.scores if result else (-1.0, -1.0, -1.0)))
        if bleu < 0:  # interrupted: the resumed run validates
            return
        better = self.progress.is_bettered_by(score, nll)
        self.progress = self.progress.after_validation(bleu, nll, score, self.recipe.training.least_improvement)
        if result is not None and self.metrics is not None:
            for line in result.lines(f"update {self.progress.update}", better):
                self.line.say(line)
            if result.doubt and not self._warned:
                self.line.say(f"note: {result.doubt}")
                self._warned = True
            # before the checkpoint: if killed in between, the resumed run drops this line and writes it again
            spent = {name: getattr(self.progress, name) for name in ("tokens", "training_seconds")}
            self.metrics.write("validation", self.progress.update, **result.numbers(), **spent)
            self.metrics.draw()
        self._save()

    def _validation(self) -> Validation | None:
        """Validate the averaged weights if there are any. None after a signal, and on all processes but the first."""
        with self.updater.validation_weights():
            return validate(
                self.model, self.recipe, self.prepared, self.folder, self.precision, self.interruption, self.world
            )

    def _save(self) -> None:
        """Write a checkpoint on the first process; the others wait, because a launcher may end it when they exit."""
        self.progress = self.updater.save_state(self.progress)
        self._write(self.updater.tensors())
        self.world.agree()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """`_save` before the context, or in training on a GPU while the context runs."""
        if not self._writes_meanwhile:
            self._save()
            yield
            return
        self.progress = self.updater.save_state(self.progress)
        files = self.updater.tensors()
        if self.world.first:  # copied here: in the thread, each copy would wait for kernels of the validation
            files = {file: {name: x.cpu() for name, x in of.items()} for file, of in files.items()}
        with ThreadPoolExecutor(1) as writer:
            written = writer.submit(self._write, files)
            try:
                yield
            finally:
                written.result()
        self.world.agree()

    def _write(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        if self.world.first:
            self.checkpoints.save(self.progress, files)

    @property
    def _writes_meanwhile(self) -> bool:
        """Whether checkpoints are written during the validation. On a CPU, both would only compete for it."""
        return self.world.device.type == "cuda"

    def _stop(self, signal: int, first: int) -> Outcome:
        """Stop after a signal: write a checkpoint and print how to resume."""
        if self.progress.update > 0:
            self._check_losses()
            self._save()
        self.line.say(f"stopped at update {self.progress.update}; {AGAIN}")
        return Outcome(self.folder, self.progress, None, self.progress.update - first, signal)

    def _finish(self, limit: str, first: int) -> Outcome:
        """Stop at a limit: average the last checkpoints if the recipe sets it.

        Raises: RunError if the limit is reached before the first update.
        """
        count, update = self.recipe.training.average_last, self.progress.update
        if update == 0:
            raise RunError(f"{limit} was reached before the first update; raise that limit and repeat the command")
        if count > 0 and not self.checkpoints.is_averaged(count):
            averaged = self._average_last(count)
            missing, signal = self.world.agree(self.world.first and not averaged, self.interruption.signal or 0)
            if missing:
                self.line.say(f"stopped before the last checkpoints were averaged; {AGAIN}")
                return Outcome(self.folder, self.progress, None, update - first, int(signal))
        done = "is finished" if update > first else "was finished already"
        self.line.say(f"{self.folder} {done}: {limit} reached; to continue, raise that limit and repeat the command")
        return Outcome(self.folder, self.progress, limit, update - first)

    def _average_last(self, count: int) -> bool:
        """Validate and save the average of the last checkpoints.

        Return whether it was saved, which the first process does unless a signal interrupts the validation.
        """
        weights, updates = self.checkpoints.mean_of_last(count, trained_names(self.model))
        self.updater.average = None  # validate this average instead of the moving one
        self.updater.load({**frozen_state(self.model), **weights}, self.folder)
        result = self._validation()
        if result is None:
            return False
        bleu, nll, score = result.scores
        better = self.progress.is_bettered_by(score, nll)
        saved = self.checkpoints.save_average(weights, updates=updates, bleu=bleu, nll=nll, score=score)
        for line in result.lines(f"average of updates {', '.join(map(str, updates))}", better and saved):
            self.line.say(line)
        if not saved:
            self.line.say("the average of earlier updates is better and stays")
        return True
