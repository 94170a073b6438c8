"""Unit tests for mpirpc.functions: the mark is found on every kind of function, behaviour stays."""

import pickle

import pytest

from mpirpc.functions import async_execution, is_async_execution


@async_execution
def marked(x, y=1):
    """Add."""
    return x + y


def plain(x):
    return x


class Methods:
    @async_execution
    def bound(self, x):
        return x

    @staticmethod
    @async_execution
    def static_outside(x):
        return x

    @async_execution
    @staticmethod
    def static_inside(x):
        return x

    @classmethod
    @async_execution
    def class_outside(cls, x):
        return x

    @async_execution
    @classmethod
    def class_inside(cls, x):
        return x

    def plain(self, x):
        return x

    @async_execution
    def __call__(self, x):
        return x


class Child(Methods):
    def bound(self, x):
        return x


KINDS = [
    marked,
    Methods.bound,
    Methods().bound,
    Methods.static_outside,
    Methods().static_outside,
    Methods.static_inside,
    Methods.class_outside,
    Methods().class_outside,
    Methods.class_inside,
    Methods().class_inside,
    Methods().__call__,
    Child.class_inside,
]


@pytest.mark.parametrize("func", KINDS, ids=lambda func: func.__qualname__)
def test_marked(func):
    assert is_async_execution(func)


@pytest.mark.parametrize("func", KINDS[3:10], ids=lambda func: func.__qualname__)
def test_static_and_class_methods_still_work(func):
    assert func(5) == 5


@pytest.mark.parametrize("func", [plain, Methods().plain, max, Methods, Child().bound, print, 3], ids=repr)
def test_not_marked(func):
    assert not is_async_execution(func)


def test_function_stays_what_it_was():
    assert marked(1) == 2
    assert marked(1, y=2) == 3
    assert (marked.__name__, marked.__doc__) == ("marked", "Add.")
    assert pickle.loads(pickle.dumps(marked)) is marked


def test_the_original_function_is_not_marked():
    async_execution(plain)
    assert not is_async_execution(plain)


def test_mark_must_be_true():
    def lookalike():
        pass

    lookalike._mpirpc_async_execution = "yes"
    assert not is_async_execution(lookalike)
