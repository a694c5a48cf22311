"""How ranks exchange what they found: a digest of at most a kilobyte each, gathered only at a load and a first step.

Saves use no collective: a script that saves on the main process alone is healthy today and must stay so. There, every
rank puts its digest into the process group's key-value store and the main process collects what is there.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from chronicle.resume.memory import RankDigest

__all__ = ["Ranks"]

MAX_REPORT_BYTES = 1024


class Ranks:
    """The process group as it is right now; a single process when there is none."""

    def __init__(self) -> None:
        self._saves: dict[str, int] = {}

    @property
    def rank(self) -> int:
        """This process's rank."""
        return int(_group().get_rank()) if _group() else 0

    @property
    def world_size(self) -> int:
        """Number of ranks, as the process group itself says."""
        return int(_group().get_world_size()) if _group() else 1

    def gather(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's report, in rank order; every rank must call this. A report over 1 KB is cut and says so."""
        if self.world_size == 1:
            return [report]
        reports: list[Any] = [None] * self.world_size
        _group().all_gather_object(reports, shorten_report(report))
        return reports

    def publish(self, topic: str, digest: RankDigest) -> str:
        """Leave this rank's digest for the main process; returns the key prefix of this save."""
        count = self._saves[topic] = self._saves.get(topic, 0) + 1
        prefix = f"chronicle/{topic}/{count}"
        store = _store()
        if store is not None and self.world_size > 1:
            store.set(f"{prefix}/{self.rank}", json.dumps(digest.to_json(), separators=(",", ":")))
        return prefix

    def collect(self, prefix: str, own: RankDigest, deadline: Callable[[], float]) -> tuple[RankDigest, ...]:
        """The digests published under `prefix` by all ranks that published before the (monotonic) deadline; own included."""
        digests = {own.rank: own}
        store = _store()
        if store is None:
            return (own,)
        missing = [rank for rank in range(self.world_size) if rank not in digests]
        while missing:
            # `check` returns at once; `wait` would hold the store against the training's own use of it
            for rank in [rank for rank in missing if store.check([f"{prefix}/{rank}"])]:
                digests[rank] = RankDigest.from_json(json.loads(store.get(f"{prefix}/{rank}")))
                store.delete_key(f"{prefix}/{rank}")
                missing.remove(rank)
            if not missing or time.monotonic() > deadline():
                break
            time.sleep(0.005)
        return tuple(digests[rank] for rank in sorted(digests))


def shorten_report(report: dict[str, Any]) -> dict[str, Any]:
    """The report within `MAX_REPORT_BYTES` of JSON: the list `failed` loses its tail first."""
    if _size(report) <= MAX_REPORT_BYTES:
        return report
    failed: Sequence[Any] = report.get("failed", ())
    for count in range(len(failed) - 1, -1, -1):
        shorter = {**report, "failed": list(failed[:count]), "more": len(failed) - count}
        if _size(shorter) <= MAX_REPORT_BYTES:
            return shorter
    return {"rank": report.get("rank"), "failed": [], "more": len(failed)}


def _size(report: dict[str, Any]) -> int:
    return len(json.dumps(report, separators=(",", ":"), default=str).encode())


def _group() -> Any:
    """`torch.distributed` when it is initialised, else None; imports nothing."""
    import sys

    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def _store() -> Any:
    distributed = _group()
    if distributed is None:
        return None
    from torch.distributed import distributed_c10d

    getter = getattr(distributed_c10d, "_get_default_store", None)
    return getter() if getter is not None else None
