"""Judge claims against the evidence of the ranks: SUPPORTED, CONTRADICTED or NO EVIDENCE.

A claim is a set of fields ("params", "devices", …) with the values that a sentence will state. The sentence is kept as
text and never parsed; only its numbers are looked up, so that one that no field answers is listed as not judged.

No record means NO EVIDENCE, not false (seed 001: "no results file, so it never ran" was wrong). All launches of the
lineage must agree. Records that are not what the journal sealed support nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from chronicle.audit.evidence import LaunchEvidence, Observation, RunEvidence
from chronicle.errors import UsageProblem
from chronicle.journal.events import Claim, LaunchEnd, events_of

IDLE_BELOW = 0.05  # a device busy for less than this fraction between two samples was idle
IDLE_SHARE = 0.9
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "no": "fp32"}
WRAPPERS = {
    "ddp": "distributeddataparallel",
    "fsdp": "fullyshardeddataparallel",
    "fsdp2": "fsdpmodule",
    "deepspeed": "deepspeedengine",
}
SAME_WORDS = PRECISIONS | WRAPPERS
SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
NUMBER = re.compile(r"(?P<digits>\d[\d,_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s?(?P<scale>[kKMBT](?![A-Za-z]))?")
IN_TEXT = re.compile(r"(?<![\w.\-])" + NUMBER.pattern)


class ClaimVerdict(Enum):
    """Answer to one field. `NO_EVIDENCE`: no record can confirm or contradict it."""

    SUPPORTED = "SUPPORTED"
    CONTRADICTED = "CONTRADICTED"
    NO_EVIDENCE = "NO EVIDENCE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on one field, with references to its evidence."""

    field: str
    said: str
    verdict: ClaimVerdict
    message: str
    evidence: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the journal and `--json`."""
        return {
            "field": self.field,
            "said": self.said,
            "verdict": self.verdict.value,
            "message": self.message,
            "evidence": list(self.evidence),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number as written, and the interval of values that round to it."""

    text: str
    low: float
    high: float

    def admits(self, value: float) -> bool:
        """Whether a measured value rounds to the number as written."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the records say of one field, before it is named."""

    verdict: ClaimVerdict
    message: str
    evidence: tuple[str, ...] = ()


def read_quantity(text: str) -> Quantity:
    """Read `1208606722`, `1.21B` or `2.35`. Whole numbers are exact; others stand for what rounds to their last digit.

    Raises UsageProblem where the text is no number.
    """
    match = NUMBER.fullmatch(text.strip())
    if match is None:
        raise UsageProblem(f"`{text}` is not a number: expected digits, with k, M, B or T behind them where they are rounded")
    return _quantity(match)


def _quantity(match: re.Match[str]) -> Quantity:
    digits = match["digits"].replace(",", "").replace("_", "")
    factor = SCALES[(match["scale"] or "").lower()]
    mantissa, _, exponent = digits.lower().partition("e")
    factor *= 10.0 ** int(exponent or 0)
    decimals = len(mantissa.partition(".")[2])
    value = float(mantissa) * factor
    is_rounded = factor != 1.0 or decimals > 0
    half_unit = 0.5 * 10.0**-decimals * factor if is_rounded else 0.0
    return Quantity(text=match.group().strip(), low=value - half_unit, high=value + half_unit)


def judge_claim(fields: Mapping[str, str], evidence: RunEvidence) -> tuple[Judgement, ...]:
    """Judge every field of a claim in the order of `FIELDS`; raises UsageProblem for an unknown field or no number."""
    unknown = sorted(fields.keys() - FIELDS.keys())
    if unknown:
        raise UsageProblem(f"unknown field `{unknown[0]}`: expected some of {', '.join(FIELDS)}")
    for name, said in fields.items():
        if name not in WORDS:
            read_quantity(said)
    found: list[Judgement] = []
    for name, judge in FIELDS.items():
        if name in fields:
            answer = _sealed(judge(fields[name], evidence), evidence)
            found.append(
                Judgement(
                    field=name,
                    said=fields[name],
                    verdict=answer.verdict,
                    message=answer.message,
                    evidence=answer.evidence,
                )
            )
    return tuple(found)


def _sealed(answer: Answer, evidence: RunEvidence) -> Answer:
    """Records of which some changed after they were sealed support nothing."""
    changed = next((launch for launch in evidence.scope if launch.broken), None)
    if changed is None or answer.verdict is not ClaimVerdict.SUPPORTED:
        return answer
    return _none(f"launch {changed.launch}: {changed.broken}: it supports nothing")


def overall(judgements: Sequence[Judgement], unjudged: Sequence[str]) -> ClaimVerdict:
    """The verdict on the sentence: the worst of its fields; a number that was not judged leaves it without evidence."""
    verdicts = {one.verdict for one in judgements}
    if ClaimVerdict.CONTRADICTED in verdicts:
        return ClaimVerdict.CONTRADICTED
    if ClaimVerdict.NO_EVIDENCE in verdicts or unjudged or not judgements:
        return ClaimVerdict.NO_EVIDENCE
    return ClaimVerdict.SUPPORTED


def list_unjudged(sentence: str, fields: Mapping[str, str]) -> tuple[str, ...]:
    """The numbers of a sentence that no field states: `1.21B` where `params` was not given."""
    rest = sentence
    given: list[Quantity] = []
    for said in fields.values():
        if NUMBER.fullmatch(said.strip()):
            given.append(read_quantity(said))
        else:
            rest = re.sub(re.escape(said), " ", rest, flags=re.IGNORECASE)
    found: list[str] = []
    for match in IN_TEXT.finditer(rest):
        written = _quantity(match)
        if not any(one.low <= written.high and written.low <= one.high for one in given):
            found.append(written.text)
    return tuple(dict.fromkeys(found))


# --- What a launch recorded


def _of_each_launch(judge: Callable[[str, LaunchEvidence], Answer]) -> Callable[[str, RunEvidence], Answer]:
    """A field that every launch of the lineage must support: the worst answer counts."""

    def of_run(said: str, evidence: RunEvidence) -> Answer:
        answers = [judge(said, launch) for launch in evidence.scope]
        for verdict in (ClaimVerdict.CONTRADICTED, ClaimVerdict.NO_EVIDENCE, ClaimVerdict.SUPPORTED):
            for answer in answers:
                if answer.verdict is verdict:
                    return answer
        return _none("no launch of this run recorded evidence")

    return of_run


def _judge_parameters(said: str, launch: LaunchEvidence) -> Answer:
    wanted = read_quantity(said)
    models = launch.newest("model")
    for one in models.values():
        count = one.fields.get("counted")
        if count is None:
            count = one.fields.get("logical")
        if isinstance(count, int):
            break
    else:
        return _none("no rank recorded a parameter count")
    message = f"launch {launch.launch}: counted {count:,}"
    if wanted.admits(count):
        return _supported(message, one)
    for size in sorted({len(models), 2, 4, 8, 16, 32, 64} - {0, 1}):
        if wanted.admits(math.ceil(count / size)):
            return _contradicted(f"{message}; the claim is 1/{size} of it: the part of one rank after sharding", one)
    middle = (wanted.low + wanted.high) / 2
    off = f" ({(count - middle) / middle:+.1%})" if middle else ""
    return _contradicted(message + off, one)


def _judge_devices(said: str, launch: LaunchEvidence) -> Answer:
    """Distinct accelerators that worked: two ranks on one device are one, and a CPU is none."""
    wanted = read_quantity(said)
    processes = launch.newest("process")
    devices: dict[str, Observation] = {}
    for one in processes.values():
        if _device(one).get("id"):
            devices[str(_device(one)["id"])] = one
    if not devices:
        return _none("no rank recorded its device")
    refs = tuple(processes.values())
    kinds = {str(_device(one).get("kind")) for one in devices.values()}
    message = f"launch {launch.launch}: {len(processes)} ranks on {len(devices)} distinct devices ({_join(kinds)})"
    if not _all_ranks(launch) or any(not _device(one).get("id") for one in refs):
        return _none(f"{message}; not every rank recorded its device", *refs)
    idle = _idle_ranks(launch)
    if idle:
        message += f", idle in more than {IDLE_SHARE:.0%} of the samples: rank {', '.join(map(str, sorted(idle)))}"
    accelerators = [one for one in devices.values() if _device(one).get("kind") != "cpu"]
    working = sum(one.rank not in idle for one in accelerators)
    return _compared(wanted.admits(working), message, *refs)


def _judge_device_name(said: str, launch: LaunchEvidence) -> Answer:
    """Whether a device's name says this model: `A100` in `NVIDIA A100-SXM4-80GB`, not in `A1000`."""
    processes = launch.newest("process")
    names = [str(_device(one).get("name") or "") for one in processes.values()]
    if not names or not all(names):
        return _none("not every rank recorded the name of its device", *processes.values())
    parts = re.findall(r"[a-z]+|\d+", said.lower())
    pattern = re.compile(r"\b" + r"[\s-]*".join(parts) + r"(?![a-z0-9])")
    agreed = all(pattern.search(name.lower()) for name in names)
    return _compared(agreed, f"launch {launch.launch}: {_join(set(names))}", *processes.values())


def _judge_ranks(said: str, launch: LaunchEvidence) -> Answer:
    processes = launch.newest("process")
    if not processes:
        return _none("no rank recorded anything")
    sizes = {one.fields.get("world_size") for one in processes.values()}
    message = f"launch {launch.launch}: {len(processes)} ranks recorded, world size {_join(sizes)}"
    agreed = sizes == {len(processes)} and read_quantity(said).admits(len(processes))
    return _compared(agreed, message, *processes.values())


def _judge_hosts(said: str, launch: LaunchEvidence) -> Answer:
    processes = launch.newest("process")
    hosts = {str(one.fields.get("host")) for one in processes.values()}
    if not hosts:
        return _none("no rank recorded its host")
    return _compared(read_quantity(said).admits(len(hosts)), f"launch {launch.launch}: {len(hosts)} hosts", *processes.values())


def _judge_data(said: str, launch: LaunchEvidence) -> Answer:
    """The name as written is that of the record, or a part of it in whole words: `WikiText` of `wikitext-103/train`.

    Seed 000 trained on five texts under a corpus' name, so the count of distinct samples is told with every answer.
    """
    records = [one for one in launch.newest("data").values() if one.fields.get("dataset")]
    if not records:
        return _none("no rank recorded what it read")
    if len(records) < len(launch.newest("process")):
        return _none(f"launch {launch.launch}: not every rank recorded what it read", *records)
    names = {str(one.fields["dataset"]) for one in records}
    message = f"launch {launch.launch} read {_join(names)}"
    distinct = max((one.fields.get("distinct_samples") or 0 for one in records), default=0)
    if distinct:
        message += f", {distinct:,} distinct samples"
    return _compared(all(_is_of_dataset(said, name) for name in names), message, *records)


def _is_of_dataset(said: str, recorded: str) -> bool:
    wanted = re.findall(r"[a-z]+|\d+", said.lower())
    there = re.findall(r"[a-z]+|\d+", recorded.lower())
    if not wanted:
        return False
    if "".join(wanted) == "".join(there):
        return True
    starts = range(len(there) - len(wanted) + 1)
    return any(there[start : start + len(wanted)] == wanted for start in starts)


def _judge_precision(said: str, launch: LaunchEvidence) -> Answer:
    return _judge_word(said, launch, "precision")


def _judge_wrapper(said: str, launch: LaunchEvidence) -> Answer:
    return _judge_word(said, launch, "wrapper")


def _judge_word(said: str, launch: LaunchEvidence, key: str) -> Answer:
    processes = launch.newest("process")
    records = [one for one in processes.values() if one.fields.get(key)]
    if not records or len(records) < len(processes):
        return _none(f"{'not every' if records else 'no'} rank recorded its {key}", *records)
    found = {str(one.fields[key]) for one in records}
    plain = {SAME_WORDS.get(word.lower(), word.lower()) for word in found}
    wanted = SAME_WORDS.get(said.lower(), said.lower())
    return _compared(plain == {wanted}, f"launch {launch.launch}: {key} {_join(found)}", *records)


def _all_ranks(launch: LaunchEvidence) -> bool:
    """Whether as many ranks recorded themselves as each says there are."""
    processes = launch.newest("process")
    sizes = [one.fields.get("world_size") for one in processes.values()]
    return not any(isinstance(size, int) and size > len(processes) for size in sizes)


def _device(one: Observation) -> Mapping[str, Any]:
    device = one.fields.get("device")
    return device if isinstance(device, Mapping) else {}


def _idle_ranks(launch: LaunchEvidence) -> set[int]:
    """The ranks whose device was idle in more than IDLE_SHARE of its samples."""
    rank_by_device = {str(_device(one).get("id")): rank for rank, one in launch.newest("process").items()}
    samples: dict[int, list[float]] = {}
    for one in launch.of_kind("device"):
        rank = one.rank if one.rank >= 0 else rank_by_device.get(str(one.fields.get("device")))
        busy = one.fields.get("busy_fraction")
        if rank is not None and isinstance(busy, int | float):
            samples.setdefault(rank, []).append(float(busy))
    idle: set[int] = set()
    for rank, values in samples.items():
        if sum(value < IDLE_BELOW for value in values) > IDLE_SHARE * len(values):
            idle.add(rank)
    return idle


# --- What the run recorded


def _judge_steps(said: str, evidence: RunEvidence) -> Answer:
    refs = [launch.metrics_ref for launch in evidence.scope if launch.metrics_ref]
    if not refs:
        return _none("no step was logged")
    head = evidence.head_step or max(launch.last_step or 0 for launch in evidence.scope)
    return _compared(read_quantity(said).admits(head), f"the lineage has {head:,} steps", *refs)


def _judge_hours(said: str, evidence: RunEvidence) -> Answer:
    """The wall time of the lineage's launches, as their supervisors measured it; 5 % are allowed."""
    scope = {launch.launch for launch in evidence.scope}
    seconds: dict[int | None, float] = {}
    refs: list[str] = []
    for entry, end in events_of(evidence.entries, LaunchEnd):
        if entry.launch in scope and end.duration_seconds is not None:
            seconds[entry.launch] = end.duration_seconds
            refs.append(entry.id)
    if not seconds or set(seconds) != scope:
        return _none("not every launch of the lineage has a recorded duration", *refs)
    hours = sum(seconds.values()) / 3600
    wanted = read_quantity(said)
    agreed = 0.95 * wanted.low <= hours <= 1.05 * wanted.high
    return _compared(agreed, f"{hours:.2f} h in {len(seconds)} launches", *refs)


def _judge_final_loss(said: str, evidence: RunEvidence) -> Answer:
    return _judge_loss(said, evidence, best=False)


def _judge_best_loss(said: str, evidence: RunEvidence) -> Answer:
    return _judge_loss(said, evidence, best=True)


def _judge_loss(said: str, evidence: RunEvidence, *, best: bool) -> Answer:
    launches = [launch for launch in evidence.scope if launch.last_loss is not None]
    if not launches:
        return _none("no loss was logged")
    last = launches[-1].last_loss or 0.0
    lowest = min(launch.best_loss for launch in launches if launch.best_loss is not None)
    agreed = read_quantity(said).admits(lowest if best else last)
    return _compared(agreed, f"last logged {last:.4g}, best {lowest:.4g}", launches[-1].metrics_ref)


def _of_loaders(key: str) -> Callable[[str, RunEvidence], Answer]:
    """Samples, tokens or bytes: counted in the loaders, summed over ranks and launches of the lineage."""

    def of_run(said: str, evidence: RunEvidence) -> Answer:
        records = [one for launch in evidence.scope for one in launch.newest("data").values()]
        counted = [one for one in records if isinstance(one.fields.get(key), int)]
        num_ranks = sum(len(launch.newest("process")) for launch in evidence.scope)
        complete = len(counted) >= num_ranks and all(_all_ranks(launch) for launch in evidence.scope)
        if not counted or not complete:
            return _none(f"{'not every' if counted else 'no'} rank counted {key}", *counted)
        total = sum(int(one.fields[key]) for one in counted)
        agreed = read_quantity(said).admits(total)
        return _compared(agreed, f"{total:,} {key} counted in {len(counted)} loaders", *counted)

    return of_run


FIELDS: Mapping[str, Callable[[str, RunEvidence], Answer]] = {
    "params": _of_each_launch(_judge_parameters),
    "devices": _of_each_launch(_judge_devices),
    "device_name": _of_each_launch(_judge_device_name),
    "ranks": _of_each_launch(_judge_ranks),
    "hosts": _of_each_launch(_judge_hosts),
    "data": _of_each_launch(_judge_data),
    "precision": _of_each_launch(_judge_precision),
    "wrapper": _of_each_launch(_judge_wrapper),
    "steps": _judge_steps,
    "tokens": _of_loaders("tokens"),
    "samples": _of_loaders("samples"),
    "bytes": _of_loaders("bytes"),
    "final_loss": _judge_final_loss,
    "best_loss": _judge_best_loss,
    "hours": _judge_hours,
}

WORDS = frozenset(("device_name", "data", "precision", "wrapper"))  # fields that are no numbers


def _compared(agreed: bool, message: str, *evidence: Observation | str) -> Answer:
    return _supported(message, *evidence) if agreed else _contradicted(message, *evidence)


def _supported(message: str, *evidence: Observation | str) -> Answer:
    return Answer(verdict=ClaimVerdict.SUPPORTED, message=message, evidence=_refs(evidence))


def _contradicted(message: str, *evidence: Observation | str) -> Answer:
    return Answer(verdict=ClaimVerdict.CONTRADICTED, message=message, evidence=_refs(evidence))


def _none(message: str, *evidence: Observation | str) -> Answer:
    return Answer(verdict=ClaimVerdict.NO_EVIDENCE, message=message, evidence=_refs(evidence))


def _refs(evidence: Sequence[Observation | str]) -> tuple[str, ...]:
    return tuple(one.ref if isinstance(one, Observation) else one for one in evidence)


def _join(values: set[Any]) -> str:
    return ", ".join(sorted(map(str, values)))


# --- Claims judged again


def recheck_claims(evidence: RunEvidence) -> Iterator[tuple[str, str, bool]]:
    """Yield (entry id, sentence, is bad) for recorded claims: contradicted now, another verdict now, or not judged again.

    A claim of before claims had fields is text and an old verdict: it is said, and not judged.
    """
    for entry, claim in events_of(evidence.entries, Claim):
        if not claim.fields:
            yield entry.id, f"claim `{claim.text}` has no fields and was not judged again (recorded: {claim.verdict})", False
            continue
        now = overall(judge_claim(claim.fields, evidence), list_unjudged(claim.text, claim.fields))
        if now.value != claim.verdict:
            yield entry.id, f"claim `{claim.text}` was {claim.verdict} and is {now.value} now", True
        elif now is ClaimVerdict.CONTRADICTED:
            yield entry.id, f"claim `{claim.text}` is contradicted by the ranks' records", True
