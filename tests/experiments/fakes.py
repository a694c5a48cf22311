"""A launcher without processes: it makes the results that a script of outcomes asks for, in memory and on disk."""

from collections.abc import Callable
from dataclasses import dataclass, field

from chronicle.metrics.log import MetricsWriter
from experiments.design import Leg, StudyPlan, StudyRun
from experiments.errors import StudyError
from experiments.history import Finished
from experiments.paths import StudyPaths
from experiments.result import LegResult

Fate = Callable[[StudyRun, Leg], int | Exception]


@dataclass
class FakeLauncher:
    """`fate` says how a launch ends: an exit code, or what `start` raises. Every start is written down."""

    paths: StudyPaths
    fate: Fate = lambda run, leg: 0
    started: list[tuple[str, int]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    losses: Callable[[str, int], float] = lambda run, update: 100.0 - update

    def start(self, plan: StudyPlan, run: StudyRun, leg: Leg) -> "FakeRunning":
        self.started.append((run.name, leg.number))
        fate = self.fate(run, leg)
        if isinstance(fate, Exception):
            raise fate
        return FakeRunning(self, plan, run, leg, fate)


@dataclass
class FakeRunning:
    launcher: FakeLauncher
    plan: StudyPlan
    run: StudyRun
    leg: Leg
    code: int

    def poll(self) -> int | None:
        return self.code

    def finish(self) -> Finished:
        launch = self.launcher.started.count((self.run.name, self.leg.number)) + 10 * self.leg.number
        path = self.launcher.paths.run(self.run.name).metrics_path(launch)
        with MetricsWriter(path) as metrics:
            for update in range(self.leg.first + 1, self.leg.last + 1):
                values = {"loss": self.launcher.losses(self.run.name, update), "lr": 0.1, "data_digest": update}
                metrics.write(self.plan.profile.start_updates + update, values)
        result = LegResult(plan_hash=self.plan.plan_hash, run=self.run.name, leg=self.leg.number, first=self.leg.first,
                           last=self.leg.last, weights="w", moments="m", average="a", checkpoints=())  # fmt: skip
        return Finished(result=result, launch=launch, guard="passed")

    def explain(self, code: int) -> str:
        return f"ended with code {code}"

    def stop(self) -> None:
        self.launcher.stopped.append(self.run.name)


class NoResult(FakeRunning):
    """A launch that says it is done and left nothing."""

    def finish(self) -> Finished:
        raise StudyError("no usable result")
