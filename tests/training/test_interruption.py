import os
import signal
import threading

import pytest

from mtkit.training.interruption import Interruption


def test_the_first_signal_is_a_wish_and_a_later_one_acts_as_usual(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # the same, once more
        signal.raise_signal(signal.SIGINT)
        assert interruption.signal == signal.SIGINT
        monkeypatch.setattr("mtkit.training.interruption.SAME_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_a_remote_session_is_a_signal_unless_it_is_ignored(
    ignored: bool, request: pytest.FixtureRequest
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGHUP)
        assert interruption.signal == (None if ignored else signal.SIGHUP)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with Interruption() as interruption:
            seen.append((signal.getsignal(signal.SIGTERM), interruption.signal))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None)]
