"""The flight envelope: what stops being true inside a run is said with its step; healthy trainings are quiet."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

import chronicle
from chronicle.journal.events import EntryKind, Incident
from chronicle.journal.reader import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.checks.check import ResumeRefused
from chronicle.resume.envelope import BreachKind
from chronicle.resume.envelope.flight import MOST_STEPS
from chronicle.resume.envelope.replicas import are_replicas, differing_ranks
from chronicle.resume.memory import Memory, RankDigest
from chronicle.resume.samples import ELEMENTS, Snapshot, part_of
from tests.guard.flights.bugs import BUGS, FURTHER, play
from tests.guard.flights.fly import attached, fly, loss_of, network
from tests.guard.flights.healthy import HEALTHY, play_healthy

ALONE = [name for name, bug in {**BUGS, **FURTHER}.items() if bug.plant is not None and not bug.ranks]
# the step at which it is told: at once what is asked at every step, in the window after the next save what is not
SOON = {"lr-by-hand": 61, "untied": 4, "half-in-evaluation": 4}


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """What another test of this process has compiled: the envelope looks at less where anything is (`compiled.py`)."""
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ALONE)
def test_a_public_silent_bug_is_named(name: str) -> None:
    """Each bug of the benchmark that needs one process is told, with one of its own kinds and no fault of the envelope."""
    bug = {**BUGS, **FURTHER}[name]
    flight = play(bug)
    assert flight is not None
    assert set(bug.kinds) & set(flight.told)
    assert flight.error == ""
    if name in SOON:
        assert (flight.told[bug.kinds[0]].seen or 0) <= SOON[name]


class Careful(torch.optim.SGD):
    """Skips a step whose gradients are not finite, as many trainers do."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        if all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None):
            super().step(closure)


@pytest.mark.parametrize("share", [1e-12, math.inf])
@pytest.mark.parametrize("begins", [1, 3, 11, 70])
def test_gradients_that_are_not_finite_are_told_with_the_step_at_which_they_began(
    tmp_path: Path, begins: int, share: float
) -> None:
    """Whatever share of the time the looks may take: with none of it one in fifty steps, with all of it one at every step.

    Where the step itself was not looked at, it is told that it may have been the first one.
    """
    model = network()
    optimizer = Careful(model.parameters(), lr=0.1)
    run = attached(tmp_path, model, optimizer)
    run.session.envelope.share_of_time = share

    def step(number: int) -> None:
        (loss_of(model) * (math.inf if number >= begins else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    breach = fly(run, begins + 3 * MOST_STEPS + 9, step).told[BreachKind.GRADIENTS]
    first = breach.step if breach.low is None else breach.low + 1
    assert breach.step is not None and first is not None and first <= begins <= breach.step
    assert (breach.seen or 0) <= begins + (3 if share > 1 else 3 * MOST_STEPS)


def test_a_scale_that_is_searched_for_two_steps_is_no_incident(tmp_path: Path) -> None:
    model = network()
    optimizer = Careful(model.parameters(), lr=0.1)
    run = attached(tmp_path, model, optimizer)

    def step(number: int) -> None:
        (loss_of(model) * (math.inf if number % 10 in (1, 2) else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert fly(run, 60, step).told == {}


# above; by a resume (`test_first_gradient.py`); by two ranks (`test_ranks_that_drift_apart_are_named_and_equal_ones_are_not`)
ELSEWHERE = (BreachKind.GRADIENTS, BreachKind.UPDATE, BreachKind.REPLICAS)


@pytest.mark.parametrize("kind", [kind for kind in BreachKind if kind not in ELSEWHERE])
def test_every_kind_of_breach_is_told_of_a_bug_that_does_it(kind: BreachKind) -> None:
    """The list is that of the code: a new kind needs a bug, and a kind that nothing can raise is none."""
    flights = (play(bug) for bug in {**BUGS, **FURTHER}.values() if kind in bug.kinds and bug.plant and not bug.ranks)
    assert any(flight is not None and kind in flight.told for flight in flights)


@pytest.mark.parametrize("name", [name for name, training in HEALTHY.items() if training.quick])
def test_a_healthy_training_is_quiet(name: str) -> None:
    """Nothing is told, not even a notice, and the envelope did not fail."""
    flight = play_healthy(name, seed=0)
    assert (flight.told, flight.error) == ({}, "")


@pytest.mark.slow
@pytest.mark.sample
def test_ranks_that_drift_apart_are_named_and_equal_ones_are_not() -> None:
    """Two gloo ranks; each cause is told at a comparison, at the latest at the save."""
    from tests.guard.flights.ranks import STEPS, fly_ranks

    assert fly_ranks("healthy").told == {}
    for name in (name for name, bug in BUGS.items() if bug.ranks):
        flight = play(BUGS[name])
        assert flight is not None
        breach = next(flight.told[kind] for kind in BUGS[name].kinds if kind in flight.told)
        assert breach.seen is not None and breach.seen <= STEPS


def test_layer_that_is_replaced_while_the_run_trains_is_named(tmp_path: Path) -> None:
    """The optimizer keeps the parameters of the old layer, and the new ones are never trained."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = attached(tmp_path, model, optimizer)

    def step(number: int) -> None:
        loss_of(model).backward()
        if number == 3:  # right before a look, when the new layer has no gradient yet
            model[3] = torch.nn.Linear(16, 1)
        optimizer.step()
        optimizer.zero_grad()

    assert list(fly(run, 120, step).told) == [BreachKind.ORPHANS]


# ---- spoilt weights --------------------------------------------------------------------------------------------------


def spoil(run_dir: Path, checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Train with checkpoints at steps 4 and 8, and a NaN loss from step 6 on; returns what was printed."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    run = chronicle.attach(run_dir, model, optimizer)
    run.session.envelope.share_of_time = math.inf  # a look at every step
    for number in range(1, 9):
        optimizer.zero_grad()
        loss = loss_of(model)
        (loss * math.nan if number >= 6 else loss).backward()
        optimizer.step()
        if number % 4 == 0:
            directory = checkpoints / f"checkpoint-{number}"
            directory.mkdir(parents=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, directory / "state.pt")
            run.saved(directory)
    run.session.sealer.finish()
    run.session.envelope.end()
    return capsys.readouterr().err


def test_a_save_of_nan_weights_is_marked_and_the_line_to_type_is_printed(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The manifest is written, says that the state is spoilt, and names the step; the save before it is the target."""
    said = spoil(run_dir, tmp_path / "checkpoints", capsys)
    good, bad = (
        json.loads((tmp_path / "checkpoints" / f"checkpoint-{step}" / "chronicle-manifest.json").read_text())["memory"]
        for step in (4, 8)
    )
    assert "spoilt" not in good
    assert bad["spoilt"].startswith("weights-not-finite since step 6:")
    assert "chronicle rollback --to 4 --run tr" in said
    assert said.count("weights-not-finite") == 1
    incidents = [e for e in read_journal(RunPaths(run_dir)).entries if e.kind == EntryKind.INCIDENT]
    assert [(Incident.of(e).kind, Incident.of(e).tier, Incident.of(e).onset_step) for e in incidents] == [
        ("weights-not-finite", "propose", 6)
    ]


def test_a_spoilt_state_is_not_resumed_from(tmp_path: Path, run_dir: Path) -> None:
    """The description in the state says it, so a plain loop that loads it is refused before its first step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    run = chronicle.attach(run_dir, model, optimizer)
    for factor in (1.0, math.nan):
        optimizer.zero_grad()
        (loss_of(model) * factor).backward()
        optimizer.step()
    state = optimizer.state_dict()
    run.session.envelope.end()
    again = network()
    resumed = torch.optim.AdamW(again.parameters())
    chronicle.attach(run_dir, again, resumed)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    resumed.zero_grad()
    loss_of(again).backward()
    with pytest.raises(ResumeRefused, match="sound"):
        resumed.step()


def test_memory_with_nan_is_json() -> None:
    """A number that JSON lacks is written as text and read again."""
    from chronicle.resume.memory import ParamGroup

    memory = Memory(groups=(ParamGroup(lr=math.nan),))
    record = json.loads(json.dumps(memory.to_json(), allow_nan=False))
    found = Memory.from_json(record).groups[0].lr
    assert found is not None and math.isnan(found)


# ---- replicas, by value ----------------------------------------------------------------------------------------------


def digests(*weights: str) -> list[RankDigest]:
    return [RankDigest(rank=rank, weights=one) for rank, one in enumerate(weights)]


def test_the_ranks_that_differ_from_most_are_named() -> None:
    """With two ranks rank 0 counts as right; a rank without weights is not compared."""
    assert differing_ranks(digests("a", "b", "b", "b")) == (0,)
    assert differing_ranks(digests("a", "b")) == (1,)
    assert differing_ranks(digests("a", "", "a")) == ()


def test_sharded_and_tensor_parallel_weights_are_no_replicas() -> None:
    """Megatron marks a parameter that is a part; DeepSpeed marks a shard."""
    model = network()
    assert are_replicas([model], {"sharding": "replicated"})
    assert not are_replicas([model], {"sharding": "fsdp"})
    assert not are_replicas([model], {})
    next(model.parameters()).tensor_model_parallel = True  # type: ignore[attr-defined]
    assert not are_replicas([model], {"sharding": "replicated"})


# ---- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(100.0),
        torch.arange(100.0).reshape(10, 10).t(),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(()),
        torch.zeros(3, dtype=torch.bfloat16),
    ],
)
def test_a_sample_is_small_and_of_the_tensor(tensor: torch.Tensor) -> None:
    """At most `ELEMENTS` elements, whatever the strides; a change of every element is seen."""
    part = part_of(tensor)
    assert 1 <= len(part) <= ELEMENTS
    before = Snapshot([tensor]).rows()[0]
    tensor += 1
    assert (Snapshot([tensor]).rows()[0] != before).all()


def test_empty_sparse_and_absent_tensors_have_no_sample() -> None:
    """They keep their place."""
    snapshot = Snapshot([None, torch.zeros(0), torch.eye(3).to_sparse(), torch.ones(2)])
    assert [None if row is None else list(row) for row in snapshot.rows()] == [None, None, None, [1.0, 1.0]]


# ---- a part that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["before_step", "_begin", "_look_at_structure", "_look_at_weights"])
def test_a_fault_of_the_envelope_is_recorded_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Every hook is taken away, the fault is said, and no step is lost."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attached(tmp_path, model, optimizer)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(run.session.envelope, method, fail)
    steps = []

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        steps.append(number)

    flight = fly(run, 5, step)
    assert steps == [1, 2, 3, 4, 5]
    assert "planted" in flight.error
    assert run.session.envelope.off
    assert not any(p._backward_hooks for p in model.parameters())  # type: ignore[attr-defined]
    assert not model._forward_hooks


def test_losses_are_the_same_with_and_without_the_envelope(tmp_path: Path) -> None:
    """Nothing is changed and no random number is drawn."""

    def losses(prepare: Callable[[Any, Any], Any]) -> list[float]:
        torch.manual_seed(1)
        model = network(dropout=0.2)
        optimizer = torch.optim.AdamW(model.parameters())
        run = prepare(model, optimizer)
        found = []
        for _ in range(12):
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        if run is not None:
            run.session.envelope.end()
        return found

    assert losses(lambda model, optimizer: attached(tmp_path, model, optimizer)) == losses(lambda model, optimizer: None)


def test_propose_reads_a_breach_from_the_journal(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line of the log shows it; the proposal goes to the save before the onset and not to the spoilt one."""
    from chronicle.watch.scan import scan_run

    spoil(run_dir, tmp_path / "checkpoints", capsys)
    proposal = scan_run(RunPaths(run_dir), tmp_path / "checkpoints").proposal
    assert proposal is not None
    assert (proposal.onset_step, proposal.before_step) == (6, 5)
    assert BreachKind.POISONED.value in proposal.reasons[0]


def test_the_live_watch_proposes_on_a_breach_that_no_log_shows(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one point was logged; the event has the tier on which a launch is stopped, and it is reported once."""
    from chronicle.journal.writer import JournalWriter
    from chronicle.watch.live import LiveWatch

    spoil(run_dir, tmp_path / "checkpoints", capsys)
    paths, said = RunPaths(run_dir), list[str]()
    entries = read_journal(paths).entries
    launch = next(entry.launch for entry in entries if entry.kind == EntryKind.INCIDENT)
    watch = LiveWatch(paths, launch or 1, JournalWriter(paths), checkpoints_dir=tmp_path / "checkpoints", say=said.append)
    events = watch.poll()
    assert [(event.kind.value, event.tier.value, event.onset_step) for event in events] == [
        ("weights-not-finite", "propose", 6)
    ]
    assert watch.poll() == []
    assert not any("failed" in line for line in said)


@pytest.mark.parametrize(
    ("onset", "tier", "status", "joins"),
    [
        (40, "propose", "diverging", True),
        (40, "propose", "recovered", False),
        (41, "propose", "diverging", False),  # the breach may have come first
        (30, "notice", "partial", True),  # a spike shortly before
        (-80, "notice", "partial", False),
        (-80, "propose", "diverging", True),
    ],
)
def test_a_breach_that_trouble_of_the_loss_led_to_is_of_its_cluster(
    tmp_path: Path, onset: int, tier: str, status: str, joins: bool
) -> None:
    """A save between a spike and the weights that are no numbers holds steps of the spike: it is not proposed."""
    from chronicle.journal.events import Incident
    from chronicle.journal.writer import JournalWriter
    from chronicle.watch.advice import breach_events
    from rollback.detect import Event, Kind, Status, Tier

    spike = Event(
        id=3, kind=Kind.INSTANT_SPIKE, tier=Tier(tier), status=Status(status), onset_step=onset, onset_low_step=onset,
        onset_row=None, onset_low_row=None, alarm_step=onset, alarm_row=0, cluster=2, channels=("loss",),
    )  # fmt: skip
    said = Incident(kind="weights-not-finite", tier="propose", onset_step=50, onset_low_step=41, channels=("guard",))
    with JournalWriter(RunPaths(tmp_path / "logs" / "small")) as writer:
        entry = writer.write(said, step=50, title="spoilt")
    (breach,) = breach_events([entry], None, after=[spike])
    assert (breach.cluster == spike.cluster) == joins
    assert breach.id == 4


def test_verify_names_a_spoilt_checkpoint() -> None:
    """F11, by the guard's word in the manifest: an error, and one that forbids a rollback."""
    from rollback.checkpoint.manifest import Manifest
    from rollback.checks.verify import FATAL, check_sound
    from rollback.errors import Severity

    spoilt = {"spoilt": "weights-not-finite since step 6"}
    (finding,) = check_sound(Manifest(step=8, files=(), digests="complete", memory=spoilt))
    assert (finding.check, finding.severity) == ("F11", Severity.ERROR)
    assert finding.check in FATAL
    assert check_sound(Manifest(step=8, files=(), digests="complete", memory={})) == []


def test_a_rollback_of_a_spoilt_run_goes_to_a_sound_save() -> None:
    """A candidate that the journal calls spoilt is left out although its files are intact."""
    from rollback.detect import Event, Kind, Status, Tier
    from rollback.propose import CandidateCheckpoint, propose

    breach = Event(
        id=0, kind=Kind.REPLICAS, tier=Tier.PROPOSE, status=Status.OPEN, onset_step=50, onset_low_step=41, onset_row=None,
        onset_low_row=None, alarm_step=50, alarm_row=0,
    )  # fmt: skip
    saves = [CandidateCheckpoint(step=step, verified=True, healthy=step != 30) for step in (10, 20, 30, 41, 50)]
    proposal = propose([breach], saves)
    assert proposal is not None
    assert (proposal.target_step, proposal.before_step) == (20, 40)
