"""M4 for one process: the trainer's own data position, and the batches that really enter the model, of every rank.

After a save the first batch of each rank goes through the process group's store to the main process, which writes
them into the journal: no collective is added to training. At a first step they are gathered and compared by rank.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chronicle.resume.batches import BatchWitness
from chronicle.resume.contract import Expectation
from chronicle.resume.checks.run import check_next_batch
from chronicle.resume.memory import RankDigest
from chronicle.resume.options import Options
from chronicle.resume.checks.check import Check, failed
from chronicle.resume.ruling import Beginning
from chronicle.resume.save import Sealer
from chronicle.resume.journal import Story

__all__ = ["DataWatch"]

NUM_RANKS_RECORDED = 64  # a line of the journal for every save must stay small; beyond, rank 0 alone


class DataWatch:
    """What data this launch begins with, and what followed its saves."""

    def __init__(
        self,
        options: Options,
        story: Story,
        sealer: Sealer,
        begun: Beginning,
        step: Callable[[], int | None],
        first_batch: Callable[[], None],
    ) -> None:
        self._options, self._story, self._sealer, self._begun, self._step = options, story, sealer, begun, step
        self.batches = BatchWitness(self._record, first_batch)
        self._met = False
        self.mid_epoch: bool | None = None  # whether the checkpoint lies inside an epoch, where the adapter can tell

    def loaded(self, data: Any) -> None:
        """The framework has loaded; `data` is the trainer's position now."""
        self._met = self._is_equal(data)

    def check(self, data: Any, first_batches: Mapping[int, str]) -> list[Check]:
        """Right before the first step; `first_batches`: digest of each rank's first one (the main process judges)."""
        checks = [] if self._met or self._is_equal(data) else [self._wrong_position(data)]
        expectation = self._begun.expectation
        if (
            not self.batches.first
            or expectation is None
            or self._sealer.ranks.rank != 0
            or self._may_differ(expectation)
        ):
            return checks
        history = self._story.read()
        step = expectation.memory.step if expectation.memory else None
        key = str(self._begun.loaded_from) if self._begun.loaded_from else f"step {step}"
        followed, starts = history.followed.get(key, {}), history.starts
        for rank, first in sorted(first_batches.items()):
            if rank == 0 or rank in followed:
                checks += check_next_batch(
                    first,
                    followed.get(rank),
                    starts.get(rank, frozenset()),
                    promised=self._options.same_data,
                    mid_epoch=self.mid_epoch,
                    rank=rank,
                )
        return checks

    def gather_first(self) -> dict[int, str]:
        """The first batch of every rank; each rank must call this."""
        ranks = self._sealer.ranks
        if ranks.world_size > NUM_RANKS_RECORDED:
            return {ranks.rank: self.batches.first[0]} if self.batches.first else {}
        reports = ranks.gather({"rank": ranks.rank, "first": list(self.batches.first[:1])})
        return {int(report["rank"]): str(report["first"][0]) for report in reports if report["first"]}

    def _may_differ(self, expectation: Expectation) -> bool:
        return expectation.accepts("data") or (expectation.contract is not None and expectation.contract.moves_data)

    def _is_equal(self, data: Any) -> bool:
        expectation = self._begun.expectation
        if self._options.data_state is None or expectation is None or expectation.memory is None:
            return True
        if expectation.memory.data is None or self._may_differ(expectation):
            return True
        return _plain(expectation.memory.data) == _plain(data)

    def _wrong_position(self, data: Any) -> Check:
        memory = self._begun.expectation.memory if self._begun.expectation else None
        return failed(
            "data position",
            "M4",
            expected=str(memory.data if memory else None)[:160],
            found=str(data)[:160],
            where="data_state()",
            cause="the data position was not restored: samples would be repeated or left out",
        )

    def _record(self, key: str, digests: tuple[str, ...]) -> None:
        """A window is full: the main process writes it down, with the first batch of the other ranks."""
        after = None if key == "start" else key
        if after is None and (self._begun.loaded_from is not None or self._begun.state_loaded):
            return
        step = self._step() if after else self._begun.start_step
        data: dict[str, Any] = {"digests": list(digests)} | ({"after": after} if after else {})

        def write(firsts: Sequence[RankDigest]) -> None:
            others = {str(first.rank): first.data for first in firsts if first.rank != 0}
            known = data | ({"ranks": others} if others else {})
            self._story.write("guard.batches", step=step, title="batches seen", data=known)

        self._sealer.share(f"batches {key}", digests[0], write, at_most=NUM_RANKS_RECORDED)


def _plain(data: Any) -> str:
    return json.dumps(data, sort_keys=True, default=str)
