"""Unit tests for mpirpc._core.current: whose runtime a thread sees, and that a forked child sees none."""

import os
import threading

import pytest

import mpirpc as rpc
from mpirpc._core import current
from mpirpc.errors import NotInitializedError


@pytest.fixture(autouse=True)
def restore(monkeypatch):
    monkeypatch.setattr(current, "_process", None)
    monkeypatch.setattr(current, "_why_none", current._why_none)
    before = current.set_thread_runtime(None)
    yield
    current.set_thread_runtime(before)


def test_without_a_runtime_the_next_step_is_named():
    assert current.get_current_or_none() is None
    with pytest.raises(
        NotInitializedError, match=r"(?s)RPC has not been initialized.*hint: .*call mpirpc\.init_rpc"
    ):
        current.get_current()


def test_the_reason_may_change():
    current.set_process_runtime(None, "it was shut down")
    with pytest.raises(NotInitializedError, match="hint: it was shut down"):
        current.get_current()


def test_a_threads_runtime_comes_before_that_of_the_process():
    current.set_process_runtime("process")
    assert current.get_current() == "process"
    assert current.set_thread_runtime("thread") is None
    assert (current.get_current(), current.get_current_or_none()) == ("thread", "thread")
    assert current.set_thread_runtime(None) == "thread"
    assert current.get_current() == "process"


def test_other_threads_see_that_of_the_process():
    current.set_process_runtime("process")
    current.set_thread_runtime("mine")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(current.get_current()))
    thread.start()
    thread.join()
    assert seen == ["process"]


def _answer_of_child():
    """What a forked child gets from a call: the error's type and text."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            rpc.rpc_sync("worker0", max, args=(1, 2))
            text = "no error"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_has_no_runtime():
    current.set_process_runtime("process")
    current.set_thread_runtime("thread")
    answer = _answer_of_child()
    assert answer.startswith("NotInitializedError: ")
    assert "was forked from an RPC worker" in answer
    assert current.get_current() == "thread"
