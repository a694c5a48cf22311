"""Step prints: equal steps have equal prints, and each kind of difference shows in its own field from its step on."""

import math
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader

import chronicle
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.prints import launch_facts as facts
from chronicle.prints import step_prints
from chronicle.prints.checksums import checksum, sums_of
from chronicle.prints.launch_facts import changed_facts, read_facts
from chronicle.prints.ring import (
    HEADER_BYTES,
    PRINT_BYTES,
    Print,
    Ring,
    RingWriter,
    SaveMark,
    SeenParts,
    read_ring,
    ring_path,
    rings_of,
)
from chronicle.prints.step_prints import PRINTS_VARIABLE, StepPrints
from chronicle.resume.contract import Options
from chronicle.resume.events import BatchEntered, Gradient, GradientReady, StepBegins
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.samples import digest_of
from chronicle.resume.training import Training

OF_MODEL = SeenParts.BATCH | SeenParts.GRADIENT | SeenParts.WEIGHTS
WHOLE = OF_MODEL | SeenParts.GENERATORS | SeenParts.OPTIONS
FIELDS = ("torch", "batch", "labels", "options", "gradient", "weights")


class Loop:
    """A plain loop whose batches depend on the step alone, with dropout."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, prints: str = "every") -> None:
        self.launch_dir = directory / "launch"
        monkeypatch.setenv("CHRONICLE_LAUNCH_DIR", str(self.launch_dir))
        monkeypatch.setenv(PRINTS_VARIABLE, prints)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.run = chronicle.attach(directory / "run", self.model, self.optimizer)
        self.forward: Callable[[Any], Any] = lambda x: self.model(x)
        self.step = 0
        self.before: Callable[[int], None] = lambda step: None
        self.data: Callable[[int, Any], Any] = lambda step, x: x
        self.gradient: Callable[[int], None] = lambda step: None
        self.target: Callable[[int], float] = lambda step: 0.0

    def train(self, num_steps: int) -> "Loop":
        for _ in range(num_steps):
            self.step += 1
            self.before(self.step)
            for part in range(2):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * self.step + part))
                ((self.forward(self.data(self.step, x)) - self.target(self.step)).square().mean() / 2).backward()
            self.gradient(self.step)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def ring(self) -> Ring:
        self.run.session.data.finish()
        self.run.session.prints.finish()
        return read_ring(ring_path(self.launch_dir, 0))


def test_loss_and_norm_are_kept_as_they_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHRONICLE_RUN_DIR", str(tmp_path / "run"))  # as `chronicle run` does: else nothing is logged
    monkeypatch.setenv("CHRONICLE_RUN", "run")
    loop = Loop(tmp_path, monkeypatch)
    for norm in (0.1, float("nan"), float("inf"), None):
        loop.train(1)
        loop.run.log(loss=1 / 3, **({} if norm is None else {"grad_norm": norm}))
    one, two, three, four = loop.ring().steps().values()
    assert one.loss == 1 / 3 and one.size == torch.tensor(0.1).item() and math.isnan(two.size) and three.size > 3e38
    assert all(SeenParts.NORM in each.seen for each in (one, two, three)) and SeenParts.NORM not in four.seen


@pytest.mark.parametrize("restored", [False, True], ids=["kept", "put back"])
def test_an_lr_that_is_changed_after_the_step_has_begun_is_another_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored: bool
) -> None:
    """Hooks of scripts (Lightning's `on_before_optimizer_step`) come late: the update goes by what they left."""

    def back(optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2

    def halves(loop: Loop) -> None:
        def late(optimizer: Any, *_: Any) -> None:
            optimizer.param_groups[0]["lr"] = 5e-3 if loop.step == 7 else 1e-2

        loop.optimizer.register_step_pre_hook(late)

    one = Loop(tmp_path / "a", monkeypatch).train(10).ring()
    other = Loop(tmp_path / "b", monkeypatch)
    if restored:
        other.optimizer.register_step_post_hook(back)
    other.train(1)
    halves(other)
    two = other.train(9).ring()
    assert first_difference(one, two) == (7, ["options", "weights"])
    assert (one.steps()[7].lr, two.steps()[7].lr) == pytest.approx((1e-2, 5e-3))


def test_what_an_optimizer_changes_itself_is_no_option_of_its_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some count, or guess a distance, in their groups: a broken gradient would look like another setting."""

    class Guessing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            done = super().step(closure)
            group = self.param_groups[0]
            group["guess"] = sum(float(p.grad.abs().sum()) for p in group["params"])
            return done

    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)  # torch hooks the step of this class, too, from now on
    monkeypatch.setattr(torch.optim, "AdamW", Guessing)
    rings = []
    for name in ("a", "b"):
        loop = Loop(tmp_path / name, monkeypatch)
        if name == "b":
            loop.gradient = lambda step, loop=loop: loop.model[0].weight.grad.mul_(2.0) if step == 5 else None  # type: ignore[misc]
        rings.append(loop.train(6).ring())
        assert loop.run.session.step == 6, "a step within a step is none"
    assert first_difference(*rings) == (5, ["gradient", "weights"])


class Ticks:
    """A clock of which each look takes as long as a part of a print, and each step as long as it is told."""

    def __init__(self, loop: Loop, a_step: float) -> None:
        self.now, loop.run.session.prints._clock = 1.0, self
        loop.before = lambda step: setattr(self, "now", self.now + a_step)

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


def test_ranks_whose_steps_take_other_times_have_printed_steps_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank finds its own distance; where these were any number, 2 of 45 steps of two ranks were common ones."""
    monkeypatch.setattr(step_prints, "CREDIT", 0.0)
    printed = []
    for number, a_step in enumerate((1.6e-3, 0.7e-3, 0.2e-3)):
        loop = Loop(tmp_path / str(number), monkeypatch, prints="")
        Ticks(loop, a_step)
        printed.append({step for step in loop.train(100).ring().steps() if step > 16})
    assert all(later < earlier for earlier, later in pairwise(printed)) and len(printed[-1]) > 2
    assert set.intersection(*printed) == printed[-1]


def first_difference(one: Ring, other: Ring) -> tuple[int, list[str]]:
    """The first step whose prints differ, and in which fields."""
    ours, theirs = one.steps(), other.steps()
    assert ours.keys() == theirs.keys()
    for step in sorted(ours):
        fields = [name for name in FIELDS if getattr(ours[step], name) != getattr(theirs[step], name)]
        if fields:
            return step, fields
    return 0, []


def test_equal_launches_have_equal_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Loop(tmp_path / "a", monkeypatch).train(12).ring()
    other = Loop(tmp_path / "b", monkeypatch).train(12).ring()
    assert first_difference(one, other) == (0, [])
    assert sorted(one.steps()) == list(range(1, 13))
    assert all(one.steps()[step].seen == WHOLE and one.steps()[step].batches == 2 for step in one.steps())
    assert [begin.step for begin in one.begins()] == [0]
    assert PRINT_BYTES <= 64


class Closures(Loop):
    """The same, and the optimizer calls model and backward pass inside of its step."""

    def train(self, num_steps: int) -> "Loop":
        for _ in range(num_steps):
            self.step += 1
            self.before(self.step)

            def closure() -> torch.Tensor:
                self.optimizer.zero_grad()
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.step))
                loss = self.model(self.data(self.step, x)).square().mean()
                loss.backward()
                self.gradient(self.step)
                return loss.detach()

            self.optimizer.step(closure)
        return self


def test_a_step_that_calls_the_model_inside_has_its_own_batch_gradient_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a resumed launch that takes one step the batch was in no print, and its weights were those before the step."""
    rings = [Closures(tmp_path / name, monkeypatch).train(steps).ring() for name, steps in (("a", 3), ("b", 1))]
    assert all(one.seen == WHOLE and one.batches == 1 for ring in rings for one in ring.steps().values())
    first, alone = (ring.steps()[1] for ring in rings)
    assert [getattr(first, name) for name in FIELDS] == [getattr(alone, name) for name in FIELDS]
    weights = [one.weights for one in (*rings[0].begins(), *rings[0].steps().values())]
    assert len(set(weights)) == 4, "the weights of a step are those after it"


def test_a_closure_that_comes_after_a_first_backward_pass_is_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`optimizer.step(lambda: loss)`, or a second look inside: batch, gradient and weights are those of the step."""

    class Later(Loop):
        looks = False

        def train(self, num_steps: int) -> "Loop":
            for step in range(1, num_steps + 1):
                x = torch.full((4, 8), float(step))
                self.model(x).square().mean().backward()

                def closure(x: Any = x) -> Any:
                    if self.looks:
                        self.model(x + 1).square().mean().backward()
                    return None

                self.optimizer.step(closure)
                self.optimizer.zero_grad()
            return self

    for looks in (False, True):
        loop = Later(tmp_path / str(looks), monkeypatch)
        loop.looks = looks
        ring = loop.train(4).ring()
        steps = ring.steps()
        assert all(one.seen == WHOLE and one.batches == 1 + looks for one in steps.values())
        assert len({one.weights for one in (*ring.begins(), *steps.values())}) == 5


def test_a_batch_that_comes_before_a_step_with_a_closure_is_of_that_step(tmp_path: Path) -> None:
    """Lightning hands the batch over, and then calls the model inside of the step. A resume has the same prints."""

    def take(directory: Path, steps: range) -> dict[int, Print]:
        environ = {PRINTS_VARIABLE: "every", "CHRONICLE_LAUNCH_DIR": str(directory)}
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        live = LiveState(models=(model,), optimizers=(optimizer,))
        training = Training(lambda: live, Options(run_dir=directory), environ)
        training.trains(live)
        prints = StepPrints(training)
        for step in steps:
            batch = torch.full((3, 2), float(step))
            prints.batch_entered(BatchEntered(batch=batch))
            prints.step_begins(StepBegins(optimizer=optimizer, number=step, gradient=Gradient.TOLD))
            model(batch).sum().backward()
            prints.gradient_ready(GradientReady(optimizer=optimizer, gradient=Gradient.TOLD))
            optimizer.zero_grad()
        prints.finish()
        return read_ring(ring_path(directory, 0)).steps()

    whole, resumed = take(tmp_path / "a", range(1, 6)), take(tmp_path / "b", range(3, 6))
    assert len({one.batch for one in whole.values()}) == 5 and all(one.batches == 1 for one in whole.values())
    assert all((whole[step].batch, whole[step].gradient) == (one.batch, one.gradient) for step, one in resumed.items())


def test_the_weights_that_a_launch_begins_with_are_those_before_its_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script moves them for a second look at the gradient (SAM), and brings them back but for the last bits."""
    plain = Loop(tmp_path / "a", monkeypatch).train(1).ring()
    loop = Loop(tmp_path / "b", monkeypatch)
    weight = loop.model[2].weight

    def there_and_back(step: int) -> None:
        weight.data.add_(0.3).sub_(0.3)

    loop.gradient = there_and_back
    moved = loop.train(1).ring()
    assert moved.begins()[0].weights == plain.begins()[0].weights
    assert moved.steps()[1].weights != plain.steps()[1].weights


def _flip(tensor: torch.Tensor, place: int = 10) -> None:
    """One bit of one element, in its exponent."""
    flat = tensor.detach().view(-1).view(torch.int32)
    flat[place] ^= 1 << 25


@pytest.mark.parametrize("kind", [Loop, Closures])
@pytest.mark.parametrize("what", ["batch", "gradient", "weights", "generators", "options"])
def test_a_difference_shows_in_its_own_field_first(
    what: str, kind: type[Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = kind(tmp_path / "a", monkeypatch).train(9).ring()
    loop = kind(tmp_path / "b", monkeypatch)
    model, group = loop.model, loop.optimizer.param_groups[0]
    if what == "batch":
        loop.data = lambda step, x: x + 1 if step == 5 else x
    elif what == "gradient":
        loop.gradient = lambda step: _flip(model[2].weight.grad) if step == 5 else None
    elif what == "weights":
        loop.before = lambda step: _flip(model[2].weight) if step == 6 else None
    elif what == "generators":
        loop.before = lambda step: torch.manual_seed(1) and None if step == 5 else None
    else:
        loop.before = lambda step: group.update(lr=2e-2) if step == 5 else None
    step, fields = first_difference(clean, loop.train(9).ring())
    name = {"generators": "torch"}.get(what, what)
    assert (step, fields[0]) == (5, name), fields


def test_labels_that_no_print_holds_show_in_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They never enter the model."""
    clean = Loop(tmp_path / "a", monkeypatch).train(6).ring().steps()[5]
    loop = Loop(tmp_path / "b", monkeypatch)
    loop.target = lambda step: 1.0 if step == 5 else 0.0
    labelled = loop.train(6).ring().steps()[5]
    assert clean.batch == labelled.batch and clean.gradient != labelled.gradient


def test_a_model_that_is_called_in_a_transform_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of each sample (`torch.func`): what the model takes and gives there are wrapped tensors."""

    class EachSample(Loop):
        def train(self, num_steps: int) -> "Loop":
            self.model[1].p = 0.0  # random numbers are not drawn under `vmap`
            for _ in range(num_steps):
                self.step += 1
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.step))

                def loss(weights: Any, row: Any, target: Any) -> torch.Tensor:
                    given = torch.func.functional_call(self.model, weights, (row[None],))
                    return (given - target).square().mean()

                weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
                target = torch.full((4,), self.target(self.step))
                each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, self.data(self.step, x), target)
                for name, weight in self.model.named_parameters():
                    weight.grad = each[name].mean(0)
                self.optimizer.step()
            return self

    clean = EachSample(tmp_path / "a", monkeypatch).train(4).ring().steps()
    assert all(one.seen & OF_MODEL == OF_MODEL for one in clean.values())
    loop = EachSample(tmp_path / "b", monkeypatch)
    loop.target = lambda step: 1.0 if step == 3 else 0.0
    labelled = loop.train(4).ring().steps()[3]
    assert clean[3].batch == labelled.batch and clean[3].gradient != labelled.gradient
    loop = EachSample(tmp_path / "c", monkeypatch)
    loop.data = lambda step, x: x + 1 if step == 3 else x
    assert loop.train(4).ring().steps()[3].batch != clean[3].batch
    assert not list(read_journal(RunPaths(tmp_path / "a" / "run")).of_kind("guard.fault"))


def test_parameters_that_the_optimizer_steps_later_are_in_the_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that grew: the optimizer is the same, its parameters are others."""

    def grown(directory: Path, factor: float) -> Ring:
        loop = Loop(directory, monkeypatch)
        wide = torch.nn.Sequential(torch.nn.Linear(8, 128), torch.nn.Linear(128, 1))

        def before(step: int) -> None:
            if step == 4:
                loop.model = wide
                loop.optimizer.param_groups[0]["params"] = list(wide.parameters())
            if step == 6:
                wide[0].weight.data.mul_(factor)

        loop.before = before
        return loop.train(8).ring()

    one, other = grown(tmp_path / "a", 1.0), grown(tmp_path / "b", 1.5)
    differ = [step for step, own in one.steps().items() if own.weights != other.steps()[step].weights]
    assert differ == [5, 6, 7, 8]  # the weights of a step are read when the next batch enters


def test_a_resume_begins_with_the_weights_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Loop(tmp_path / "a", monkeypatch)
    first.train(6)
    state = {"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict(), "rng": torch.get_rng_state()}
    torch.save(state, tmp_path / "step-6.pt")
    record = first.train(4).ring()
    again = Loop(tmp_path / "b", monkeypatch)
    state = torch.load(tmp_path / "step-6.pt", weights_only=True)
    again.model.load_state_dict(state["model"])
    again.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    again.step = 6
    ring = again.train(4).ring()
    begin = ring.begins()[-1]
    assert (begin.step, begin.weights) == (6, record.steps()[6].weights)
    for step in range(7, 11):
        for name in FIELDS:
            assert getattr(ring.steps()[step], name) == getattr(record.steps()[step], name), (step, name)


def test_off_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, monkeypatch, prints="off").train(3)
    loop.run.session.prints.finish()
    assert rings_of(loop.launch_dir) == {}


def test_an_error_of_the_prints_is_recorded_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RingWriter, "add", broken)
    loop = Loop(tmp_path, monkeypatch).train(6)
    assert loop.step == 6
    assert not loop.run.session.prints.on
    faults = [entry.data for entry in read_journal(RunPaths(tmp_path / "run")).of_kind("guard.fault")]
    assert [fault["where"] for fault in faults] == ["step print"]


def test_prints_of_small_steps_are_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_prints, "CREDIT", 0.0)
    ring = Loop(tmp_path, monkeypatch, prints="").train(40).ring()
    thinned = len(ring.steps())
    assert set(range(1, 9)) <= ring.steps().keys()
    assert thinned < 40
    batches = {one.batches for one in ring.steps().values()}
    assert batches == {2}  # those of steps between two prints belong to none


@pytest.mark.parametrize(("credit", "least"), [(0.0, 8), (1e-4, 12)])
def test_the_steps_after_a_save_are_all_printed_as_long_as_their_credit_lasts(
    credit: float, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relaunch takes them again first, from that save."""
    monkeypatch.setattr(step_prints, "CREDIT", credit)
    loop = Loop(tmp_path, monkeypatch, prints="")
    Ticks(loop, 1e-6)
    loop.train(80)
    torch.save({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}, tmp_path / "step-80.pt")
    steps = loop.train(40).ring().steps().keys()
    assert set(range(81, 81 + least)) <= steps
    assert len(steps & set(range(50, 81))) <= 1 and len(steps & set(range(110, 121))) <= 1


def test_the_steps_after_a_save_of_another_rank_are_all_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mostly one rank saves: the others had no print of the steps after it, so that no relaunch could compare them."""
    monkeypatch.setattr(step_prints, "CREDIT", 0.0)
    loop = Loop(tmp_path, monkeypatch, prints="")
    Ticks(loop, 1e-6)
    loop.train(80)
    SaveMark(tmp_path / "launch").set(80)
    steps = loop.train(40).ring().steps().keys()
    assert set(range(81, 89)) <= steps and len(steps & set(range(90, 121))) <= 1


def test_facts_name_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_started_with", lambda: os.environ)  # this process was started without them
    monkeypatch.setenv("MY_SCALE", "1")
    monkeypatch.setenv("MY_API_KEY", "s3cret")
    one = Loop(tmp_path / "a", monkeypatch).train(1)
    monkeypatch.setenv("MY_SCALE", "2")
    other = Loop(tmp_path / "b", monkeypatch).train(1)
    before, after = read_facts(one.launch_dir), read_facts(other.launch_dir)
    assert before is not None and after is not None
    assert [(one.kind, one.name) for one in changed_facts(before, after, None)] == [("environment", "MY_SCALE")]
    assert "MY_API_KEY" not in before["environment"]
    assert any(path.endswith("test_prints.py") for path in before["code"])


# ---- the file ----------------------------------------------------------------------------------------------------------


def write(path: Path, steps: range, capacity: int = 8) -> None:
    writer = RingWriter(path, {"rank": 0}, capacity=capacity)
    for step in steps:
        writer.add(Print(step=step, seen=SeenParts.BATCH, batches=1, batch=step))
    writer.close()


def test_a_ring_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "prints-0.ring"
    write(path, range(1, 21))
    assert [one.step for one in read_ring(path).prints] == list(range(13, 21))
    assert path.stat().st_size == HEADER_BYTES + 8 * PRINT_BYTES
    write(path, range(21, 24))  # a further attempt of the same launch
    assert [one.step for one in read_ring(path).prints] == list(range(16, 24))


def test_a_print_that_was_cut_is_none(tmp_path: Path) -> None:
    path = tmp_path / "prints-0.ring"
    write(path, range(1, 5))
    blob = bytearray(path.read_bytes())
    blob[HEADER_BYTES + 2 * PRINT_BYTES + 20] ^= 1
    path.write_bytes(bytes(blob[:-10]))
    assert [one.step for one in read_ring(path).prints] == [1, 2]
    assert Print.unpack(Print(step=3, loss=1.5).pack()) == Print(step=3, loss=1.5)
    normed = Print.unpack(Print(step=3, weights=1 << 32 | 7, size=0.75, loss=1.5).pack())
    assert normed is not None and (normed.weights, normed.size, normed.seen) == (7, 0.75, SeenParts.WEIGHTS | SeenParts.NORM)


def test_a_file_of_another_kind_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "prints-0.ring").write_text("nothing\n")
    with pytest.raises(chronicle.errors.ChronicleError, match="holds no step prints"):
        rings_of(tmp_path)


def test_labels_of_a_loader_are_part_of_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels enter the loss and not the model: a print that does not know them says so.

    A loader of Accelerate copies what it hands over to its device, from one name of the CPU to another; a loop may cast it.
    """

    def train(directory: Path, labels: torch.Tensor, by_loader: str) -> Ring:
        monkeypatch.setenv("CHRONICLE_LAUNCH_DIR", str(directory / "launch"))
        monkeypatch.setenv(PRINTS_VARIABLE, "every")
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3, dtype=torch.float64 if by_loader == "cast" else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = chronicle.attach(directory / "run", model, optimizer)
        rows = torch.arange(32.0).view(8, 4)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, labels), batch_size=2)
        if by_loader == "rows":
            loader = zip(torch.utils.data.DataLoader(rows, batch_size=2), labels.view(4, 2), strict=True)
        if by_loader == "prepared":
            loader = prepare_data_loader(loader, device=torch.device("cpu:0"), put_on_device=True)
        pairs = iter(loader) if by_loader else ((rows[i : i + 2], labels[i : i + 2]) for i in range(0, 8, 2))
        for x, y in pairs:
            x = x.double() if by_loader == "cast" else x
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        run.session.prints.finish()
        return read_ring(ring_path(directory / "launch", 0))

    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    other = labels.clone()
    other[5] = 0  # of the third step
    for kind in ("torch", "prepared", "cast"):
        clean, changed_label = (train(tmp_path / kind / name, given, kind) for name, given in (("a", labels), ("b", other)))
        assert first_difference(clean, changed_label) == (3, ["labels", "gradient", "weights"]), kind
        assert all(SeenParts.TARGETS in one.seen for one in clean.steps().values()), kind
        assert not any(SeenParts.LABELS in one.seen for one in clean.steps().values()), kind  # they have no name
    for kind in ("", "rows"):  # without a loader; with one that yields no labels
        unseen = train(tmp_path / f"c{kind}", labels, kind)
        assert not any(SeenParts.TARGETS in one.seen for one in unseen.steps().values())


def test_what_enters_the_parts_of_a_container_is_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `ModuleDict` is never called; what one part hands to the next is no batch."""

    def trained(directory: Path, other: int) -> Ring:
        monkeypatch.setenv("CHRONICLE_LAUNCH_DIR", str(directory / "launch"))
        monkeypatch.setenv(PRINTS_VARIABLE, "every")
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = chronicle.attach(directory / "run", model, optimizer)
        for step in range(1, 5):
            for part in range(2):
                ids = torch.tensor([step, other if step == 3 and part else 2])
                model["head"](model["embed"](ids)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.session.data.finish()
        run.session.prints.finish()
        return read_ring(ring_path(directory / "launch", 0))

    one, other = trained(tmp_path / "one", 2), trained(tmp_path / "other", 5)
    assert all(row.batches == 2 and SeenParts.BATCH | SeenParts.GENERATORS in row.seen for row in one.steps().values())
    assert first_difference(one, other)[0] == 3 and "batch" in first_difference(one, other)[1]


def test_one_value_of_a_large_batch_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = (torch.tensor([3]), torch.tensor([7]))
    clean = Loop(tmp_path / "a", monkeypatch).train(5).ring()
    loop = Loop(tmp_path / "b", monkeypatch)
    loop.data = lambda step, x: x.index_put(place, torch.tensor([7.0])) if step == 4 else x
    assert first_difference(clean, loop.train(5).ring())[0] == 4


@pytest.mark.parametrize("device", ["cpu", "afar"])
def test_values_that_are_turned_by_one_place_are_another_tensor(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of products have the same value where the last one is the mean: weights of rows that were turned were not seen."""
    kept = []
    if device == "afar":  # as on an accelerator
        monkeypatch.setattr("chronicle.prints.checksums.SampleCopy", lambda part: kept.append(part.tolist()) or kept[-1])
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    for values in ([0.5, 2.0, 1.0], [0.5, 2.0, 1.0, 1.0, 0.5, 2.0, 1.0]):  # 1 is halfway between 0.5 and 2, by its bits
        tensor = torch.tensor(values)
        assert checksum(tensor) != checksum(tensor.roll(1)) and checksum(tensor) == checksum(tensor.clone())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex64])
@pytest.mark.parametrize("size", [1, 5, 4096])
def test_a_bit_of_any_place_is_in_the_sum_of_a_tensor(dtype: torch.dtype, size: int) -> None:
    """Also where eight bytes hold several values, and where the values do not fill them, or begin within."""
    for begin in (0, 1):
        whole = torch.ones(size + begin, dtype=dtype)
        part = whole[begin:]
        clean = digest_of(sums_of([part]))
        for place in {0, size // 2, size - 1}:
            raw = part.view(torch.uint8)
            first = place * dtype.itemsize
            raw[first] ^= 1
            assert digest_of(sums_of([part])) != clean, (begin, place)
            raw[first] ^= 1
        assert digest_of(sums_of([part])) == clean
        assert digest_of(sums_of([part, None])) == clean and not sums_of([None, torch.empty(0)])


def test_two_rows_that_change_places_are_another_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = Loop(tmp_path / "a", monkeypatch).train(5).ring()
    loop = Loop(tmp_path / "b", monkeypatch)
    loop.data = lambda step, x: x[[1, 0, 2, 3]] if step == 4 else x
    step, fields = first_difference(clean, loop.train(5).ring())
    assert (step, fields[0]) == (4, "batch")


def test_steps_of_a_graph_that_is_captured_have_no_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is captured nothing may be read; it is no error of the guard."""
    loop = Loop(tmp_path, monkeypatch).train(3)
    monkeypatch.setattr("chronicle.prints.step_prints.is_captured", lambda: True)
    loop.train(2)
    monkeypatch.setattr("chronicle.prints.step_prints.is_captured", lambda: False)
    ring = loop.train(3).ring()
    assert {1, 2, 7, 8} <= ring.steps().keys() and not {4, 5} & ring.steps().keys()
    assert loop.run.session.faults.found == []


def test_what_another_optimizer_steps_is_in_the_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A critic beside the model: its LR and its weights; the beginning is not compared, it may have stepped before."""

    def train(directory: Path, *, lr: float = 0.1, spoil: bool = False) -> Ring:
        monkeypatch.setenv("CHRONICLE_LAUNCH_DIR", str(directory / "launch"))
        monkeypatch.setenv(PRINTS_VARIABLE, "every")
        torch.manual_seed(0)
        model, critic = torch.nn.Linear(4, 3), torch.nn.Linear(4, 1)
        of_model, of_critic = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, critic))
        run = chronicle.attach(directory / "run", [model, critic], [of_model, of_critic])
        for step in range(1, 5):
            critic(torch.ones(2, 4)).sum().backward()
            of_critic.param_groups[0]["lr"] = lr if step == 3 else 0.1
            of_critic.step()
            of_critic.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            of_model.step()
            of_model.zero_grad()
            if spoil and step == 2:
                critic.weight.data[0, 1] += 1
        run.session.prints.finish()
        return read_ring(ring_path(directory / "launch", 0))

    clean, other, spoilt = train(tmp_path / "a"), train(tmp_path / "b", lr=0.2), train(tmp_path / "c", spoil=True)
    assert first_difference(clean, other) == (3, ["options", "weights"])
    assert first_difference(clean, spoilt) == (3, ["weights"])
    assert not any(SeenParts.WEIGHTS in one.seen for one in clean.begins())
