"""Forked processes: several at once, the same translations, and nothing lost when one fails or dies, or all end."""

import gc
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.decoding.contract import SourceBatch, StoppedError
from mtkit.decoding.engines.model_engine import SEARCHES, ModelEngine
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.parallel import Workers
from mtkit.decoding.translate import translate_lines
from mtkit.recipe import DecodingSettings
from tests.decoding.tiny import Encoded, TinyModel, batch_of, random_sources
from tests.decoding.trained import Trained, make_run, sentences

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)  # every test ends with one


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("workers"))


class Counted(Workers):
    """Counts what it was asked, and what it has answered."""

    jobs = answers = 0

    def answer(self, job: Any, stopped: Callable[[], bool] | None = None) -> Any:
        found = super().answer(job, stopped)
        self.jobs, self.answers = self.jobs + 1, self.answers + (found is not None)
        return found


def started(serve: Any, count: int = 2) -> Workers:
    workers = Workers(count)
    workers.start(serve)
    return workers


def is_there(process: int) -> bool:
    """Whether a process runs; one that has ended and was not yet asked for counts as gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_several_work_at_once() -> None:
    def serve(job: float, stopped: Any) -> tuple[int, int]:
        time.sleep(job)
        return os.getpid(), torch.get_num_threads()

    with ThreadPoolExecutor(3) as pool:
        answers = [*pool.map(started(serve, 3).answer, [0.3] * 3)]
    assert len({process for process, _ in answers} - {os.getpid()}) == 3
    assert {threads for _, threads in answers} == {1}


def test_an_interrupt_while_they_are_forked_is_not_lost() -> None:
    due = [signal.SIGINT]

    def interrupt() -> None:
        if due:
            signal.raise_signal(due.pop())

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    os.register_at_fork(before=interrupt)  # an error in it is ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            started(os.getpid)
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_fails_is_left_to_who_asks() -> None:
    def serve(job: int, stopped: Any) -> int:
        if job == 0:
            raise MemoryError
        if job == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    workers = started(serve)
    assert workers.answer(0) is None
    processes = {workers.answer(2), workers.answer(2)}
    assert len(processes) == 2  # the one that failed works on
    assert workers.answer(1) is None
    assert {workers.answer(2), workers.answer(2)} - processes == {None}
    assert workers.answer(1) is None
    assert [workers.answer(2), workers.answer(2)] == [None, None]


def test_a_job_that_is_stopped_ends_and_the_next_one_is_answered() -> None:
    def serve(job: float, stopped: Callable[[], bool]) -> float | None:
        end = time.monotonic() + job
        while time.monotonic() < end:
            if stopped():
                return None
            time.sleep(0.001)
        return job

    workers = started(serve, 1)
    assert workers.answer(0.2, lambda: False) == 0.2
    began = time.monotonic()
    assert workers.answer(60.0, lambda: time.monotonic() > began + 0.2) is None
    assert workers.answer(0.0) == 0.0
    assert workers.answer(0.1, lambda: False) == 0.1


def test_a_batch_that_is_no_longer_wanted_stops_in_its_process(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(model: Any, batch: SourceBatch, settings: DecodingSettings) -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            batch.check()
            time.sleep(0.001)

    monkeypatch.setitem(SEARCHES, "greedy", endless)
    engine = ModelEngine(trained.run.load_model(), DecodingSettings(method="greedy"), workers=Workers(2))
    for _ in range(3):
        until = time.monotonic() + 0.2
        with pytest.raises(StoppedError):
            translate_lines(
                engine,
                trained.run.tokenizers,
                ["a dog", "a cat"],
                stopped=lambda until=until: time.monotonic() > until,  # type: ignore[misc]
            )
        assert time.monotonic() < until + 15


def test_they_end_with_what_holds_them() -> None:
    workers = started(lambda job, stopped: os.getpid(), 3)
    processes = [workers.answer(0) for _ in range(3)]
    assert all(map(is_there, processes))
    del workers
    gc.collect()
    end = time.monotonic() + 20
    while any(map(is_there, processes)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(is_there, processes))


def test_they_are_made_where_that_is_safe_and_pays() -> None:
    found = Workers.where_possible(CPU)
    assert found is not None
    assert found.count == 2
    assert Workers.where_possible(torch.device("cuda")) is None
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(Workers.where_possible, CPU).result() is None
    torch.set_num_threads(1)
    assert Workers.where_possible(CPU) is None


@pytest.mark.parametrize("how", [{"method": "greedy"}, {"beam": 3, "n_best": 3}, {"method": "sample", "n_best": 2}])
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_lines_get_the_same_translations(trained: Trained, how: dict[str, Any], dtype: torch.dtype | None) -> None:
    settings = DecodingSettings.model_validate({**how, "batch_tokens": 60})
    lines, model = [*sentences(30, seed=5), "", "犬 sees\u2028a cat"], trained.run.load_model()
    engine = ModelEngine(model, settings, dtype)
    torch.set_num_threads(1)
    here = translate_lines(engine, trained.run.tokenizers, lines)
    torch.set_num_threads(2)
    workers = Counted(2)
    found = translate_lines(replace(engine, workers=workers), trained.run.tokenizers, lines)
    assert workers.answers > 2  # nothing was left to this process
    assert workers.answers == workers.jobs
    for one, other in zip(here, found, strict=True):
        assert [each.pieces for each in one] == [each.pieces for each in other]
        assert [each.score for each in one] == pytest.approx([each.score for each in other], abs=1e-5)


def test_settings_go_with_each_batch(trained: Trained) -> None:
    engine = ModelEngine(trained.run.load_model(), DecodingSettings(method="greedy"), workers=Workers(2))
    batch = batch_of(random_sources(6, vocabulary=20), 5)
    other = engine.with_settings(DecodingSettings(beam=4, length_penalty=0.3))
    with engine.ready():
        torch.set_num_threads(1)
        for each in (engine, other):
            alone = replace(each, workers=None).translate(batch)
            found = each.translate(batch)
            assert found.pieces.shape == alone.pieces.shape
            torch.testing.assert_close(found.scores, alone.scores)


class Failing(TinyModel):
    """Fails in every process but the first, as where the system has no memory for more."""

    first = os.getpid()

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> Encoded:
        if os.getpid() != self.first:
            raise RuntimeError("out of memory")
        return super().encode(source, source_valid, task=task)


def test_a_batch_that_fails_there_is_computed_here() -> None:
    engine = ModelEngine(Failing(), DecodingSettings(method="greedy"), workers=Workers(2))
    with engine.ready():
        torch.set_num_threads(1)
        batch = batch_of(random_sources(6), 5)
        assert torch.equal(engine.translate(batch).pieces, replace(engine, workers=None).translate(batch).pieces)


def test_a_batch_with_several_threads_is_computed_here() -> None:
    model = TinyModel()
    engine = ModelEngine(model, DecodingSettings(method="greedy"), workers=Workers(2))
    with engine.ready():
        engine.translate(batch_of(random_sources(6), 5))
        assert model.steps
        model.steps.clear()
        torch.set_num_threads(1)
        engine.translate(batch_of(random_sources(6), 5))
        assert not model.steps


def test_one_that_was_not_waited_for_answers_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = started(lambda job: job, 1)

    def interrupted(data: bytes) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mtkit.decoding.parallel.pickle.loads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.answer(1)
    assert workers.answer(2) is None


def test_where_nothing_can_be_forked_all_is_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    assert started(lambda job: job).answer(1) is None


def test_a_shortlist_goes_with_its_batch(trained: Trained) -> None:
    size = trained.run.tokenizers.source.size
    lexicon = Lexicon(torch.arange(2 * size, dtype=torch.int32).view(size, 2) % size, torch.tensor([5, 9]).int())
    workers = Counted(2)
    engine = ModelEngine(trained.run.load_model(), DecodingSettings(beam=3), lexicon=lexicon, workers=workers)
    batch = batch_of([[6, 7], [8]], 6)
    with engine.ready():
        torch.set_num_threads(1)
        found, alone = engine.translate(batch), replace(engine, workers=None).translate(batch)
    assert workers.answers == 1
    assert torch.equal(found.pieces, alone.pieces)
    assert set(found.pieces.flatten().tolist()) <= set(lexicon.shortlist(batch.source).tolist())
