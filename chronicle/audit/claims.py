"""Judge claims against the evidence of the ranks: SUPPORTED, CONTRADICTED or NO EVIDENCE.

A claim is a set of fields ("params", "devices", …) with the values that a sentence will state. The sentence is kept as
text and never parsed; only its numbers are looked up, so that one that no field answers is listed as not judged.

No record means NO EVIDENCE, not false (seed 001: "no results file, so it never ran" was wrong). All launches of the
lineage must agree. Records that are not what the journal sealed support nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, NamedTuple

from chronicle.audit.evidence import LaunchEvidence, Observation, RunEvidence
from chronicle.errors import UsageProblem
from chronicle.journal.events import Claim, LaunchEnd, LaunchStart, Rehearsed, events_of, is_of

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
WORD = re.compile(r"[a-z]+|\d+")
IN_TEXT = re.compile(r"(?<![\w.\-])" + NUMBER.pattern)


class ClaimVerdict(Enum):
    """Answer to one field. `NO_EVIDENCE`: no record can confirm or contradict it."""

    SUPPORTED = "SUPPORTED"
    CONTRADICTED = "CONTRADICTED"
    NO_EVIDENCE = "NO EVIDENCE"


WORST_FIRST = (ClaimVerdict.CONTRADICTED, ClaimVerdict.NO_EVIDENCE, ClaimVerdict.SUPPORTED)


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
        return asdict(self) | {"verdict": self.verdict.value, "evidence": list(self.evidence)}


class Quantity(NamedTuple):
    """A number as written, and the interval of values that round to it."""

    text: str
    low: float
    high: float

    def admits(self, value: float) -> bool:
        """Whether a measured value rounds to the number as written."""
        return self.low <= value <= self.high


class Fact(NamedTuple):
    """What the records say of one field. `value` None: nothing. `evidence`: the records, or their places."""

    value: Any
    message: str
    evidence: Iterable[Observation | str] = ()


class ClaimField(NamedTuple):
    """A row of the table of fields: who reads its fact, and whether what was said agrees with it."""

    read: Callable[[Any], Fact]
    agrees: Callable[[Any, Any], bool] = Quantity.admits  # of what was said: a quantity, or the text of a word
    of_run: bool = False  # read of the run; else of each launch of the lineage, all of which must agree
    is_number: bool = True
    more: Callable[[Any, Any], str] = lambda said, value: ""  # told of a value that does not agree


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
    said = {name: read_quantity(fields[name]) if FIELDS[name].is_number else fields[name] for name in fields}
    return tuple(_judge(name, fields[name], said[name], evidence) for name in FIELDS if name in fields)


def _judge(name: str, text: str, said: Any, evidence: RunEvidence) -> Judgement:
    """The worst answer counts. Records of which some changed after they were sealed support nothing."""
    field = FIELDS[name]
    facts = [field.read(one) for one in ((evidence,) if field.of_run else evidence.scope)]
    answers = []
    for fact in facts or [Fact(None, "no launch of this run recorded evidence")]:
        if fact.value is None:
            answers.append((ClaimVerdict.NO_EVIDENCE, fact))
        elif field.agrees(said, fact.value):
            answers.append((ClaimVerdict.SUPPORTED, fact))
        else:
            told = fact.message + field.more(said, fact.value)
            answers.append((ClaimVerdict.CONTRADICTED, fact._replace(message=told)))
    verdict, fact = min(answers, key=lambda answer: WORST_FIRST.index(answer[0]))
    changed = next((launch for launch in evidence.scope if launch.broken), None)
    if changed is not None and verdict is ClaimVerdict.SUPPORTED:
        verdict = ClaimVerdict.NO_EVIDENCE
        fact = Fact(None, f"launch {changed.launch}: {changed.broken}: it supports nothing")
    refs = tuple(one.ref if isinstance(one, Observation) else one for one in fact.evidence)
    return Judgement(field=name, said=text, verdict=verdict, message=fact.message, evidence=refs)


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


def _parameters(launch: LaunchEvidence) -> Fact:
    for one in launch.newest("model").values():
        count = one.fields.get("counted")
        if count is None:
            count = one.fields.get("logical")
        if isinstance(count, int):
            return Fact(count, f"launch {launch.launch}: counted {count:,}", (one,))
    return Fact(None, "no rank recorded a parameter count")


def _off(said: Quantity, count: int) -> str:
    """How far a claim is from the count; it may be the part of one rank."""
    for size in (2, 4, 8, 16, 32, 64):
        if said.admits(math.ceil(count / size)):
            return f"; the claim is 1/{size} of it: the part of one rank after sharding"
    middle = (said.low + said.high) / 2
    return f" ({(count - middle) / middle:+.1%})" if middle else ""


def _devices(launch: LaunchEvidence) -> Fact:
    """Distinct accelerators that worked: two ranks on one device are one, and a CPU is none."""
    processes = launch.newest("process")
    named = [one for one in processes.values() if _device(one).get("id")]
    devices = {str(_device(one)["id"]): one for one in named}
    if not devices:
        return Fact(None, "no rank recorded its device")
    kinds = {str(_device(one).get("kind")) for one in devices.values()}
    message = f"launch {launch.launch}: {len(processes)} ranks on {len(devices)} distinct devices ({_join(kinds)})"
    if len(named) < _num_ranks(launch):
        return Fact(None, f"{message}; not every rank recorded its device", processes.values())
    idle = _idle_ranks(launch)
    if idle:
        message += f", idle in more than {IDLE_SHARE:.0%} of the samples: rank {', '.join(map(str, sorted(idle)))}"
    working = [one for one in devices.values() if _device(one).get("kind") != "cpu" and one.rank not in idle]
    return Fact(len(working), message, processes.values())


def _device_names(launch: LaunchEvidence) -> Fact:
    processes = launch.newest("process").values()
    names = {str(_device(one).get("name") or "") for one in processes}
    if not names or "" in names:
        return Fact(None, "not every rank recorded the name of its device", processes)
    return Fact(names, f"launch {launch.launch}: {_join(names)}", processes)


def _are_of_model(said: str, names: set[str]) -> bool:
    """Whether each device's name says this model: `A100` in `NVIDIA A100-SXM4-80GB`, not in `A1000`."""
    pattern = re.compile(r"\b" + r"[\s-]*".join(WORD.findall(said.lower())) + r"(?![a-z0-9])")
    return all(pattern.search(name.lower()) for name in names)


def _ranks(launch: LaunchEvidence) -> Fact:
    processes = launch.newest("process")
    if not processes:
        return Fact(None, "no rank recorded anything")
    sizes = {one.fields.get("world_size") for one in processes.values()}
    count = len(processes) if sizes == {len(processes)} else math.nan  # they disagree: no number is right
    message = f"launch {launch.launch}: {len(processes)} ranks recorded, world size {_join(sizes)}"
    return Fact(count, message, processes.values())


def _hosts(launch: LaunchEvidence) -> Fact:
    processes = launch.newest("process").values()
    hosts = {str(one.fields.get("host")) for one in processes}
    if not hosts:
        return Fact(None, "no rank recorded its host")
    return Fact(len(hosts), f"launch {launch.launch}: {len(hosts)} hosts", processes)


def _data(launch: LaunchEvidence) -> Fact:
    """Seed 000 trained on five texts under a corpus' name, so the count of distinct samples is told with every answer."""
    records = [one for one in launch.newest("data").values() if one.fields.get("dataset")]
    if not records:
        return Fact(None, "no rank recorded what it read")
    if len(records) < len(launch.newest("process")):
        return Fact(None, f"launch {launch.launch}: not every rank recorded what it read", records)
    names = {str(one.fields["dataset"]) for one in records}
    message = f"launch {launch.launch} read {_join(names)}"
    distinct = max(one.fields.get("distinct_samples") or 0 for one in records)
    if distinct:
        message += f", {distinct:,} distinct samples"
    return Fact(names, message, records)


def _are_of_dataset(said: str, names: set[str]) -> bool:
    """The name as written is that of each record, or a part of it in whole words: `WikiText` of `wikitext-103/train`."""
    wanted = WORD.findall(said.lower())
    for name in names:
        there = WORD.findall(name.lower())
        starts = range(len(there) - len(wanted) + 1)
        is_part = any(there[start : start + len(wanted)] == wanted for start in starts)
        if not wanted or not (is_part or "".join(wanted) == "".join(there)):
            return False
    return True


def _word(key: str) -> Callable[[LaunchEvidence], Fact]:
    """A word that every process recorded of itself."""

    def of_launch(launch: LaunchEvidence) -> Fact:
        processes = launch.newest("process")
        records = [one for one in processes.values() if one.fields.get(key)]
        if not records or len(records) < len(processes):
            return Fact(None, f"{'not every' if records else 'no'} rank recorded its {key}", records)
        found = {str(one.fields[key]) for one in records}
        return Fact(found, f"launch {launch.launch}: {key} {_join(found)}", records)

    return of_launch


def _is_word(said: str, found: set[str]) -> bool:
    return {_plain(word) for word in found} == {_plain(said)}


def _plain(word: str) -> str:
    return SAME_WORDS.get(word.lower(), word.lower())


def _num_ranks(launch: LaunchEvidence) -> int:
    """The ranks of a launch: those that recorded themselves, or as many as one of them says there are."""
    processes = launch.newest("process")
    sizes = [one.fields.get("world_size") for one in processes.values()]
    return max([len(processes), *(size for size in sizes if isinstance(size, int))])


def _device(one: Observation) -> Mapping[str, Any]:
    device = one.fields.get("device")
    return device if isinstance(device, Mapping) else {}


def _idle_ranks(launch: LaunchEvidence) -> set[int]:
    """The ranks whose device was idle in more than IDLE_SHARE of its samples."""
    rank_by_device = {str(_device(one).get("id")): rank for rank, one in launch.newest("process").items()}
    samples: dict[int, list[bool]] = {}
    for one in launch.of_kind("device"):
        rank = one.rank if one.rank >= 0 else rank_by_device.get(str(one.fields.get("device")))
        busy = one.fields.get("busy_fraction")
        if rank is not None and isinstance(busy, int | float):
            samples.setdefault(rank, []).append(busy < IDLE_BELOW)
    return {rank for rank, idle in samples.items() if sum(idle) > IDLE_SHARE * len(idle)}


# --- What the run recorded


def _steps(evidence: RunEvidence) -> Fact:
    refs = [launch.metrics_ref for launch in evidence.scope if launch.metrics_ref]
    if not refs:
        return Fact(None, "no step was logged")
    head = evidence.head_step or max(launch.last_step or 0 for launch in evidence.scope)
    return Fact(head, f"the lineage has {head:,} steps", refs)


def _hours(evidence: RunEvidence) -> Fact:
    """The wall time of the lineage's launches, as their supervisors measured it."""
    scope = {launch.launch for launch in evidence.scope}
    seconds: dict[int | None, float] = {}
    refs: list[str] = []
    for entry, end in events_of(evidence.entries, LaunchEnd):
        if entry.launch in scope and end.duration_seconds is not None:
            seconds[entry.launch] = end.duration_seconds
            refs.append(entry.id)
    if not seconds or set(seconds) != scope:
        return Fact(None, "not every launch of the lineage has a recorded duration", refs)
    hours = sum(seconds.values()) / 3600
    return Fact(hours, f"{hours:.2f} h in {len(seconds)} launches", refs)


def _are_hours(said: Quantity, hours: float) -> bool:
    """5 % are allowed."""
    return 0.95 * said.low <= hours <= 1.05 * said.high


def _loss(evidence: RunEvidence) -> Fact:
    """The last and the lowest loss."""
    launches = [launch for launch in evidence.scope if launch.last_loss is not None]
    if not launches:
        return Fact(None, "no loss was logged")
    last = launches[-1].last_loss
    best = min(launch.best_loss for launch in launches if launch.best_loss is not None)
    return Fact((last, best), f"last logged {last:.4g}, best {best:.4g}", (launches[-1].metrics_ref,))


def _of_loaders(key: str) -> Callable[[RunEvidence], Fact]:
    """Samples, tokens or bytes: counted in the loaders, summed over ranks and launches of the lineage."""

    def of_run(evidence: RunEvidence) -> Fact:
        records = [one for launch in evidence.scope for one in launch.newest("data").values()]
        counted = [one for one in records if isinstance(one.fields.get(key), int)]
        if not counted or len(counted) < sum(map(_num_ranks, evidence.scope)):
            return Fact(None, f"{'not every' if counted else 'no'} rank counted {key}", counted)
        total = sum(int(one.fields[key]) for one in counted)
        return Fact(total, f"{total:,} {key} counted in {len(counted)} loaders", counted)

    return of_run


def _resumes(evidence: RunEvidence) -> Fact:
    """What the last rehearsal found, while command, code, packages and ranks of each launch are those that were rehearsed."""
    found = [(entry, event) for entry, event in events_of(evidence.entries, Rehearsed) if event.signal]
    if not found:
        return Fact(None, "the script was never rehearsed: `chronicle rehearse -- …`")
    entry, event = found[-1]
    rehearsed = (event.git_commit, event.git_dirty_digest, event.env_digest)
    ranks = {launch.launch: _num_ranks(launch) or event.ranks for launch in evidence.scope}
    for at, start in events_of(evidence.entries, LaunchStart):
        is_same = is_of(event, start.argv) and (start.git_commit, start.git_dirty_digest, start.env_digest) == rehearsed
        if at.launch in ranks and not (is_same and event.git_commit and ranks[at.launch] == event.ranks):
            return Fact(None, f"launch {at.launch}: another command, code, packages or ranks than in rehearsal {entry.id}")
    return Fact(event.verdict, f"rehearsal {entry.id}: the script {event.verdict}", (entry.id,))


FIELDS: Mapping[str, ClaimField] = {
    "params": ClaimField(_parameters, more=_off),
    "devices": ClaimField(_devices),
    "device_name": ClaimField(_device_names, _are_of_model, is_number=False),
    "ranks": ClaimField(_ranks),
    "hosts": ClaimField(_hosts),
    "data": ClaimField(_data, _are_of_dataset, is_number=False),
    "precision": ClaimField(_word("precision"), _is_word, is_number=False),
    "wrapper": ClaimField(_word("wrapper"), _is_word, is_number=False),
    "steps": ClaimField(_steps, of_run=True),
    "tokens": ClaimField(_of_loaders("tokens"), of_run=True),
    "samples": ClaimField(_of_loaders("samples"), of_run=True),
    "bytes": ClaimField(_of_loaders("bytes"), of_run=True),
    "final_loss": ClaimField(_loss, lambda said, losses: said.admits(losses[0]), of_run=True),
    "best_loss": ClaimField(_loss, lambda said, losses: said.admits(losses[1]), of_run=True),
    "hours": ClaimField(_hours, _are_hours, of_run=True),
    "resumes": ClaimField(_resumes, lambda said, verdict: verdict == f"resumes {said}", of_run=True, is_number=False),
}


def _join(values: Iterable[Any]) -> str:
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
