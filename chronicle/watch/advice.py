"""The proposal for what the detector saw, as a journal entry and as one line that names the command to type."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chronicle.journal.reader import read_journal
from chronicle.journal.writer import JournalWriter
from chronicle.metrics.log import Point
from chronicle.paths import RunPaths
from chronicle.watch.facts import collect_candidates, collect_history, find_checkpoint_roots
from rollback.detect import Event
from rollback.propose import Proposal, propose


class Adviser:
    """Knows where the launch is and how fast; asks journal and disk only when something is to be proposed."""

    def __init__(
        self, paths: RunPaths, launch: int, writer: JournalWriter, checkpoints_dir: Path | None, options: tuple[str, ...] = ()
    ) -> None:
        """`options`: what the proposed command needs to find the same run and checkpoints."""
        self._options = options
        self.paths, self.launch = paths, launch
        self._writer, self._checkpoints_dir = writer, checkpoints_dir
        self._recent: deque[tuple[int, float]] = deque(maxlen=64)
        self._last_step = 0
        self._said: set[tuple[int | None, str | None]] = set()
        self.proposal: Proposal | None = None

    def note(self, point: Point) -> None:
        """Remember the newest point; O(1)."""
        self._last_step = point.step
        if point.time is not None:
            self._recent.append((point.step, point.time))

    def advise(self, events: Sequence[Event], trigger: Event) -> str | None:
        """Make, journal and phrase the proposal; None when the same one stands already or none is due."""
        entries = read_journal(self.paths).entries
        history = collect_history(
            entries, run=self.paths.run, launch=self.launch, last_step=self._last_step,
            seconds_per_step=self._seconds_per_step(),
        )  # fmt: skip
        roots = find_checkpoint_roots(entries, self._checkpoints_dir, Path.cwd())
        before = trigger.onset_low_step if trigger.onset_low_step is not None else self._last_step
        candidates = collect_candidates(roots, before=before, entries=entries)
        proposal = propose(events, candidates, replace(history, options=self._options))
        if proposal is None or (proposal.target_step, proposal.command) in self._said:
            return None
        self._said.add((proposal.target_step, proposal.command))
        self.proposal = proposal
        self._writer.append(
            "proposal", step=proposal.target_step, launch=self.launch, title=self.title(proposal),
            data=proposal.to_json(),
        )  # fmt: skip
        return self.phrase(proposal)

    def _seconds_per_step(self) -> float | None:
        if len(self._recent) < 2:
            return None
        (first_step, begin), (last_step, end) = self._recent[0], self._recent[-1]
        return (end - begin) / (last_step - first_step) if last_step > first_step and end > begin else None

    @staticmethod
    def title(proposal: Proposal) -> str:
        if proposal.target_step is None:
            return "no verified checkpoint lies before the onset"
        scale = f", LR ×{proposal.lr_scale:g}" if proposal.lr_scale != 1.0 else ""
        return f"roll back to {proposal.target_step}{scale}"

    @staticmethod
    def phrase(proposal: Proposal) -> str:
        """What a person reads on stderr: the command, or why there is none."""
        if proposal.command is None:
            return f"proposal: {proposal.reasons[-1]}"
        cost = f" (discards {proposal.cost_steps} steps)" if proposal.cost_steps is not None else ""
        return f"to roll back, type: {proposal.command}{cost}"
