"""SUPPORTED, CONTRADICTED or UNSUPPORTED: each statement of a claim held against what the ranks recorded. Pure.

Nothing recorded means UNSUPPORTED, never false: "no results file, so it never ran" was wrong (seed 001). All launches of
the lineage must agree; one that contradicts is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from chronicle.audit.evidence import LaunchEvidence, Observation, RunEvidence
from chronicle.audit.evidence_statements import GPU_NAMES, Kind, Statement, parse_claim

__all__ = ["Judgement", "Verdict", "judge_claim"]

IDLE_BELOW = 0.05  # a device that was busy less than this between two samples was idle
IDLE_SHARE = 0.9
KNOWN_BYTES = {"wikitext103": 540_000_000, "enwik8": 100_000_000, "text8": 100_000_000, "thepile": 825_000_000_000}
CORPUS_FRACTION = 0.01
FEW_SAMPLES = 1000  # no corpus of that name is as small (seed 000: five)
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "no": "fp32"}
WRAPPERS = {
    "fsdp": ("fullyshardeddataparallel", "fsdp", "fsdp2", "fsdpmodule"),
    "fsdp2": ("fsdp2", "fsdpmodule", "fullyshardeddataparallel"),
    "deepspeed": ("deepspeedengine", "deepspeed"),
    "ddp": ("distributeddataparallel", "ddp"),
    "distributeddataparallel": ("distributeddataparallel", "ddp"),
    "dataparallel": ("dataparallel",),
}


class Verdict(Enum):
    """`UNSUPPORTED`: nobody recorded anything that could tell."""

    SUPPORTED = "SUPPORTED"
    CONTRADICTED = "CONTRADICTED"
    UNSUPPORTED = "UNSUPPORTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The answer to one statement, with the evidence it rests on."""

    statement: Statement
    verdict: Verdict
    message: str
    evidence: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For the journal and `--json`."""
        return {
            "statement": self.statement.text,
            "kind": self.statement.kind.value,
            "verdict": self.verdict.value,
            "message": self.message,
            "evidence": list(self.evidence),
        }


def judge_claim(sentence: str, evidence: RunEvidence) -> tuple[Judgement, ...]:
    """One judgement per statement; a sentence without any statement gives none."""
    return tuple(_judge(statement, evidence) for statement in parse_claim(sentence))


def _judge(statement: Statement, evidence: RunEvidence) -> Judgement:
    if statement.kind is Kind.INTENT:
        return _answer(statement, Verdict.UNSUPPORTED, "a plan or a target is not an event")
    if statement.kind is Kind.DENIAL:
        return _answer(statement, Verdict.UNSUPPORTED, "records show what was done, not what was not; say what was done")
    if statement.kind is Kind.OTHER:
        return _answer(statement, Verdict.UNSUPPORTED, "nothing that is recorded can answer this number")
    if statement.kind is Kind.DURATION:
        return _judge_duration(statement, evidence)
    if statement.kind in (Kind.STEPS, Kind.TRAINED):
        return _judge_steps(statement, evidence)
    if statement.kind is Kind.LOSS:
        return _judge_loss(statement, evidence)
    if statement.kind in (Kind.TOKENS, Kind.SAMPLES, Kind.BYTES):
        return _judge_volume(statement, evidence)
    per_launch = JUDGES[statement.kind]
    answers = [per_launch(statement, launch) for launch in evidence.scope]
    for verdict in (Verdict.CONTRADICTED, Verdict.SUPPORTED):
        chosen = next((one for one in answers if one.verdict is verdict), None)
        if chosen is not None:
            return chosen
    missing = answers[0].message if answers else "no launch of this run left evidence"
    return _answer(statement, Verdict.UNSUPPORTED, missing)


def _judge_parameters(statement: Statement, launch: LaunchEvidence) -> Judgement:
    models = launch.newest("model")
    whole = next((one for one in models.values() if _whole(one) is not None), None)
    if whole is None:
        return _answer(statement, Verdict.UNSUPPORTED, "no rank recorded a parameter count")
    count = _whole(whole)
    assert count is not None
    if statement.admits(count):
        return _answer(statement, Verdict.SUPPORTED, f"counted {count:,} in launch {launch.launch}", whole)
    message = f"counted {count:,} in launch {launch.launch}"
    message += _share_of(statement, count, len(models)) or _difference(statement, count)
    return _answer(statement, Verdict.CONTRADICTED, message, whole)


def _whole(one: Observation) -> int | None:
    """The model's own size: counted before wrapping, or by formula; a rank's own part is not it."""
    value = one.fields.get("counted")
    value = one.fields.get("logical") if value is None else value
    return value if isinstance(value, int) else None


def _share_of(statement: Statement, count: int, ranks: int) -> str:
    for size in sorted({ranks, 2, 4, 8, 16, 32, 64} - {0, 1}):
        if statement.admits(math.ceil(count / size)):
            return f"; the claim is 1/{size} of it: what one rank holds after sharding"
    return ""


def _difference(statement: Statement, count: float) -> str:
    assert statement.low is not None
    middle = statement.low if statement.high in (None, math.inf) else (statement.low + (statement.high or 0)) / 2
    return f" ({(count - middle) / middle:+.1%})" if middle else ""


def _judge_devices(statement: Statement, launch: LaunchEvidence) -> Judgement:
    processes = launch.newest("process")
    devices = {str(_device(one).get("id")): one for one in processes.values() if _device(one).get("id")}
    if not devices:
        return _answer(statement, Verdict.UNSUPPORTED, "no rank recorded its device")
    kinds = {str(_device(one).get("kind")) for one in devices.values()}
    refs = tuple(processes[rank] for rank in sorted(processes))
    found = f"{len(processes)} ranks on {len(devices)} distinct devices ({', '.join(sorted(kinds))})"
    if re.search(r"GPU|TPU|[A-Z]\d{2,3}", statement.text) and kinds == {"cpu"}:
        return _answer(statement, Verdict.CONTRADICTED, f"launch {launch.launch}: {found}, no GPU", *refs)
    named = re.search(GPU_NAMES, statement.text)
    names = {str(_device(one).get("name")) for one in processes.values() if _device(one).get("name")}
    if named and names and not any(named.group() in name.replace("-", " ").split() for name in names):
        return _answer(statement, Verdict.CONTRADICTED, f"launch {launch.launch}: {found}: {_join(names)}", *refs)
    idle = _idle_ranks(launch)
    if idle:
        found += f", idle in more than {IDLE_SHARE:.0%} of the samples: rank {', '.join(map(str, sorted(idle)))}"
    working = len(devices) - len(idle)
    verdict = Verdict.SUPPORTED if statement.admits(working) else Verdict.CONTRADICTED
    return _answer(statement, verdict, f"launch {launch.launch}: {found}", *refs)


def _device(one: Observation) -> Mapping[str, Any]:
    device = one.fields.get("device")
    return device if isinstance(device, Mapping) else {}


def _idle_ranks(launch: LaunchEvidence) -> dict[int, float]:
    """Ranks whose device was idle in nearly every sample, with that share; samples name a rank or a device."""
    rank_by_device = {str(_device(one).get("id")): rank for rank, one in launch.newest("process").items()}
    samples: dict[int, list[float]] = {}
    for one in launch.of_kind("device"):
        rank = one.rank if one.rank >= 0 else rank_by_device.get(str(one.fields.get("device")))
        if rank is not None and isinstance(one.fields.get("busy_fraction"), int | float):
            samples.setdefault(rank, []).append(float(one.fields["busy_fraction"]))
    shares = {rank: sum(value < IDLE_BELOW for value in values) / len(values) for rank, values in samples.items()}
    return {rank: share for rank, share in shares.items() if share > IDLE_SHARE}


def _judge_ranks(statement: Statement, launch: LaunchEvidence) -> Judgement:
    processes = launch.newest("process")
    if not processes:
        return _answer(statement, Verdict.UNSUPPORTED, "no rank recorded itself")
    sizes = {one.fields.get("world_size") for one in processes.values()}
    message = f"launch {launch.launch}: {len(processes)} ranks recorded themselves, they see a world of {_join(sizes)}"
    agreed = sizes == {len(processes)} and statement.admits(len(processes))
    return _answer(statement, Verdict.SUPPORTED if agreed else Verdict.CONTRADICTED, message, *processes.values())


def _judge_hosts(statement: Statement, launch: LaunchEvidence) -> Judgement:
    processes = launch.newest("process")
    hosts = {str(one.fields.get("host")) for one in processes.values()}
    if not hosts:
        return _answer(statement, Verdict.UNSUPPORTED, "no rank recorded its host")
    verdict = Verdict.SUPPORTED if statement.admits(len(hosts)) else Verdict.CONTRADICTED
    return _answer(statement, verdict, f"launch {launch.launch}: {len(hosts)} hosts", *processes.values())


def _judge_dataset(statement: Statement, launch: LaunchEvidence) -> Judgement:
    records = [one for one in launch.newest("data").values() if one.fields.get("dataset")]
    if not records:
        return _answer(statement, Verdict.UNSUPPORTED, "no rank recorded what it read")
    wanted = _plain(statement.word)
    names = {str(one.fields["dataset"]) for one in records}
    if not any(wanted in _plain(name) or _plain(name) in wanted for name in names):
        return _answer(statement, Verdict.CONTRADICTED, f"launch {launch.launch} read {_join(names)}", *records)
    size = max((one.fields.get("dataset_bytes") or 0 for one in records), default=0)
    known = KNOWN_BYTES.get(wanted)
    distinct = max((one.fields.get("distinct_samples") or 0 for one in records), default=0)
    if known and 0 < distinct < FEW_SAMPLES:
        message = f"launch {launch.launch}: {distinct:,} distinct samples under that name"
        return _answer(statement, Verdict.CONTRADICTED, message, *records)
    if known and 0 < size < CORPUS_FRACTION * known:
        message = f"launch {launch.launch}: {size:,} bytes under that name; the corpus has {known:,}"
        return _answer(statement, Verdict.CONTRADICTED, message, *records)
    return _answer(statement, Verdict.SUPPORTED, f"launch {launch.launch} read {_join(names)}", *records)


def _judge_precision(statement: Statement, launch: LaunchEvidence) -> Judgement:
    return _judge_word(statement, launch, "precision", (PRECISIONS.get(statement.word, statement.word),))


def _judge_wrapper(statement: Statement, launch: LaunchEvidence) -> Judgement:
    word = "deepspeed" if statement.word.lower().startswith("zero") else statement.word.lower()
    return _judge_word(statement, launch, "wrapper", WRAPPERS.get(word, (word,)))


def _judge_word(statement: Statement, launch: LaunchEvidence, key: str, accepted: Sequence[str]) -> Judgement:
    records = [one for one in launch.newest("process").values() if one.fields.get(key)]
    if not records:
        return _answer(statement, Verdict.UNSUPPORTED, f"no rank recorded its {key}")
    found = {str(one.fields[key]) for one in records}
    plain = {PRECISIONS.get(word.lower(), word.lower()) for word in found}
    verdict = Verdict.SUPPORTED if plain <= set(accepted) else Verdict.CONTRADICTED
    return _answer(statement, verdict, f"launch {launch.launch}: {key} {_join(found)}", *records)


def _judge_steps(statement: Statement, evidence: RunEvidence) -> Judgement:
    refs = tuple(launch.metrics_ref for launch in evidence.scope if launch.metrics_ref)
    if not refs:
        return _answer(statement, Verdict.UNSUPPORTED, "no step was logged")
    last = max(launch.last_step or 0 for launch in evidence.scope)
    head = evidence.head_step or last
    message = f"the lineage has {head:,} steps"
    if statement.kind is Kind.TRAINED:
        return _answer(statement, Verdict.SUPPORTED if head > 0 else Verdict.CONTRADICTED, message, *refs)
    reached = statement.low is not None and head >= statement.low and "step " in statement.text.lower()
    verdict = Verdict.SUPPORTED if statement.admits(head) or reached else Verdict.CONTRADICTED
    return _answer(statement, verdict, message, *refs)


def _judge_duration(statement: Statement, evidence: RunEvidence) -> Judgement:
    """Wall time of the launches of the lineage, as their supervisors measured it."""
    wanted = {launch.launch for launch in evidence.scope}
    ends = [one for one in evidence.entries if one.kind == "launch.end" and one.launch in wanted]
    seconds = {one.launch: one.data["duration_seconds"] for one in ends if one.data.get("duration_seconds") is not None}
    if not seconds or set(seconds) != wanted:
        return _answer(statement, Verdict.UNSUPPORTED, "not every launch of the lineage has a recorded duration")
    total = sum(seconds.values())
    verdict = Verdict.SUPPORTED if statement.admits(total) else Verdict.CONTRADICTED
    message = f"{total / 3600:.2f} h in {len(seconds)} launches"
    return _answer(statement, verdict, message, *(one.id for one in ends))


def _judge_loss(statement: Statement, evidence: RunEvidence) -> Judgement:
    with_loss = [launch for launch in evidence.scope if launch.last_loss is not None]
    if not with_loss:
        return _answer(statement, Verdict.UNSUPPORTED, "no loss was logged")
    last = with_loss[-1].last_loss
    best = min(launch.best_loss for launch in with_loss if launch.best_loss is not None)
    assert last is not None
    message = f"last logged {last:.4g}, best {best:.4g}"
    agrees = statement.admits(last) or statement.admits(best)
    return _answer(statement, Verdict.SUPPORTED if agrees else Verdict.CONTRADICTED, message, with_loss[-1].metrics_ref)


def _judge_volume(statement: Statement, evidence: RunEvidence) -> Judgement:
    """Samples, tokens or bytes summed over ranks and launches of the lineage, as counted in the loaders."""
    key = statement.kind.value
    records = [one for launch in evidence.scope for one in launch.newest("data").values()]
    counted = [one for one in records if isinstance(one.fields.get(key), int)]
    if not counted:
        return _answer(statement, Verdict.UNSUPPORTED, f"no rank counted {key}")
    total = sum(int(one.fields[key]) for one in counted)
    verdict = Verdict.SUPPORTED if statement.admits(total) else Verdict.CONTRADICTED
    return _answer(statement, verdict, f"{total:,} {key} counted in {len(counted)} loaders", *counted)


def _answer(statement: Statement, verdict: Verdict, message: str, *evidence: Observation | str) -> Judgement:
    refs = tuple(one.ref if isinstance(one, Observation) else one for one in evidence)
    return Judgement(statement=statement, verdict=verdict, message=message, evidence=refs)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _join(values: Sequence[Any] | set[Any]) -> str:
    return ", ".join(sorted(map(str, values)))


JUDGES: Mapping[Kind, Callable[[Statement, LaunchEvidence], Judgement]] = {
    Kind.PARAMETERS: _judge_parameters,
    Kind.DEVICES: _judge_devices,
    Kind.RANKS: _judge_ranks,
    Kind.HOSTS: _judge_hosts,
    Kind.DATASET: _judge_dataset,
    Kind.PRECISION: _judge_precision,
    Kind.WRAPPER: _judge_wrapper,
}
