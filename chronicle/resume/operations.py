"""The operations of one step, for `chronicle replay --ops`: a digest of what each module gave, and of each gradient.

Only a replay has them (`CHRONICLE_OPS` names the step): every module's output is read as a whole, which costs more than the
step. Two replays from one checkpoint that disagree are told apart by the first of them that differs.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chronicle.resume.batches import leaves_of
from chronicle.resume.fingerprint import own_shard

__all__ = ["OPS_VARIABLE", "StepOperations", "first_difference", "read_operations"]

OPS_VARIABLE = "CHRONICLE_OPS"
Row = tuple[str, str, str]  # forward or gradient, name, digest


class StepOperations:
    """Collects what modules give since the step before, and writes it when the step that was asked for is taken."""

    def __init__(self, launch_dir: Path | None, environ: Mapping[str, str] = os.environ) -> None:
        asked = environ.get(OPS_VARIABLE, "")
        self._step = int(asked) if asked.isdecimal() and launch_dir is not None else None
        self._launch_dir = launch_dir
        self._outputs: list[tuple[Any, str]] = []
        self._hook: Any = None
        if self._step is not None:
            self._hook = sys.modules["torch"].nn.modules.module.register_module_forward_hook(self._forward)

    def stepping(self, step: int, rank: int, models: Sequence[Any], params: Sequence[Any]) -> None:
        """This step is about to be taken: its gradients are complete."""
        if self._step is None or self._launch_dir is None:
            return
        outputs, self._outputs = self._outputs, []
        if step != self._step:
            return
        self.end()
        modules = {id(module): name for model in models for name, module in model.named_modules()}
        names = {id(param): name for model in models for name, param in model.named_parameters()}
        rows: list[Row] = []
        for module, digest in outputs:
            kind = type(module).__name__
            name = modules.get(id(module), "")
            rows.append(("forward", f"`{name}` ({kind})" if name else kind, digest))
        for place, param in reversed(list(enumerate(params))):  # the last layer's gradient is the first
            if param.grad is not None:
                rows.append(("gradient", f"`{names.get(id(param), f'parameter {place}')}`", _digest(param.grad)))
        path = self._launch_dir / f"operations-{rank}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def end(self) -> None:
        """Collect no more."""
        self._step = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _forward(self, module: Any, inputs: Any, output: Any) -> None:
        self._outputs.append((module, "".join(_digest(thing) for thing in leaves_of(output) if hasattr(thing, "detach"))))


def _digest(tensor: Any) -> str:
    """Of all bytes of a tensor."""
    torch = sys.modules["torch"]
    own = own_shard(tensor).detach()
    if own.is_sparse or own.is_meta:
        return "-"
    raw = own.contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest()


def read_operations(launch_dir: Path) -> dict[int, list[Row]]:
    """By rank: the operations of the step that was asked for."""
    found = {}
    for path in sorted(launch_dir.glob("operations-*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[int(path.stem.rpartition("-")[2])] = [(str(a), str(b), str(c)) for a, b, c in rows]
    return found


def first_difference(one: Mapping[int, Sequence[Row]], other: Mapping[int, Sequence[Row]]) -> str:
    """The first operation that differs, in words; "" where all that both have are equal, or nothing could be compared."""
    found = []
    for rank in sorted(set(one) & set(other)):
        for place, (a, b) in enumerate(zip(one[rank], other[rank], strict=False)):
            if a[:2] != b[:2]:
                found.append((place, f"rank {rank} took {a[0]} of {a[1]} in one replay and {b[0]} of {b[1]} in the other"))
                break
            if a[2] != b[2]:
                found.append((place, f"the {a[0]} of {a[1]}, operation {place + 1} of {len(one[rank])} on rank {rank}"))
                break
    return min(found)[1] if found else ""
