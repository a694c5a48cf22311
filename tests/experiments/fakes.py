"""A launcher without processes: it makes the results that a script of outcomes asks for, and the logs of real launches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from chronicle.metrics.log import MetricsWriter
from experiments.design import Leg, StudyRun
from experiments.errors import StudyError
from experiments.files import LegResult, StudyPaths
from experiments.launches import LegLaunch

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

    def start(self, launch: LegLaunch) -> "FakeRunning":
        self.started.append((launch.run.name, launch.leg.number))
        fate = self.fate(launch.run, launch.leg)
        if isinstance(fate, Exception):
            raise fate
        return FakeRunning(self, launch, fate)

    def digests(self, launch: LegLaunch) -> list[int]:
        """One per update of the leg."""
        order = int(launch.placeholders("")["order"])
        return [at + 10_000 * order for part in launch.plan.positions(launch.run, launch.leg) for at in part]


@dataclass
class FakeRunning:
    launcher: FakeLauncher
    launch: LegLaunch
    code: int

    def poll(self) -> int | None:
        return self.code

    def finish(self) -> LegResult:
        fake, run, leg = self.launcher, self.launch.run, self.launch.leg
        number = fake.started.count((run.name, leg.number)) + 10 * leg.number
        trainer = self.launch.plan.study.trainer
        called = {"loss": trainer.loss, "eval/mixture": trainer.outcome}  # by the trainer
        with MetricsWriter(fake.paths.curves_path(run.name, number)) as metrics:
            updates = range(leg.first + 1, leg.last + 1)
            for update, digest in zip(updates, fake.digests(self.launch), strict=True):
                values = {"lr": 0.1, "data_digest": digest, **fake.values(run, leg, update)}
                step = self.launch.plan.profile.start_updates + update
                metrics.write(step, {called.get(name, name): value for name, value in values.items()})
        final = dict(fake.final(run)) if self.launch.is_last else {}
        return LegResult(weights=fake.weights(run), moments="m", final=final, launch=number, guard="passed")

    def explain(self, code: int) -> str:
        return f"ended with code {code}"

    def stop(self) -> None:
        self.launcher.stopped.append(self.launch.run.name)


class NoResult(FakeRunning):
    """A launch that says it is done and left nothing."""

    def finish(self) -> LegResult:
        raise StudyError("no usable result")
