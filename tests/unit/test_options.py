"""Unit tests for mpirpc.options: ranges, environment variables, device maps."""

import pytest
import torch

from mpirpc.errors import ConfigurationError
from mpirpc.options import MPIRpcBackendOptions, RpcBackendOptions

WHOLE = {
    "num_worker_threads": (1, 16, 500),
    "eager_limit": (0, 32 * 1024, 1 << 40),
    "chunk_nbytes": (1, 1 << 30, 2**31 - 1),
    "max_unfinished_nbytes": (1, 64 << 20, 1 << 40),
}
"""Least, default, and a large value."""

REAL = {"rpc_timeout": (0, 60.0, 1e9), "spin_time": (0, 2e-3, 10.0), "idle_sleep": (1e-5, 2e-3, 10.0)}
EVERY = WHOLE | REAL


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in EVERY:
        monkeypatch.delenv(f"MPIRPC_{name.upper()}", raising=False)


@pytest.mark.parametrize("name", EVERY)
def test_defaults(name):
    assert getattr(MPIRpcBackendOptions(), name) == EVERY[name][1]


def test_defaults_of_the_rest():
    options = MPIRpcBackendOptions()
    assert (options.init_method, options.comm, options.devices, options.device_maps) == (
        "mpi://",
        None,
        [],
        {},
    )


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("place", [0, 2], ids=["least", "large"])
def test_values_in_range(name, place):
    value = EVERY[name][place]
    assert getattr(MPIRpcBackendOptions(**{name: value}), name) == value


BAD = ["5", [], True, -1, -0.5, float("nan"), object()]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [*BAD, 1.5, 2.0], ids=repr)
def test_bad_whole_numbers(name, value):
    with pytest.raises(ConfigurationError, match=rf"{name}=.* is not a whole number"):
        MPIRpcBackendOptions(**{name: value})


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("value", BAD, ids=repr)
def test_bad_numbers_of_seconds(name, value):
    with pytest.raises(ConfigurationError, match=rf"{name}=.* is not a number of seconds"):
        MPIRpcBackendOptions(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_worker_threads", 0), ("chunk_nbytes", 0), ("chunk_nbytes", 2**31), ("idle_sleep", 0)],
)
def test_just_out_of_range(name, value):
    with pytest.raises(ConfigurationError, match=name):
        MPIRpcBackendOptions(**{name: value})


def test_unknown_option_is_refused():
    with pytest.raises(TypeError, match="num_threads"):
        MPIRpcBackendOptions(num_threads=3)


def test_options_go_by_name_only():
    with pytest.raises(TypeError):
        MPIRpcBackendOptions(16)


# --- environment ---


@pytest.mark.parametrize("name", WHOLE)
def test_environment_sets_whole_numbers(name, monkeypatch):
    monkeypatch.setenv(f"MPIRPC_{name.upper()}", "7")
    assert getattr(MPIRpcBackendOptions(), name) == 7


@pytest.mark.parametrize("name", REAL)
def test_environment_sets_seconds(name, monkeypatch):
    monkeypatch.setenv(f"MPIRPC_{name.upper()}", "0.25")
    assert getattr(MPIRpcBackendOptions(), name) == 0.25


def test_code_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("MPIRPC_EAGER_LIMIT", "7")
    assert MPIRpcBackendOptions(eager_limit=9).eager_limit == 9


@pytest.mark.parametrize("text", ["64k", "", "1.5", "0x10"])
def test_environment_that_is_no_whole_number(text, monkeypatch):
    monkeypatch.setenv("MPIRPC_EAGER_LIMIT", text)
    with pytest.raises(ConfigurationError, match=rf"MPIRPC_EAGER_LIMIT='{text}' is not a number") as caught:
        MPIRpcBackendOptions()
    assert "65536" in caught.value.hint


@pytest.mark.parametrize("text", ["1s", ""])
def test_environment_that_is_no_number(text, monkeypatch):
    monkeypatch.setenv("MPIRPC_RPC_TIMEOUT", text)
    with pytest.raises(ConfigurationError, match=rf"MPIRPC_RPC_TIMEOUT='{text}' is not a number"):
        MPIRpcBackendOptions()


@pytest.mark.parametrize(
    ("name", "text"), [("num_worker_threads", "0"), ("rpc_timeout", "-1"), ("rpc_timeout", "nan")]
)
def test_environment_out_of_range(name, text, monkeypatch):
    monkeypatch.setenv(f"MPIRPC_{name.upper()}", text)
    with pytest.raises(ConfigurationError, match=name):
        MPIRpcBackendOptions()


# --- the base class ---


def test_base_options():
    options = RpcBackendOptions(5, "env://")
    assert (options.rpc_timeout, options.init_method) == (5.0, "env://")


@pytest.mark.parametrize("value", [-1, "5", True, None, float("nan")], ids=repr)
def test_base_options_refuse_what_is_no_time(value):
    with pytest.raises(ConfigurationError, match="is not a time limit"):
        RpcBackendOptions(value)


# --- devices ---


def test_device_maps_become_devices():
    options = MPIRpcBackendOptions(device_maps={"worker1": {"cuda:0": "cuda:1"}}, devices=["cuda:0"])
    assert options.device_maps == {"worker1": {torch.device("cuda:0"): torch.device("cuda:1")}}
    assert options.devices == [torch.device("cuda:0")]


def test_device_map_grows():
    options = MPIRpcBackendOptions(device_maps={"worker1": {"cuda:0": "cuda:1"}})
    options.set_device_map("worker1", {"cuda:1": "cuda:0", "cuda:0": "cuda:1"})
    options.set_device_map("worker2", {"cuda:0": "cuda:1"})
    assert len(options.device_maps["worker1"]) == 2
    options.set_devices(["cuda:3"])
    assert options.devices == [torch.device("cuda:3")]


@pytest.mark.parametrize(
    "more", [{"cuda:0": "cuda:2"}, {"cuda:5": "cuda:1"}], ids=["one to two", "two to one"]
)
def test_device_maps_are_one_to_one(more):
    options = MPIRpcBackendOptions(device_maps={"worker1": {"cuda:0": "cuda:1"}})
    before = dict(options.device_maps["worker1"])
    with pytest.raises(ConfigurationError, match="only supports 1-to-1 mapping"):
        options.set_device_map("worker1", more)
    assert options.device_maps["worker1"] == before


def test_device_map_in_the_constructor_is_checked():
    with pytest.raises(ConfigurationError, match="1-to-1"):
        MPIRpcBackendOptions(device_maps={"worker1": {"cuda:0": "cuda:1", "cuda:2": "cuda:1"}})


@pytest.mark.parametrize(
    "bad", [{"devices": ["nowhere"]}, {"device_maps": {"worker1": {"nowhere": "cuda:0"}}}]
)
def test_devices_that_do_not_exist(bad):
    with pytest.raises(ConfigurationError, match="nowhere"):
        MPIRpcBackendOptions(**bad)


def test_repr_shows_the_settings():
    assert "num_worker_threads=3" in repr(MPIRpcBackendOptions(num_worker_threads=3))
    assert "comm" not in repr(MPIRpcBackendOptions())


@pytest.mark.parametrize("bad", [{"Type": len}, {pytest.Mark: 3}], ids=str)
def test_reducers_are_functions_of_types(bad):
    with pytest.raises(ConfigurationError, match="is no function of a type"):
        MPIRpcBackendOptions(reducers=bad)
    assert MPIRpcBackendOptions(reducers={slice: len}).reducers == {slice: len}
