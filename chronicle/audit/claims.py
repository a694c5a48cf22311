"""Judge claims against the evidence of the ranks: SUPPORTED, CONTRADICTED or UNSUPPORTED.

No record means UNSUPPORTED, not false (seed 001: "no results file, so it never ran" was wrong). All launches of the
lineage must agree: one that contradicts is named, and one without a record leaves the statement unsupported. Records that
are not what the journal sealed support nothing, and neither does a sentence of which a part was not understood.
`recheck_claims` serves `chronicle audit`, `lint_note` serves `chronicle note`: it warns and does not block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from chronicle.audit.evidence import LaunchEvidence, Observation, RunEvidence, read_evidence
from chronicle.audit.statements import CORPORA, GPU_NAMES, Statement, Topic, parse_claim
from chronicle.journal import read_journal
from chronicle.journal.events import Claim, LaunchEnd, events_of
from chronicle.paths import RunPaths

__all__ = [
    "ClaimVerdict",
    "Judgement",
    "judge_claim",
    "lint_note",
    "recheck_claims",
]

IDLE_BELOW = 0.05  # a device busy for less than this fraction between two samples was idle
IDLE_SHARE = 0.9
KNOWN_BYTES = {"wikitext103": 540_000_000, "enwik8": 100_000_000, "text8": 100_000_000, "thepile": 825_000_000_000}
CORPUS_FRACTION = 0.01
FEW_SAMPLES = 1000  # a known corpus has more samples (seed 000: five)
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "no": "fp32"}
NO_FACTS = frozenset((Topic.NOT_READ, Topic.INTENT, Topic.DENIAL, Topic.OTHER))
WRAPPERS = {
    "fsdp": ("fullyshardeddataparallel", "fsdp", "fsdp2", "fsdpmodule"),
    "fsdp2": ("fsdp2", "fsdpmodule"),
    "deepspeed": ("deepspeedengine", "deepspeed"),
    "ddp": ("distributeddataparallel", "ddp"),
    "distributeddataparallel": ("distributeddataparallel", "ddp"),
    "dataparallel": ("dataparallel",),
}


class ClaimVerdict(Enum):
    """Answer to one statement. `UNSUPPORTED`: no record can confirm or contradict it."""

    SUPPORTED = "SUPPORTED"
    CONTRADICTED = "CONTRADICTED"
    UNSUPPORTED = "UNSUPPORTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The verdict on one statement, with references to its evidence."""

    statement: Statement
    verdict: ClaimVerdict
    message: str
    evidence: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the journal and `--json`."""
        return {
            "statement": self.statement.text,
            "kind": self.statement.kind.value,
            "verdict": self.verdict.value,
            "message": self.message,
            "evidence": list(self.evidence),
        }


def judge_claim(sentence: str, evidence: RunEvidence) -> tuple[Judgement, ...]:
    """Judge every statement of a sentence; a sentence without statements gives an empty tuple."""
    return tuple(_judge(statement, evidence) for statement in parse_claim(sentence))


def _judge(statement: Statement, evidence: RunEvidence) -> Judgement:
    found = _held(statement, evidence)
    if found.verdict is ClaimVerdict.CONTRADICTED and statement.beside:
        message = f"{found.message}; `{statement.beside}` beside it was not understood: the number may be of something else"
        return _answer(statement, ClaimVerdict.UNSUPPORTED, message, *found.evidence)
    if found.verdict is ClaimVerdict.CONTRADICTED or statement.kind in NO_FACTS:
        return found
    changed = next((launch for launch in evidence.scope if launch.broken), None)
    if changed is not None:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, f"launch {changed.launch}: {changed.broken}: it supports nothing")
    if statement.vague and found.verdict is ClaimVerdict.SUPPORTED:
        message = f"{found.message}; the claim leaves the number open"
        return _answer(statement, ClaimVerdict.UNSUPPORTED, message, *found.evidence)
    return found


def _held(statement: Statement, evidence: RunEvidence) -> Judgement:
    if statement.kind is Topic.NOT_READ:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "not understood: no record was compared with it")
    if statement.kind is Topic.INTENT:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "a plan or a target is not an event")
    if statement.kind is Topic.DENIAL:
        return _answer(
            statement, ClaimVerdict.UNSUPPORTED, "records show what was done; a negative statement cannot be verified"
        )
    if statement.kind is Topic.OTHER:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "no record can confirm or contradict this number")
    if statement.kind is Topic.DURATION:
        return _of_its_moment(statement, _judge_duration(statement, evidence), evidence)
    if statement.kind in (Topic.STEPS, Topic.TRAINED):
        return _judge_steps(statement, evidence)
    if statement.kind is Topic.LOSS:
        return _judge_loss(statement, evidence)
    if statement.kind in (Topic.TOKENS, Topic.SAMPLES, Topic.BYTES):
        return _of_its_moment(statement, _judge_volume(statement, evidence), evidence)
    per_launch = JUDGES[statement.kind]
    answers = [per_launch(statement, launch) for launch in evidence.scope]
    for verdict in (ClaimVerdict.CONTRADICTED, ClaimVerdict.UNSUPPORTED, ClaimVerdict.SUPPORTED):
        chosen = next((one for one in answers if one.verdict is verdict), None)
        if chosen is not None:
            return chosen
    return _answer(statement, ClaimVerdict.UNSUPPORTED, "no launch of this run recorded evidence")


def _of_its_moment(statement: Statement, found: Judgement, evidence: RunEvidence) -> Judgement:
    """A total where the sentence names an earlier moment may be the count of that moment, which no record has."""
    if statement.is_moment:  # it was reached
        reached = _answer(statement, ClaimVerdict.SUPPORTED, found.message, *found.evidence)
        return reached if found.verdict is ClaimVerdict.CONTRADICTED and _is_passed(statement, evidence) else found
    if all(_is_the_end(moment, evidence) for moment in statement.moments):
        return found
    message = f"{found.message}; the claim may count up to another moment"
    return _answer(statement, ClaimVerdict.UNSUPPORTED, message, *found.evidence)


def _is_passed(moment: Statement, evidence: RunEvidence) -> bool:
    """Whether the run went on to this moment or further."""
    return _held(replace(moment, high=math.inf, is_moment=False), evidence).verdict is ClaimVerdict.SUPPORTED


def _is_the_end(moment: Statement, evidence: RunEvidence) -> bool:
    """Whether a moment that the claim names ("after 262M tokens") is where the run stands."""
    if moment.kind is Topic.STEPS:
        return moment.admits(evidence.head_step)
    return _held(replace(moment, is_moment=False), evidence).verdict is ClaimVerdict.SUPPORTED


def _judge_parameters(statement: Statement, launch: LaunchEvidence) -> Judgement:
    models = launch.newest("model")
    whole = next((one for one in models.values() if _whole(one) is not None), None)
    if whole is None:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "no rank recorded a parameter count")
    count = _whole(whole)
    assert count is not None
    if statement.admits(count):
        return _answer(statement, ClaimVerdict.SUPPORTED, f"counted {count:,} in launch {launch.launch}", whole)
    message = f"counted {count:,} in launch {launch.launch}"
    message += _share_of(statement, count, len(models)) or _difference(statement, count)
    return _answer(statement, ClaimVerdict.CONTRADICTED, message, whole)


def _whole(one: Observation) -> int | None:
    """Return the size of the full model: counted before wrapping, or by formula. A rank's part does not count."""
    value = one.fields.get("counted")
    value = one.fields.get("logical") if value is None else value
    return value if isinstance(value, int) else None


def _share_of(statement: Statement, count: int, ranks: int) -> str:
    for size in sorted({ranks, 2, 4, 8, 16, 32, 64} - {0, 1}):
        if statement.admits(math.ceil(count / size)):
            return f"; the claim is 1/{size} of it: the part of one rank after sharding"
    return ""


def _difference(statement: Statement, count: float) -> str:
    assert statement.low is not None
    middle = statement.low if statement.high in (None, math.inf) else (statement.low + (statement.high or 0)) / 2
    return f" ({(count - middle) / middle:+.1%})" if middle else ""


def _judge_devices(statement: Statement, launch: LaunchEvidence) -> Judgement:
    processes = launch.newest("process")
    devices = {str(_device(one).get("id")): one for one in processes.values() if _device(one).get("id")}
    if not devices:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "no rank recorded its device")
    kinds = {str(_device(one).get("kind")) for one in devices.values()}
    refs = tuple(processes[rank] for rank in sorted(processes))
    found = f"launch {launch.launch}: {len(processes)} ranks on {len(devices)} distinct devices ({', '.join(sorted(kinds))})"
    if not _all_ranks(launch) or (len(devices) < len(processes) and any(not _device(one).get("id") for one in refs)):
        return _answer(statement, ClaimVerdict.UNSUPPORTED, f"{found}; not every rank recorded its device", *refs)
    meant = devices
    wanted = re.search(r"GPU|TPU|[A-Z]\d{1,3}", statement.text)
    if wanted:
        meant = {id_: one for id_, one in devices.items() if (_device(one).get("kind") == "xla") is (wanted.group() == "TPU")}
        meant = {id_: one for id_, one in meant.items() if _device(one).get("kind") != "cpu"}
        if not meant:
            none = "no TPU" if wanted.group() == "TPU" else "no GPU"
            return _answer(statement, ClaimVerdict.CONTRADICTED, f"{found}, {none}", *refs)
    named = re.search(rf"(?:{GPU_NAMES})(?![A-Z\d])", statement.text)
    if named and not all(_device(one).get("name") for one in meant.values()):
        return _answer(statement, ClaimVerdict.UNSUPPORTED, f"{found}; no record of which model they are", *refs)
    if named:
        names = {str(_device(one).get("name")) for one in meant.values()}
        meant = {id_: one for id_, one in meant.items() if _is_called(named.group(), str(_device(one)["name"]))}
        if not meant:
            return _answer(statement, ClaimVerdict.CONTRADICTED, f"{found}: {_join(names)}", *refs)
    idle = _idle_ranks(launch)
    if idle:
        found += f", idle in more than {IDLE_SHARE:.0%} of the samples: rank {', '.join(map(str, sorted(idle)))}"
    working = sum(one.rank not in idle for one in meant.values())
    verdict = ClaimVerdict.SUPPORTED if statement.admits(working) else ClaimVerdict.CONTRADICTED
    return _answer(statement, verdict, found, *refs)


def _all_ranks(launch: LaunchEvidence) -> bool:
    """Whether as many ranks recorded themselves as each says there are."""
    processes = launch.newest("process")
    sizes = {one.fields.get("world_size") for one in processes.values()}
    return sizes == {len(processes)} or not all(isinstance(size, int) and size > len(processes) for size in sizes)


def _is_called(wanted: str, name: str) -> bool:
    """Whether a device's name says this model: `A100` in `NVIDIA A100-SXM4-80GB`, not in `A1000`."""
    letters_and_digits = r"[\s-]*".join(re.findall(r"[a-z]+|\d+", wanted.lower()))
    return re.search(rf"\b{letters_and_digits}(?![a-z0-9])", name.lower()) is not None


def _device(one: Observation) -> Mapping[str, Any]:
    device = one.fields.get("device")
    return device if isinstance(device, Mapping) else {}


def _idle_ranks(launch: LaunchEvidence) -> dict[int, float]:
    """Return ranks whose device was idle in more than IDLE_SHARE of its samples, with that share."""
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
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "no rank recorded anything")
    sizes = {one.fields.get("world_size") for one in processes.values()}
    message = f"launch {launch.launch}: {len(processes)} ranks recorded, world size {_join(sizes)}"
    agreed = sizes == {len(processes)} and statement.admits(len(processes))
    return _answer(statement, ClaimVerdict.SUPPORTED if agreed else ClaimVerdict.CONTRADICTED, message, *processes.values())


def _judge_hosts(statement: Statement, launch: LaunchEvidence) -> Judgement:
    processes = launch.newest("process")
    hosts = {str(one.fields.get("host")) for one in processes.values()}
    if not hosts:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "no rank recorded its host")
    verdict = ClaimVerdict.SUPPORTED if statement.admits(len(hosts)) else ClaimVerdict.CONTRADICTED
    return _answer(statement, verdict, f"launch {launch.launch}: {len(hosts)} hosts", *processes.values())


def _judge_dataset(statement: Statement, launch: LaunchEvidence) -> Judgement:
    records = [one for one in launch.newest("data").values() if one.fields.get("dataset")]
    if not records:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "no rank recorded what it read")
    wanted = _plain(statement.word)
    names = {str(one.fields["dataset"]) for one in records}
    if len(records) < len(launch.newest("process")):
        message = f"launch {launch.launch}: not every rank recorded what it read"
        return _answer(statement, ClaimVerdict.UNSUPPORTED, message, *records)
    if not all(_is_of_dataset(statement.word, name) for name in names):
        known_name = re.search(rf"(?i:{CORPORA})|dataset|corpus", statement.text) is not None
        verdict = ClaimVerdict.CONTRADICTED if known_name else ClaimVerdict.UNSUPPORTED
        return _answer(statement, verdict, f"launch {launch.launch} read {_join(names)}", *records)
    size = max((one.fields.get("dataset_bytes") or 0 for one in records), default=0)
    known = KNOWN_BYTES.get(wanted)
    distinct = max((one.fields.get("distinct_samples") or 0 for one in records), default=0)
    if known and 0 < distinct < FEW_SAMPLES:
        message = f"launch {launch.launch}: only {distinct:,} distinct samples of a dataset with that name"
        return _answer(statement, ClaimVerdict.CONTRADICTED, message, *records)
    if known and 0 < size < CORPUS_FRACTION * known:
        message = f"launch {launch.launch}: {size:,} bytes of a dataset with that name; the corpus has {known:,}"
        return _answer(statement, ClaimVerdict.CONTRADICTED, message, *records)
    return _answer(statement, ClaimVerdict.SUPPORTED, f"launch {launch.launch} read {_join(names)}", *records)


def _judge_precision(statement: Statement, launch: LaunchEvidence) -> Judgement:
    return _judge_word(statement, launch, "precision", (PRECISIONS.get(statement.word, statement.word),))


def _judge_wrapper(statement: Statement, launch: LaunchEvidence) -> Judgement:
    word = statement.word.lower().replace("zero-", "zero")
    accepted = WRAPPERS.get("deepspeed" if word.startswith("zero") else word, (word,))
    found = _judge_word(statement, launch, "wrapper", accepted)
    if word.startswith("zero") and found.verdict is ClaimVerdict.SUPPORTED:
        message = f"{found.message}; no rank recorded its ZeRO stage"
        return _answer(statement, ClaimVerdict.UNSUPPORTED, message, *found.evidence)
    return found


def _judge_word(statement: Statement, launch: LaunchEvidence, key: str, accepted: Sequence[str]) -> Judgement:
    processes = launch.newest("process")
    records = [one for one in processes.values() if one.fields.get(key)]
    if not records or len(records) < len(processes):
        return _answer(statement, ClaimVerdict.UNSUPPORTED, f"{'not every' if records else 'no'} rank recorded its {key}")
    found = {str(one.fields[key]) for one in records}
    plain = {PRECISIONS.get(word.lower(), word.lower()) for word in found}
    verdict = ClaimVerdict.SUPPORTED if plain <= set(accepted) else ClaimVerdict.CONTRADICTED
    return _answer(statement, verdict, f"launch {launch.launch}: {key} {_join(found)}", *records)


def _judge_steps(statement: Statement, evidence: RunEvidence) -> Judgement:
    refs = tuple(launch.metrics_ref for launch in evidence.scope if launch.metrics_ref)
    if not refs:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "no step was logged")
    last = max(launch.last_step or 0 for launch in evidence.scope)
    head = evidence.head_step or last
    message = f"the lineage has {head:,} steps"
    if statement.kind is Topic.TRAINED:
        return _answer(statement, ClaimVerdict.SUPPORTED if head > 0 else ClaimVerdict.CONTRADICTED, message, *refs)
    reached = statement.low is not None and head >= statement.low and statement.is_moment
    verdict = ClaimVerdict.SUPPORTED if statement.admits(head) or reached else ClaimVerdict.CONTRADICTED
    return _answer(statement, verdict, message, *refs)


def _judge_duration(statement: Statement, evidence: RunEvidence) -> Judgement:
    """Judge the wall time of the lineage's launches, as their supervisors measured it."""
    wanted = {launch.launch for launch in evidence.scope}
    ends = [(one, end) for one, end in events_of(evidence.entries, LaunchEnd) if one.launch in wanted]
    seconds = {one.launch: end.duration_seconds for one, end in ends if end.duration_seconds is not None}
    if not seconds or set(seconds) != wanted:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "not every launch of the lineage has a recorded duration")
    total = sum(seconds.values())
    verdict = ClaimVerdict.SUPPORTED if statement.admits(total) else ClaimVerdict.CONTRADICTED
    message = f"{total / 3600:.2f} h in {len(seconds)} launches"
    return _answer(statement, verdict, message, *(one.id for one, _ in ends))


def _judge_loss(statement: Statement, evidence: RunEvidence) -> Judgement:
    with_loss = [launch for launch in evidence.scope if launch.last_loss is not None]
    if not with_loss:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, "no loss was logged")
    last = with_loss[-1].last_loss
    best = min(launch.best_loss for launch in with_loss if launch.best_loss is not None)
    assert last is not None
    message = f"last logged {last:.4g}, best {best:.4g}"
    said = statement.text.lower()
    is_best = re.match(r"best|lowest|minimum", said) is not None
    agrees = statement.admits(best if is_best else last)
    verdict = ClaimVerdict.SUPPORTED if agrees else ClaimVerdict.CONTRADICTED
    moments = [one for one in statement.moments if is_best or not _is_the_end(one, evidence)]
    if moments:
        return _judge_loss_then(statement, moments, with_loss, agrees or statement.admits(best), message)
    if not agrees and statement.admits(best) and not re.match(r"final|last", said):
        reached = re.search(r"down to|reached", said)
        verdict = ClaimVerdict.SUPPORTED if reached else ClaimVerdict.UNSUPPORTED
        message += "" if reached else "; the claim does not say that it is the best one"
    return _answer(statement, verdict, message, with_loss[-1].metrics_ref)


def _judge_loss_then(
    statement: Statement, moments: Sequence[Statement], launches: Sequence[LaunchEvidence], agrees_now: bool, message: str
) -> Judgement:
    """A loss where the sentence names earlier moments: that of the step, where it was logged and only one is named."""
    losses = {step: (loss, launch.metrics_ref) for launch in launches for step, loss in launch.losses.items()}
    step = moments[0].low if len(moments) == 1 and moments[0].kind is Topic.STEPS else None
    then = losses.get(int(step)) if step is not None else None
    if then is None:
        return _answer(statement, ClaimVerdict.UNSUPPORTED, f"{message}; at the moment that the claim names none is known")
    verdict = ClaimVerdict.UNSUPPORTED if agrees_now else ClaimVerdict.CONTRADICTED
    verdict = ClaimVerdict.SUPPORTED if statement.admits(then[0]) else verdict
    return _answer(statement, verdict, f"{then[0]:.4g} at step {step:.0f}; {message}", then[1])


def _judge_volume(statement: Statement, evidence: RunEvidence) -> Judgement:
    """Judge samples, tokens or bytes: counted in the loaders, summed over ranks and launches of the lineage."""
    key = statement.kind.value
    records = [one for launch in evidence.scope for one in launch.newest("data").values()]
    counted = [one for one in records if isinstance(one.fields.get(key), int)]
    ranks = sum(len(launch.newest("process")) for launch in evidence.scope)
    if not counted or len(counted) < ranks or not all(_all_ranks(launch) for launch in evidence.scope):
        return _answer(statement, ClaimVerdict.UNSUPPORTED, f"{'not every' if counted else 'no'} rank counted {key}")
    total = sum(int(one.fields[key]) for one in counted)
    verdict = ClaimVerdict.SUPPORTED if statement.admits(total) else ClaimVerdict.CONTRADICTED
    return _answer(statement, verdict, f"{total:,} {key} counted in {len(counted)} loaders", *counted)


def _answer(statement: Statement, verdict: ClaimVerdict, message: str, *evidence: Observation | str) -> Judgement:
    refs = tuple(one.ref if isinstance(one, Observation) else one for one in evidence)
    return Judgement(statement=statement, verdict=verdict, message=message, evidence=refs)


def _is_of_dataset(said: str, recorded: str) -> bool:
    """Whether the name as written is that of the record, or a part of it in whole words: `WikiText` of `wikitext-103/train`.

    A claim that says more than the record (`openwebtext` where `text` was read) is another name.
    """
    if _plain(said) == _plain(recorded):
        return True
    words, there = (re.findall(r"[a-z]+|\d+", name.lower()) for name in (said, recorded))
    words = [word for word in words if word != "the"]
    starts = range(len(there) - len(words) + 1)
    return bool(words) and any(there[start : start + len(words)] == words for start in starts)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _join(values: Sequence[Any] | set[Any]) -> str:
    return ", ".join(sorted(map(str, values)))


JUDGES: Mapping[Topic, Callable[[Statement, LaunchEvidence], Judgement]] = {
    Topic.PARAMETERS: _judge_parameters,
    Topic.DEVICES: _judge_devices,
    Topic.RANKS: _judge_ranks,
    Topic.HOSTS: _judge_hosts,
    Topic.DATASET: _judge_dataset,
    Topic.PRECISION: _judge_precision,
    Topic.WRAPPER: _judge_wrapper,
}


# --- Claims judged again, and numbers in notes

LONGEST_NOTE = 4000  # characters parsed, so that a note with a pasted log is not slow
FROM_RANKS = frozenset(
    (Topic.PARAMETERS, Topic.DEVICES, Topic.RANKS, Topic.HOSTS, Topic.DATASET, Topic.PRECISION, Topic.WRAPPER)
)


def recheck_claims(evidence: RunEvidence) -> Iterator[tuple[str, str]]:
    """Yield (entry id, sentence) for every claim that is contradicted now or whose verdict has changed."""
    for entry, claim in events_of(evidence.entries, Claim):
        text, before = claim.text, claim.verdict
        if not text:
            continue
        verdicts = {one.verdict for one in judge_claim(text, evidence)}
        failing = (ClaimVerdict.CONTRADICTED, ClaimVerdict.UNSUPPORTED)
        now = next((one for one in failing if one in verdicts), ClaimVerdict.SUPPORTED)
        if now.value != before:
            yield entry.id, f"claim `{text}` was {before} and is {now.value} now"
        elif now is ClaimVerdict.CONTRADICTED:
            yield entry.id, f"claim `{text}` is contradicted by the ranks' records"


def lint_note(paths: RunPaths, text: str) -> tuple[str, ...]:
    """Return warnings about statements in a note that the ranks' records contradict."""
    text = text[:LONGEST_NOTE]
    if not any(one.kind in FROM_RANKS for one in parse_claim(text)) or not paths.launches_dir.is_dir():
        return ()
    evidence = read_evidence(paths, read_journal(paths), metrics=False)
    contradicted = (one for one in judge_claim(text, evidence) if one.verdict is ClaimVerdict.CONTRADICTED)
    return tuple(f"warning: `{one.statement.text}`: {one.message}" for one in contradicted if one.statement.kind in FROM_RANKS)
