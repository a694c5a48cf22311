"""A launcher without processes: it makes the results that a script of outcomes asks for, and the logs of real launches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from chronicle.metrics.log import MetricsWriter
from experiments.design import Leg, StudyPlan, StudyRun
from experiments.errors import StudyError
from experiments.files import LegResult, StudyPaths
from experiments.history import Finished
from experiments.launches import placeholders

Fate = Callable[[StudyRun, Leg], int | Exception]
Values = Callable[[StudyRun, Leg, int], Mapping[str, float]]


@dataclass
class FakeLauncher:
    """`fate` says how a launch ends: an exit code, or what `start` raises. Every start is written down.

    `values` are the metrics of an update, `final` the outcomes of a run; digests follow what a launch is told to read.
    """

    paths: StudyPaths
    fate: Fate = lambda run, leg: 0
    values: Values = lambda run, leg, update: {"loss": 100.0 - update}
    final: Callable[[StudyRun], Mapping[str, float]] = lambda run: {}
    weights: Callable[[StudyRun], str] = lambda run: f"weights of seed {run.seed}"
    started: list[tuple[str, int]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    busy_polls: dict[str, Iterator[int]] = field(default_factory=dict)  # how often a run is found busy

    def is_free(self, run: StudyRun) -> bool:
        return next(self.busy_polls.get(run.name, iter(())), None) is None

    def start(self, plan: StudyPlan, run: StudyRun, leg: Leg) -> "FakeRunning":
        self.started.append((run.name, leg.number))
        fate = self.fate(run, leg)
        if isinstance(fate, Exception):
            raise fate
        return FakeRunning(self, plan, run, leg, fate)

    def digests(self, plan: StudyPlan, run: StudyRun, leg: Leg) -> list[int]:
        """One per update of the leg."""
        order = int(placeholders(plan, run, leg, self.paths, "")["order"])
        return [at + 10_000 * order for part in plan.positions(run, leg) for at in part]


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
        fake, leg = self.launcher, self.leg
        launch = fake.started.count((self.run.name, leg.number)) + 10 * leg.number
        with MetricsWriter(fake.paths.curves_path(self.run.name, launch)) as metrics:
            updates = range(leg.first + 1, leg.last + 1)
            for update, digest in zip(updates, fake.digests(self.plan, self.run, leg), strict=True):
                values = {"lr": 0.1, "data_digest": digest, **fake.values(self.run, leg, update)}
                metrics.write(self.plan.profile.start_updates + update, values)
        final = dict(fake.final(self.run)) if leg is self.run.legs[-1] else {}
        result = LegResult(weights=fake.weights(self.run), moments="m", final=final)
        return Finished(result=result, launch=launch, guard="passed")

    def explain(self, code: int) -> str:
        return f"ended with code {code}"

    def stop(self) -> None:
        self.launcher.stopped.append(self.run.name)


class NoResult(FakeRunning):
    """A launch that says it is done and left nothing."""

    def finish(self) -> Finished:
        raise StudyError("no usable result")
