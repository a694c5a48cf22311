"""What a guarded launch says of itself at its first step: evidence of each rank, and facts for the preflight's checks.

Any trainer under guard answers with it what only chronicle's own trainer reported: which ranks are really there and on which
devices, how many parameters were counted, wrapper, precision, dataset, LR plan, first batch. Only what was seen is written;
everything else stays unknown. The checks refuse nothing here: they stand in the journal, for `chronicle preflight`.

A trainer that reports itself (`check_before_first_step`, `open_evidence`) is left alone.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chronicle.audit.rank import RankEvidence, count_parameters, describe_device, open_evidence
from chronicle.launch.pulse import PULSES_VARIABLE, PulseWriter
from chronicle.preflight.facts import RankFacts, TrainerFacts
from chronicle.preflight.gate import check_before_first_step
from chronicle.resume.batch_reader import FirstBatch, read_plan
from chronicle.resume.configuration import WRAPPERS, unwrapped
from chronicle.resume.events import BatchEntered, Inputs, Saved, StepBegins
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.learning_rate import forecast_lrs
from chronicle.resume.training import Training

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "no": "fp32", "float32": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
FORMS = {"parquet", "json", "csv", "text", "generator", "arrow", "pandas", "imagefolder", "audiofolder", "webdataset"}


class SelfReport(Observer):
    """The report of one process, and its signs of life. Without `chronicle run` it does nothing."""

    about = "facts of this launch"

    def __init__(self, training: Training) -> None:
        self._training, self._ranks, self._environ = training, training.ranks, training.environ
        self._pulse: PulseWriter | None = None  # from the first step on: what the supervisor sees of this rank
        self._evidence: RankEvidence | None = None
        self._begun = False

    def begin(self, live: LiveState, first_batch: FirstBatch, first: Sequence[str]) -> None:
        """Right before the first optimizer step; every rank must call this.

        `first`: digests of this rank's first batches.
        """
        directory = self._environ.get("CHRONICLE_LAUNCH_DIR")
        if self._begun or not directory:
            return
        self._begun = True
        evidence = open_evidence(self._environ, rank=self._ranks.rank)
        if evidence.path is None or evidence.path.exists():
            return  # the trainer reports itself
        self._evidence = evidence
        about: dict[str, Any] = {}
        try:
            about = self._about(live, first)
        finally:  # the other ranks wait for this one
            reports = self._ranks.gather({"rank": self._ranks.rank, "about": about})
        self._record(evidence, live, about, first_batch.says.precision or precision_of(live))
        if self._ranks.rank == 0 and all(report.get("about") for report in reports):
            ranks = [RankFacts(**report["about"]) for report in reports]
            facts = _facts(live, first_batch, ranks)
            check_before_first_step(facts, environ=self._environ, binds=False)

    def lives(self) -> None:
        """The first step is about to be taken: from now on the supervisor sees this rank."""
        if self._pulse is None and self._environ.get(PULSES_VARIABLE):
            self._pulse = PulseWriter(self._ranks.rank, self._environ)

    def batch_entered(self, event: BatchEntered) -> Rest | None:
        """A forward pass is work that is no step."""
        if self._pulse is None:
            return RESTS
        if event.kind is not Inputs.PART:
            self._pulse.sign()
        return None

    def step_begins(self, event: StepBegins) -> Rest | None:
        """A step is a sign of life."""
        if self._pulse is None:
            return RESTS
        self._pulse.step()
        return None

    def saved(self, event: Saved) -> None:
        """A save is work; and what was read from until then, as far as it has a name."""
        if self._pulse is not None:
            self._pulse.sign()
        if self._evidence is not None and event.memory is not None:
            self._note_data(self._training.observe(), event.memory.step)

    def _note_data(self, live: LiveState, step: int | None) -> None:
        name = dataset_name(live.feed)
        if self._evidence is not None and name is not None and step is not None:
            self._evidence.data(step=step, samples=None, dataset=name)

    def _about(self, live: LiveState, first: Sequence[str]) -> dict[str, Any]:
        """This rank, in the fields of `RankFacts`; {} where the model's device is not known."""
        parameter = next((p for model in live.models for p in model.parameters()), None)
        if parameter is None:
            return {}
        device = describe_device(parameter.device)
        return {
            "rank": self._ranks.rank,
            "host": socket.gethostname().split(".")[0][:60],
            "pid": os.getpid(),
            "device": str(device["id"])[:80],
            "params_local": sum(count_parameters(unwrapped(model)).local for model in live.models),
            "first_batch_digest": first[0] if first else None,
        }

    def _record(self, evidence: RankEvidence, live: LiveState, about: Mapping[str, Any], precision: str | None) -> None:
        parameter = next((p for model in live.models for p in model.parameters()), None)
        if parameter is None:
            return
        evidence.process(
            world_size=self._ranks.world_size,
            device=describe_device(parameter.device),
            wrapper=wrapper_of(live),
            precision=precision,
        )
        counted = _count(live)
        evidence.model(logical=None, counted=counted, local=about.get("params_local") if counted is not None else None)
        self._note_data(live, 0)


def wrapper_of(live: LiveState) -> str | None:
    """The class around the model that is trained, or that made its parameters shards; None where there is none."""
    for model in live.models:
        kinds = [type(model).__name__, *(kind.__name__ for kind in type(model).__mro__)]
        found = next((kind for kind in kinds if kind in WRAPPERS - {"OptimizedModule"} or kind == "FSDPModule"), None)
        if found is not None:
            return found
    sharding = str(live.topology.get("sharding") or "")
    return "DeepSpeedEngine" if sharding.startswith("zero") else None


def precision_of(live: LiveState) -> str | None:
    """bf16, fp16 or fp32 as the framework says it, else the dtype of low-precision weights; None: not known."""
    for key in ("mixed_precision", "precision"):
        said = str(live.topology.get(key) or "")
        if said and said != "no":
            return PRECISIONS.get(said, said)
    dtype = str(live.topology.get("dtype") or "")
    return PRECISIONS.get(dtype) if dtype in ("bfloat16", "float16") or "mixed_precision" in live.topology else None


def dataset_name(loader: Any) -> str | None:
    """The name under which `datasets` knows what is read (`wikitext wikitext-103-raw-v1`); None for a form of files."""
    dataset = getattr(loader, "dataset", None)
    name, config = getattr(dataset, "builder_name", None), getattr(dataset, "config_name", None)
    if not isinstance(name, str) or name in FORMS:
        return None
    return f"{name} {config}" if isinstance(config, str) and config not in ("default", name) else name


def _length(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _count(live: LiveState) -> int | None:
    """Parameters of the whole model, each storage once; None where a sharding does not tell it."""
    sharding = str(live.topology.get("sharding") or "").lower()
    counts = [count_parameters(unwrapped(model)) for model in live.models]
    whole = sum(count.whole for count in counts)
    flat = any("FullyShardedDataParallel" in type(m).__name__ for model in live.models for m in model.modules())
    if flat or ("fsdp" in sharding and whole == sum(count.local for count in counts)):
        return None  # flat shards: this rank's part is all that is seen
    return whole


def _facts(live: LiveState, first_batch: FirstBatch, ranks: list[RankFacts]) -> TrainerFacts:
    plan, told = read_plan(live, first_batch.says), first_batch.told
    dataset = getattr(live.feed, "dataset", None)
    length, masked = _length(live.feed), first_batch.masked_fraction
    return TrainerFacts(
        params_counted=_count(live),
        ranks=tuple(ranks),
        wrapper=wrapper_of(live),
        precision=first_batch.says.precision or precision_of(live),
        dataset=dataset_name(live.feed),
        num_samples=length,
        num_workers=getattr(live.feed, "num_workers", None),
        data_addressable=True if length is not None and hasattr(dataset, "__getitem__") else None,
        pad_fraction=told.get("padding_fraction"),
        masked_fractions=(masked,) if masked is not None else (),
        planned_steps=plan.planned,
        scheduler=type(live.schedulers[0].scheduler).__name__ if live.schedulers else None,
        scheduler_horizon=plan.horizon,
        scheduler_steps_per_update=float(live.schedulers[0].unit) if live.schedulers else None,
        learning_rates=plan.lrs or tuple(_next_lrs(live)),
        accumulation=live.topology.get("accumulation"),
    )


def _next_lrs(live: LiveState) -> Iterator[float]:
    for row in forecast_lrs(live.optimizers, live.schedulers) or ():
        if row and row[0] is not None:
            yield row[0]
