"""Where tensors live: host memory, or a CUDA device named by the sender's device map.

On the wire a device is one small number: 0 is the host, ``1 + i`` is ``cuda:i`` of the receiver.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mpirpc.errors import SerializationError

HOST = 0

DeviceMap = Mapping[torch.device, torch.device]


def device_code(tensor: torch.Tensor, device_map: DeviceMap | None) -> int:
    """Return the wire's number of the device on which the receiver shall put this tensor.

    Raises:
        SerializationError: The tensor is on a device and no device map says where it should go.
    """
    device = tensor.device
    if device.type == "cpu":
        return HOST
    target = (device_map or {}).get(device)
    if target is None:
        raise SerializationError(
            f"a tensor on {device} has no place at the callee: no device map for it was given",
            "give device_maps={callee: {here: there}} in MPIRpcBackendOptions, or send tensor.cpu()",
        )
    return HOST if target.type == "cpu" else 1 + (target.index or 0)


def device_from_code(code: int) -> torch.device:
    """Return the device that a number of the wire names."""
    return torch.device("cpu") if code == HOST else torch.device("cuda", code - 1)
