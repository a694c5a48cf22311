"""What is left at the end for the CPU: the model in eight and in four bits, beside the one it came from.

One table (bytes, held-out bits per byte, milliseconds a window) and one safetensors file each, outside every directory
that a loader of checkpoints looks into.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from bit_transformer.evaluation.held_out import evaluate
from bit_transformer.model.transformer import BitTransformer, copy_model
from bit_transformer.model.conversion import export_int4, export_int8, weight_bytes

EXPORTS: dict[str, Callable[[BitTransformer], BitTransformer]] = {"int8": export_int8, "int4": export_int4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRow:
    """One form of the model. `bpb` is the mixture's mean; milliseconds are CPU time of one thread, one window a call."""

    name: str
    bytes: int
    bpb: float
    ms_per_window: float
    file: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def export_model(model: BitTransformer, kinds: Sequence[str], held_out: Mapping[str, Tensor], weights: Mapping[str, int],
                 directory: Path | None) -> list[ExportRow]:
    """Export the model in every kind, measure each beside float32 and write it to `directory` (None: measure only)."""
    model = copy_model(model).cpu().eval()
    rows = [_row("float32", model, held_out, weights)]
    for kind in kinds:
        exported = EXPORTS[kind](model)
        path = directory / f"{kind}.safetensors" if directory is not None else None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: value.contiguous() for name, value in exported.state_dict().items()}, path)
        rows.append(_row(kind, exported, held_out, weights, path))
    return rows


def format_table(rows: Iterable[ExportRow]) -> list[str]:
    """Return the table as lines; every column beside float32's."""
    found = list(rows)
    lines = [f"{'export':<8} {'bytes':>12} {'bits/byte':>10} {'against':>8} {'ms/window':>10}"]
    return lines + [f"{row.name:<8} {row.bytes:>12,} {row.bpb:>10.3f} {row.bpb / found[0].bpb - 1:>+8.1%} "
                    f"{row.ms_per_window:>10.2f}" for row in found]


def _row(name: str, model: BitTransformer, held_out: Mapping[str, Tensor], weights: Mapping[str, int],
         path: Path | None = None) -> ExportRow:
    found = evaluate(model, held_out, rank=0, world_size=1)
    bpb = sum(found[source].bpb * weights[source] for source in found) / sum(weights[source] for source in found)
    window_1N = next(iter(held_out.values()))[:1]
    started = time.process_time()
    for _ in range(5):
        evaluate(model, {"window": window_1N}, rank=0, world_size=1)
    return ExportRow(name=name, bytes=weight_bytes(model), bpb=bpb, file=str(path) if path else None,
                     ms_per_window=(time.process_time() - started) / 5 * 1e3)
