"""The parts of the guard in one process, and who of them hears the events, in this order."""

import atexit
import functools

from chronicle.prints.step_prints import StepPrints
from chronicle.prints.twice import StepTwice
from chronicle.recording import Recording
from chronicle.resume.batch_reader import FirstBatch
from chronicle.resume.data import DataWatch
from chronicle.resume.describe import Describer
from chronicle.resume.envelope import BreachLog, Envelope
from chronicle.resume.envelope.replicas import Replicas
from chronicle.resume.faults import shield
from chronicle.resume.first_gradient import FirstGradient
from chronicle.resume.honours import Honours
from chronicle.resume.hub import Hub
from chronicle.resume.load import Loads
from chronicle.resume.lr_in_use import LrWatch
from chronicle.resume.moving import Moving
from chronicle.resume.records import Records
from chronicle.resume.reference import Reference
from chronicle.resume.save import Sealer
from chronicle.resume.self_report import SelfReport
from chronicle.resume.trained import TrainedWatch
from chronicle.resume.training import Training
from chronicle.resume.unregistered import Unregistered
from chronicle.resume.verdict import Verdicts


class Parts:
    """Everything that records, compares or watches. A new subject is an `Observer` that is made and added here."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.options, self.journal, self.ranks = training.options, training.journal, training.ranks
        self.faults, self.start, self.contained = training.faults, training.start, training.contained
        self.hub = Hub(self.faults)
        rank, paths, record = self.ranks.rank, training.paths, self.faults.record

        self.breaches = BreachLog(training)
        replicas = Replicas(training, self.breaches)
        self.sealer = Sealer(training, replicas)
        self.verdicts = Verdicts(self.ranks, self.journal, self.options, self.start, self.faults)
        self.first_batch = FirstBatch(training)
        self.honours = Honours(self.options.honours)
        self.records = Records(None if paths is None else paths.states_dir, rank)
        self.report = SelfReport(training)
        self.log = Recording(training.environ)

        self.describer = Describer(self)
        self.data = DataWatch(training, self.hub.tell, self._look_for_steps)
        self.batches = self.data.batches
        self.trained = TrainedWatch(training)
        self.unregistered = Unregistered(training)
        self.moving = Moving(training)
        sequels = None if paths is None else paths.sequels_dir
        self.reference = Reference(sequels, rank, self.describer.before_next_step, record)
        self.loads = Loads(training, self.data, self.honours, self.reference, self.moving, self.records)
        self.envelope = Envelope(training, self.breaches, replicas, self.sealer.share)
        self.first_gradient = FirstGradient(training, self.breaches, self.data)
        self.lrs = LrWatch(self.reference.options, self.honours, self.breaches)
        self.twice = StepTwice(training, self.batches.unheard)
        self.prints = StepPrints(training)
        for part in (
            self.report,
            self.data,
            self.trained,
            self.unregistered,
            self.reference,
            self.describer,
            self.moving,
            self.first_gradient,
            self.prints,
            self.loads,
            self.first_batch,
            self.twice,
            self.lrs,
            self.envelope,
            self.breaches,
        ):
            self.hub.add(part)
        atexit.register(shield(self.unregistered.settle, functools.partial(record, "exit")))

    def _look_for_steps(self, surely: bool = False) -> None:
        """Whether steps are taken that nobody sees: the session knows."""
