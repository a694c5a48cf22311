"""The paths of a run's files (`docs/design.md` §3), and the numbers of its launches."""

import re
from dataclasses import dataclass
from pathlib import Path

LAUNCH_DIR = re.compile(r"\d{4,}")


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of one run below its directory `logs/<run>/`."""

    run_dir: Path

    @property
    def run(self) -> str:
        """Name of the run: the name of its directory."""
        return self.run_dir.name

    @property
    def journal_dir(self) -> Path:
        """The journal: one append-only, hash-chained `<writer>.jsonl` per writer."""
        return self.run_dir / "journal"

    @property
    def ends_path(self) -> Path:
        """The last lines of journal files whose writers have closed them."""
        return self.run_dir / "journal-ends"

    @property
    def heartbeats_dir(self) -> Path:
        """`<host>.json`, rewritten every 30 s by the supervisor on that host."""
        return self.run_dir / "heartbeats"

    @property
    def launches_dir(self) -> Path:
        """One directory per launch, named by its number."""
        return self.run_dir / "launches"

    def launch_dir(self, launch: int) -> Path:
        """Directory of one launch: `launches/0001`."""
        return self.launches_dir / f"{launch:04d}"

    def metrics_path(self, launch: int) -> Path:
        """The per-step log of one launch."""
        return self.launch_dir(launch) / "metrics.jsonl"

    def rank_log(self, launch: int, rank: int) -> Path:
        """What one rank printed."""
        return self.launch_dir(launch) / f"rank-{rank}.log"

    def supervisor_log(self, launch: int) -> Path:
        """All output of the launcher and its ranks, in order of arrival."""
        return self.launch_dir(launch) / "supervisor.log"

    @property
    def observed_dir(self) -> Path:
        """What foreign loaders yielded, per launch and rank: counts and hashed keys."""
        return self.run_dir / "observed"

    @property
    def batches_dir(self) -> Path:
        """Digests of the batches that entered the model, one file per launch and rank."""
        return self.run_dir / "batches"

    @property
    def gradients_dir(self) -> Path:
        """Samples of the first gradient after each save, one file per saved state and rank."""
        return self.run_dir / "gradients"

    @property
    def sequels_dir(self) -> Path:
        """What memory was right before the step after each save, one file per saved state and rank."""
        return self.run_dir / "sequels"

    @property
    def states_dir(self) -> Path:
        """What memory was when a plain loop saved a state, under the digest of that state."""
        return self.run_dir / "states"

    @property
    def objects_dir(self) -> Path:
        """Content-addressed store `<aa>/<sha256>`: originals of edited files, attachments, plans."""
        return self.run_dir / "objects"

    def object_path(self, sha256: str) -> Path:
        """The object with this digest."""
        return self.objects_dir / sha256[:2] / sha256

    @property
    def contract_path(self) -> Path:
        """The contract: what the next launch must find in memory."""
        return self.run_dir / "contract.json"

    @property
    def lock_path(self) -> Path:
        """The lock that commands hold while they change checkpoints, and a launch while it checks that it may start."""
        return self.run_dir / "rollback.lock"

    @property
    def chronicle_md(self) -> Path:
        """The rendered story of the run; generated."""
        return self.run_dir / "CHRONICLE.md"

    @property
    def report_html(self) -> Path:
        """The HTML report."""
        return self.run_dir / "report.html"


def list_launch_numbers(paths: RunPaths) -> list[int]:
    """Return the numbers of the launches that have a directory, in order; an empty list without `launches/`."""
    if not paths.launches_dir.is_dir():
        return []
    return sorted(int(one.name) for one in paths.launches_dir.iterdir() if LAUNCH_DIR.fullmatch(one.name))
