"""The public names of mpirpc are exactly these: adding or dropping one is a decision, made here."""

import importlib

import pytest

EXPORTS = {
    "mpirpc": [
        "BackendType",
        "Future",
        "MPIRpcBackendOptions",
        "RRef",
        "RemoteError",
        "RpcBackendOptions",
        "RpcError",
        "RpcTimeoutError",
        "WorkerInfo",
        "all_gather",
        "autograd",
        "backend_registry",
        "barrier",
        "broadcast",
        "debug_info",
        "errors",
        "functions",
        "get_worker_info",
        "get_worker_infos",
        "init_rpc",
        "is_available",
        "nn",
        "on_terminate",
        "optim",
        "profiler",
        "remote",
        "rpc_async",
        "rpc_sync",
        "run_main",
        "shutdown",
        "wait",
        "wait_all",
    ],
    "mpirpc.autograd": ["backward", "context", "get_gradients"],
    "mpirpc.dropin": ["TensorPipeRpcBackendOptions", "export_environment", "install"],
    "mpirpc.launch": [
        "Launcher",
        "find_wrong_start",
        "library_name",
        "on_terminate",
        "read_launcher",
        "run_main",
    ],
    "mpirpc.functions": ["async_execution"],
    "mpirpc.nn": [
        "LoadedKeys",
        "RemoteModule",
        "full_parameters",
        "full_state_dict",
        "load_full_state_dict",
    ],
    "mpirpc.optim": ["DistributedOptimizer"],
    "mpirpc.profiler": ["measure_gil_wait", "profile_served_calls"],
    "mpirpc.pytest_plugin": ["RpcWorld", "rpc_world"],
    "mpirpc.testing": ["FaultyTransport", "LoopbackCluster"],
}


@pytest.mark.parametrize("module_name", sorted(EXPORTS))
def test_public_names(module_name):
    module = importlib.import_module(module_name)
    assert sorted(module.__all__) == EXPORTS[module_name]
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
