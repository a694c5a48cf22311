"""Counting parameters and naming devices, for any torch module, without importing torch.

Works on what a module offers (`parameters()`, storages, `ds_numel`), so the interface stays importable on a laptop.
Tied weights share one storage and count once; a ZeRO-3 parameter shows no elements of its own and says its size in
`ds_numel` (transformers#22193: 0 counted).
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["ParameterCounts", "count_parameters", "describe_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """`local`: elements this process holds. `whole`: what they stand for where shards say it, else the same."""

    local: int
    whole: int
    trainable: int
    by_module: tuple[tuple[str, int], ...]


def count_parameters(model: Any) -> ParameterCounts:
    """Count a module's parameters, each storage once. `by_module` has the top-level children in order."""
    seen: dict[Any, str] = {}
    local = whole = trainable = 0
    by_module: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        key = _storage_key(parameter)
        if key in seen:
            continue
        seen[key] = name
        held = int(_local_of(parameter).numel())
        full = int(getattr(parameter, "ds_numel", 0) or parameter.numel())
        local += held
        whole += full
        trainable += full if parameter.requires_grad else 0
        top = name.partition(".")[0]
        by_module[top] = by_module.get(top, 0) + full
    return ParameterCounts(local=local, whole=whole, trainable=trainable, by_module=tuple(by_module.items()))


def describe_device(device: Any) -> dict[str, Any]:
    """What a device is, so that two ranks on one device look the same and two devices never do.

    CUDA: the UUID. CPU: host and pid, because every rank is its own process there.
    """
    kind = str(getattr(device, "type", device)).partition(":")[0]
    host = socket.gethostname().split(".")[0]
    torch = sys.modules.get("torch")
    if kind != "cuda" or torch is None:
        return {"kind": kind, "id": f"{host}/{os.getpid()}", "host": host}
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", "")) or f"{host}/{getattr(device, 'index', None)}"
    return {"kind": "cuda", "id": uuid, "host": host, "name": properties.name, "memory_bytes": properties.total_memory}


def _local_of(parameter: Any) -> Any:
    """A DTensor's own part; everything else is itself."""
    part = getattr(parameter, "_local_tensor", None)
    return parameter if part is None else part


def _storage_key(parameter: Any) -> Any:
    """Same storage and same place in it: a tied weight. Tensors without memory (meta device) are themselves."""
    tensor = _local_of(parameter)
    try:
        pointer = tensor.untyped_storage().data_ptr()
    except (AttributeError, RuntimeError, NotImplementedError):
        pointer = 0
    if not pointer:
        return id(parameter)
    return pointer, tensor.storage_offset(), tuple(tensor.shape)
