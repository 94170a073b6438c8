"""Unit tests for mpirpc._core.error_transfer: exceptions arrive as themselves or as RemoteError."""

import pickle
import threading

import pytest
import torch

from mpirpc import errors
from mpirpc._core.error_transfer import dump_error, load_error
from mpirpc.errors import RemoteError, RemoteTraceback, RpcError, RpcTimeoutError

WORKER = "'worker1' (rank 1)"


class TwoArguments(Exception):
    """Its constructor wants more than it passes on: plain pickling cannot rebuild it."""

    def __init__(self, code, reason):
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason


class KeywordOnly(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class HasLock(ValueError):
    """One attribute can travel, the other cannot."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
        self.number = 5


class LockAsArgument(ValueError):
    pass


class RefusesPickle(Exception):
    def __reduce__(self):
        raise TypeError("never")


class Rebuilt(Exception):
    """Refuses to be made at the receiver."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise RuntimeError("refused")


class NoText(Exception):
    def __str__(self):
        raise ValueError("no text")


class LiesAboutItself(Exception):
    """Comes back as something that is no exception."""

    def __reduce__(self):
        return str, ("not an exception",)


def transfer(error, doing="module.func"):
    body = dump_error(error)
    body.payload = bytes(body.payload)
    return load_error(body, WORKER, doing)


def raised(error):
    """The same exception with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        ValueError("text"),
        KeyError("key"),
        OSError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        StopIteration(3),
        ZeroDivisionError(),
        AssertionError(("a", 1)),
        torch.OutOfMemoryError("gpu"),
    ],
    ids=repr,
)
def test_same_type_same_arguments(error):
    received = transfer(raised(error))
    assert type(received) is type(error)
    assert received.args == error.args
    assert str(received) == str(error)


@pytest.mark.parametrize("error", [TwoArguments(404, "gone"), KeywordOnly(code=404)], ids=repr)
def test_constructor_with_other_arguments(error):
    received = transfer(raised(error))
    assert type(received) is type(error)
    assert (received.code, str(received)) == (404, str(error))
    assert vars(received) == vars(error)


def test_attributes_travel():
    error = ValueError("text")
    error.code, error.tensor = 5, torch.ones(2)
    received = transfer(error)
    assert received.code == 5
    assert received.tensor.tolist() == [1, 1]


def test_attributes_that_cannot_travel_are_left_out():
    received = transfer(raised(HasLock("text")))
    assert type(received) is HasLock
    assert (str(received), received.number) == ("text", 5)
    assert not hasattr(received, "lock")


def test_what_cannot_be_rebuilt_comes_as_remote_error():
    received = transfer(raised(LockAsArgument(threading.Lock())))
    assert type(received) is RemoteError
    assert received.worker == WORKER
    assert received.type_name.endswith(".LockAsArgument")
    assert f"{WORKER} raised {received.type_name}: <unlocked _thread.lock" in str(received)


@pytest.mark.parametrize(
    "error",
    [RefusesPickle("a"), Rebuilt("a"), NoText("a"), LiesAboutItself("a")],
    ids=lambda error: type(error).__name__,
)
def test_hostile_exceptions_are_rebuilt_from_their_parts(error):
    received = transfer(raised(error))
    assert type(received) is type(error)
    assert received.args == ("a",)
    assert type(error).__name__ in received.__cause__.text


def test_text_that_cannot_be_made():
    class LocalNoText(NoText):
        pass

    assert "<a LocalNoText whose text cannot be made>" in str(transfer(LocalNoText()))


def test_local_class_comes_as_remote_error():
    class Local(Exception):
        pass

    received = transfer(raised(Local("text")))
    assert type(received) is RemoteError
    assert received.type_name.endswith("<locals>.Local")
    assert "text" in str(received)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_exceptions_that_would_end_the_caller_come_as_remote_error(error):
    received = transfer(raised(error))
    assert type(received) is RemoteError
    assert received.type_name == f"builtins.{type(error).__name__}"


def test_traceback_of_the_callee_is_the_cause():
    received = transfer(raised(ValueError("text")), doing="module.func")
    assert type(received.__cause__) is RemoteTraceback
    story = str(received.__cause__)
    assert f"on {WORKER} running module.func" in story
    assert "in raised" in story
    assert story.rstrip().endswith("ValueError: text")


def test_chained_causes_are_in_the_story():
    try:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise ValueError("second") from first
    except ValueError as second:
        story = str(transfer(second).__cause__)
    assert story.index("KeyError: 'first'") < story.index("direct cause") < story.index("ValueError: second")


def test_story_grows_with_every_hop():
    first = transfer(raised(ValueError("text")))
    second = load_error(dump_error(raised(first)), "'worker2' (rank 2)", "relay")
    story = str(second.__cause__)
    assert type(second) is ValueError
    assert story.index("on 'worker2' (rank 2) running relay") < story.index(
        f"on {WORKER} running module.func"
    )


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_of_ours_survives(name):
    kind = getattr(errors, name)
    error = kind("what happened")
    received = transfer(raised(error))
    assert type(received) is kind
    assert str(received) == str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_fields_of_our_errors_survive():
    error = RpcTimeoutError("late", "wait", worker=WORKER, timeout=2.5)
    received = transfer(error)
    assert (received.worker, received.timeout, received.hint) == (WORKER, 2.5, "wait")
    assert str(received) == "late\nhint: wait"
    assert isinstance(received, (RpcError, TimeoutError))


def test_loading_does_not_raise():
    body = dump_error(raised(ValueError("text")))
    error = load_error(body, WORKER)
    assert isinstance(error, ValueError)
    assert " running " not in str(error.__cause__).splitlines()[1]
