"""The first gradient after a resume is that of the step that followed the save, is refused, or is not compared."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import JournalWriter, read_journal
from chronicle.journal.events import Incident
from chronicle.paths import RunPaths
from chronicle.resume.first_gradient import NAME, difference
from tests.guard.flights.resumed import play_resumed

Loss = Callable[[Any, Any], Any]


class Loop:
    """A classifier in a plain loop; the batch of a step depends on its number alone."""

    def __init__(
        self, run: Path | None, *, dropout: float = 0.0, loss: Loss = functional.cross_entropy, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 5)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loss, self.step, self.clip, self.micro = loss, 0, 0.0, 1
        self.noise: Callable[[Any], Any] = lambda labels: labels
        self.run: Any = None
        if run is not None:
            self.run = chronicle.attach(run, self.model, self.optimizer, **options)

    def train(self, num_steps: int) -> "Loop":
        for _ in range(num_steps):
            for part in range(self.micro):
                generator = torch.Generator().manual_seed(100 * self.step + part)
                x, labels = torch.randn(8, 8, generator=generator), torch.randint(0, 5, (8,), generator=generator)
                (self.loss(self.model(x), self.noise(labels)) / self.micro).backward()
            if self.clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        return self

    def save(self, path: Path) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}, path)

    def load(self, path: Path) -> "Loop":
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        return self


def interrupted(run_dir: Path, path: Path, *, steps_after: int = 3, **options: Any) -> None:
    loop = Loop(run_dir, **options)
    loop.train(6).save(path)
    loop.train(steps_after)


def told(run_dir: Path) -> str:
    """The outcome of the comparison in the last verdict; "" when there was none."""
    checks = list(read_journal(RunPaths(run_dir)).of_kind("guard.verdict"))[-1].data["checks"]
    return next((str(check["outcome"]) for check in checks if check["name"] == NAME), "")


def smoothed(logits: Any, labels: Any) -> Any:
    return functional.cross_entropy(logits, labels, label_smoothing=0.2)


def test_equal_gradient_is_compared_and_passes(tmp_path: Path, run_dir: Path) -> None:
    interrupted(run_dir, tmp_path / "step.pt")
    Loop(run_dir).load(tmp_path / "step.pt").train(2)
    assert told(run_dir) == "equal"


@pytest.mark.parametrize(
    "loss",
    [
        smoothed,
        lambda logits, labels: functional.cross_entropy(logits, labels, reduction="sum"),
        lambda logits, labels: functional.cross_entropy(logits, (labels + 1) % 5),
        lambda logits, labels: functional.cross_entropy(logits, labels, torch.linspace(0.2, 2.0, 5)),
        lambda logits, labels: functional.cross_entropy(logits, labels) / 8,  # a scale that a layout of ranks leaves out
    ],
    ids=["smoothing", "sum", "labels", "weights", "scale"],
)
def test_another_loss_on_the_same_batch_is_refused(tmp_path: Path, run_dir: Path, loss: Loss) -> None:
    """Neither weights nor batches nor configuration show it."""
    interrupted(run_dir, tmp_path / "step.pt")
    with pytest.raises(ResumeRefused) as refusal:
        Loop(run_dir, loss=loss).load(tmp_path / "step.pt").train(1)
    assert [(check.code, check.name) for check in refusal.value.checks] == [("M6", NAME)]


def test_accepted_by_name_it_is_noted(tmp_path: Path, run_dir: Path) -> None:
    interrupted(run_dir, tmp_path / "step.pt")
    Loop(run_dir, loss=smoothed, accept_change={NAME: "smoothing from here on"}).load(tmp_path / "step.pt").train(1)
    assert told(run_dir) == "noted"


@pytest.mark.parametrize("steps", [(7, 7), (6, 9), (5, 6), (8, 9)])
def test_a_step_that_went_wrong_is_no_measure(tmp_path: Path, run_dir: Path, steps: tuple[int, int]) -> None:
    """Step 7 follows the save; an incident on record that it belongs to makes another gradient one that is said."""
    first = Loop(run_dir)
    first.train(6).save(tmp_path / "step.pt")
    first.noise = lambda labels: (labels + 1) % 5  # a fault of the moment
    first.train(2)
    low, high = steps
    facts = {"kind": "weights-not-finite", "tier": "propose", "onset_step": high, "onset_low_step": low}
    with JournalWriter(RunPaths(run_dir)) as writer:
        writer.write(Incident(**facts), step=high, title="weights are not finite")
    again = Loop(run_dir).load(tmp_path / "step.pt")
    if low <= 7:
        again.train(1)
        assert told(run_dir) == "noted"
    else:
        with pytest.raises(ResumeRefused):
            again.train(1)


@pytest.mark.parametrize(
    ("tier", "recovered", "measure"),
    [("notice", None, True), ("notice", 9, False), ("propose", 6, True), ("propose", None, False)],
)
def test_a_spike_is_over_at_its_peak_or_where_it_recovered(
    tmp_path: Path, run_dir: Path, tier: str, recovered: int | None, measure: bool
) -> None:
    """One that calls for a rollback is not over before it recovered."""
    first = Loop(run_dir)
    first.train(6).save(tmp_path / "step.pt")
    first.noise = lambda labels: (labels + 1) % 5
    first.train(2)
    facts = {"kind": "instant-spike", "tier": tier, "onset_step": 4, "peak_step": 5}
    with JournalWriter(RunPaths(run_dir)) as writer:
        opened = writer.write(Incident(**facts), step=4, title="a spike")
        writer.write(Incident(**facts, recovered_step=recovered), step=4, title="a spike", refs=(opened.id,))
    again = Loop(run_dir).load(tmp_path / "step.pt")
    if measure:
        with pytest.raises(ResumeRefused):
            again.train(1)
    else:
        again.train(1)
        assert told(run_dir) == "noted"


def test_clipping_that_is_left_out_is_refused(tmp_path: Path, run_dir: Path) -> None:
    first = Loop(run_dir)
    first.clip = 0.05
    first.train(6).save(tmp_path / "step.pt")
    first.train(1)
    with pytest.raises(ResumeRefused):
        Loop(run_dir).load(tmp_path / "step.pt").train(1)


def test_dropout_whose_generator_stands_elsewhere_is_not_compared(tmp_path: Path, run_dir: Path) -> None:
    interrupted(run_dir, tmp_path / "step.pt", dropout=0.3)
    Loop(run_dir, dropout=0.3).load(tmp_path / "step.pt").train(1)
    assert told(run_dir) == "not compared"


def test_dropout_with_its_generator_is_compared(tmp_path: Path, run_dir: Path) -> None:
    first = Loop(run_dir, dropout=0.3)
    first.train(6).save(tmp_path / "step.pt")
    generator = torch.get_rng_state()
    first.train(1)
    again = Loop(run_dir, dropout=0.3).load(tmp_path / "step.pt")
    torch.set_rng_state(generator)
    again.train(1)
    assert told(run_dir) == "equal"


def test_a_generator_from_which_nothing_was_drawn_may_stand_anywhere(tmp_path: Path, run_dir: Path) -> None:
    """Every process has another one of Python's, unless the script seeds it; most scripts draw nothing from it."""
    first = Loop(run_dir, dropout=0.3)
    first.train(6).save(tmp_path / "step.pt")
    generator = torch.get_rng_state()
    first.train(1)
    again = Loop(run_dir, dropout=0.3).load(tmp_path / "step.pt")
    torch.set_rng_state(generator)
    random.seed(77)
    again.train(1)
    assert told(run_dir) == "equal"


def test_labels_drawn_at_random_outside_the_model_are_not_compared(tmp_path: Path, run_dir: Path) -> None:
    """The draw falls before the forward pass, and no input of the model shows it: only the generator has moved."""

    def noisy(labels: Any) -> Any:
        return torch.where(torch.rand(len(labels)) < 0.5, 0, labels)

    first = Loop(run_dir)
    first.noise = noisy
    first.train(6).save(tmp_path / "step.pt")
    first.train(1)
    again = Loop(run_dir).load(tmp_path / "step.pt")
    again.noise = noisy
    torch.manual_seed(9)
    again.train(1)
    assert told(run_dir) == "not compared"


def test_other_batches_are_not_compared(tmp_path: Path, run_dir: Path) -> None:
    interrupted(run_dir, tmp_path / "step.pt")
    again = Loop(run_dir, loss=smoothed).load(tmp_path / "step.pt")
    again.step += 1
    again.train(1)
    assert told(run_dir) == ""


def test_run_that_ended_at_its_save_has_nothing_to_compare(tmp_path: Path, run_dir: Path) -> None:
    interrupted(run_dir, tmp_path / "step.pt", steps_after=0)
    Loop(run_dir, loss=smoothed).load(tmp_path / "step.pt").train(1)
    assert told(run_dir) == ""


def test_accumulated_gradient_is_compared_as_a_whole(tmp_path: Path, run_dir: Path) -> None:
    """And a save in the middle of an accumulation says nothing about its next step."""
    first = Loop(run_dir)
    first.micro = 3
    first.train(6).save(tmp_path / "step.pt")
    first.train(1)
    first.model(torch.ones(8, 8)).sum().backward()
    first.save(tmp_path / "middle.pt")
    first.train(1)
    again = Loop(run_dir)
    again.micro = 3
    again.load(tmp_path / "step.pt").train(1)
    assert told(run_dir) == "equal"
    later = Loop(run_dir)
    later.micro = 3
    later.load(tmp_path / "middle.pt").train(1)
    assert told(run_dir) == ""


def test_gradient_of_another_number_of_ranks_is_not_compared(tmp_path: Path, run_dir: Path) -> None:
    """It is the mean over other batches, although this rank has the same one."""
    interrupted(run_dir, tmp_path / "step.pt")
    (kept,) = (run_dir / "gradients").iterdir()
    kept.write_text(kept.read_text().replace('"ranks":1', '"ranks":4'))
    Loop(run_dir, loss=smoothed).load(tmp_path / "step.pt").train(1)
    assert told(run_dir) == ""


def test_random_numbers_on_several_ranks_are_a_row_that_says_so(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(run_dir, tmp_path / "step.pt", dropout=0.5)
    (kept,) = (run_dir / "gradients").iterdir()
    kept.write_text(kept.read_text().replace('"ranks":1', '"ranks":2'))
    again = Loop(run_dir, dropout=0.5).load(tmp_path / "step.pt")
    monkeypatch.setattr(again.run.session.first_gradient, "_num_ranks", lambda: 2)
    again.train(1)
    assert told(run_dir) == "not compared"


def test_difference_of_the_median_tensor_ignores_rounding() -> None:
    """A tensor whose gradient is rounding alone (the bias before a normalisation) decides nothing."""
    one = [[1.0, 2.0], [3e-9, 1e-9], [4.0, 4.0]]
    other = [[1.0, 2.0], [-2e-9, 5e-9], [4.0, 4.0]]
    assert difference(one, other) == 0.0
    assert difference(one, [[1.0], [0.0, 0.0], [4.0, 4.0]]) is None
    scaled = difference(one, [[value / 2 for value in row] for row in one])
    assert scaled is not None and abs(scaled - 0.5) < 1e-6


# ---- single tensors, and what happens inside the step -----------------------------------------------------------------


@pytest.mark.parametrize(
    "plant",
    [
        lambda model: model[0].weight.register_hook(lambda gradient: 0.1 * gradient),
        lambda model: model[3].bias.register_hook(torch.zeros_like),
        lambda model: model[0].weight.register_hook(torch.neg),
    ],
    ids=["a tenth", "zero", "the other sign"],
)
def test_gradient_of_one_layer_alone_is_refused_and_named(
    tmp_path: Path, run_dir: Path, plant: Callable[[Any], object]
) -> None:
    """The median of all tensors does not show it."""
    interrupted(run_dir, tmp_path / "step.pt")
    again = Loop(run_dir).load(tmp_path / "step.pt")
    plant(again.model)
    with pytest.raises(ResumeRefused) as refusal:
        again.train(1)
    (check,) = refusal.value.checks
    assert check.name == NAME and ("weight`" in check.found or "bias`" in check.found)


@pytest.mark.parametrize("factor", [0.99, 0.9999])
def test_a_small_difference_is_an_incident_and_rounding_is_not(tmp_path: Path, run_dir: Path, factor: float) -> None:
    """Too small to refuse a run for it, and far above what arithmetic does."""
    interrupted(run_dir, tmp_path / "step.pt")
    again = Loop(run_dir, loss=lambda logits, labels: factor * functional.cross_entropy(logits, labels))
    again.load(tmp_path / "step.pt").train(2)
    assert told(run_dir) == ("noted" if factor == 0.99 else "equal")
    assert [" 1% apart" in one for one in moved_otherwise(run_dir)] == ([True] if factor == 0.99 else [])


def test_gradient_that_is_gone_is_refused(tmp_path: Path, run_dir: Path) -> None:
    """Half of the model is cut off: there is no sample to compare, which is the difference."""
    interrupted(run_dir, tmp_path / "step.pt")
    again = Loop(run_dir).load(tmp_path / "step.pt")
    again.model[1].register_forward_hook(lambda module, args, out: out.detach())
    with pytest.raises(ResumeRefused) as refusal:
        again.train(1)
    assert [check.name for check in refusal.value.checks] == [NAME]


def moved_otherwise(run_dir: Path) -> list[str]:
    entries = read_journal(RunPaths(run_dir)).of_kind("incident")
    return [str(one.data["text"]) for one in entries if one.data["kind"] == "update-not-as-recorded"]


def test_equal_first_update_is_nothing_to_say(tmp_path: Path, run_dir: Path) -> None:
    interrupted(run_dir, tmp_path / "step.pt")
    Loop(run_dir).load(tmp_path / "step.pt").train(3)
    assert told(run_dir) == "equal" and not moved_otherwise(run_dir)


def test_weights_that_a_hook_changes_inside_the_step_are_told(tmp_path: Path, run_dir: Path) -> None:
    """The gradient is equal; what the step makes of it is not."""

    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"]:
                param.mul_(0.9)

    interrupted(run_dir, tmp_path / "step.pt")
    again = Loop(run_dir).load(tmp_path / "step.pt")
    again.optimizer.register_step_post_hook(shrink)
    again.train(3)
    assert told(run_dir) == "equal"
    (text,) = moved_otherwise(run_dir)
    assert text.startswith("the first step moved the weights otherwise than after the save")


def test_update_of_another_lr_that_was_accepted_is_not_compared(tmp_path: Path, run_dir: Path) -> None:
    interrupted(run_dir, tmp_path / "step.pt")
    again = Loop(run_dir, accept_change={"lr": "smaller from here on"}).load(tmp_path / "step.pt")
    again.optimizer.param_groups[0]["lr"] = 1e-3
    again.train(3)
    assert not moved_otherwise(run_dir)


def test_random_step_is_not_compared(tmp_path: Path, run_dir: Path) -> None:
    """An optimizer that draws noise inside its step moves the generator."""

    def noise(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"]:
                param.add_(torch.randn_like(param), alpha=0.1)

    first = Loop(run_dir)
    first.optimizer.register_step_post_hook(noise)
    first.train(6).save(tmp_path / "step.pt")
    first.train(3)
    again = Loop(run_dir).load(tmp_path / "step.pt")
    again.optimizer.register_step_post_hook(noise)
    again.train(3)
    assert not moved_otherwise(run_dir)


def breaches(run_dir: Path) -> list[tuple[int, str]]:
    """(step, text) of every warning."""
    entries = [one for one in read_journal(RunPaths(run_dir)).entries if "incident" in one.kind]
    return [(int(one.data["onset_step"]), str(one.title)) for one in entries]


def test_weights_that_the_script_moves_after_the_first_step_are_told(tmp_path: Path, run_dir: Path) -> None:
    """What is compared is how far they are when the next batch comes. Where the first pass moved them too, nothing is said."""

    def shrink(loop: Loop) -> None:
        with torch.no_grad():
            for p in loop.model.parameters():
                p.mul_(0.9)

    first = Loop(run_dir).train(6)
    first.save(tmp_path / "step.pt")
    for moves in (True, False):
        loop = first if moves else Loop(run_dir).load(tmp_path / "step.pt")
        loop.train(1)
        if moves:
            shrink(loop)
        loop.train(2)
    assert [(step, "moved the weights" in text) for step, text in breaches(run_dir)] == [(7, True)]
    again = Loop(run_dir).load(tmp_path / "step.pt").train(1)
    shrink(again)
    again.train(2)
    assert len(breaches(run_dir)) == 1


def test_a_step_without_any_gradient_is_refused(tmp_path: Path, run_dir: Path) -> None:
    """Gradients are zeroed between backward and step, so the optimizer does nothing."""
    interrupted(run_dir, tmp_path / "step.pt")
    loop = Loop(run_dir).load(tmp_path / "step.pt")
    loop.clip = 1.0

    def forget(*args: Any) -> None:
        for p in loop.model.parameters():
            p.grad = None

    clip, torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_, forget  # type: ignore[assignment]
    try:
        with pytest.raises(ResumeRefused) as refusal:
            loop.train(1)
    finally:
        torch.nn.utils.clip_grad_norm_ = clip
    assert [check.name for check in refusal.value.checks] == [NAME]


def test_an_average_that_follows_less_often_is_told(tmp_path: Path, run_dir: Path) -> None:
    def build() -> tuple[Loop, Any]:
        loop = Loop(None)
        average = torch.optim.swa_utils.AveragedModel(loop.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        chronicle.attach(run_dir, loop.model, loop.optimizer, averages={"ema": average})
        return loop, average

    def train(loop: Loop, average: Any, steps: int, every: int) -> None:
        for _ in range(steps):
            loop.train(1)
            if loop.step % every == 0:
                average.update_parameters(loop.model)

    loop, average = build()
    train(loop, average, 6, 1)
    loop.save(tmp_path / "step.pt")
    torch.save(average.state_dict(), tmp_path / "average.pt")
    train(loop, average, 8, 1)
    for every in (1, 4):
        loop, average = build()
        loop.load(tmp_path / "step.pt")
        average.load_state_dict(torch.load(tmp_path / "average.pt", weights_only=True))
        train(loop, average, 4, every)
        found = breaches(run_dir)
        assert len(found) == (every == 4)
    assert "moved the averages" in found[0][1]


def test_zeros_in_one_pass_and_no_gradient_in_the_other_end_the_comparison() -> None:
    """An expert that is seldom used has zeros from the step before, and nothing in a fresh process, where AdamW leaves it."""
    flight, refusal = play_resumed("mixture with experts that are seldom or never used", 0)
    assert not flight.told and not refusal and not flight.error


@pytest.mark.parametrize(("changed", "told"), [(99, False), (12, True)])
def test_the_same_batches_in_more_steps_are_told(tmp_path: Path, run_dir: Path, changed: int, told: bool) -> None:
    """The accumulation is forgotten from the second step of the resume on; the batches are those of the first pass."""

    def train(loop: Loop, batches: range, changed: int) -> None:
        for number in batches:
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number))
            loop.model(x).square().mean().backward()
            if number % 2 or number >= changed:
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    first = Loop(None)
    run = chronicle.attach(run_dir, first.model, first.optimizer)
    train(first, range(8), 99)
    first.save(tmp_path / "step.pt")
    train(first, range(8, 30), 99)
    run.session.data.finish()  # as at the end of its process
    train(Loop(run_dir).load(tmp_path / "step.pt"), range(8, 26), changed)
    assert any("make more optimizer steps" in text for _, text in breaches(run_dir)) == told


def verdict(run_dir: Path) -> dict[str, Any]:
    return dict(list(read_journal(RunPaths(run_dir)).of_kind("guard.verdict"))[-1].data)


def test_where_dropout_draws_otherwise_the_gradient_is_not_compared_and_the_resume_not_verified(
    tmp_path: Path, run_dir: Path
) -> None:
    """Another loss would not be seen there: what was not compared is never called verified."""
    interrupted(run_dir, tmp_path / "step.pt", dropout=0.1)
    torch.manual_seed(5)
    Loop(run_dir, dropout=0.1, loss=smoothed).load(tmp_path / "step.pt").train(1)
    found = verdict(run_dir)
    assert (found["verdict"], found["verified"]) == ("unverified", False)
    assert [(one["name"], "random numbers" in one["why"]) for one in found["not_compared"]] == [(NAME, True)]


def test_weights_alone_that_were_loaded_into_a_run_that_was_trained_are_not_verified(tmp_path: Path, run_dir: Path) -> None:
    """Momentum and schedule begin anew: common in scripts that save a model's state alone."""
    first = Loop(run_dir)
    torch.save(first.train(4).model.state_dict(), tmp_path / "weights.pt")
    assert verdict(run_dir).get("verified") is None
    again = Loop(run_dir)
    again.model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    again.train(1)
    found = verdict(run_dir)
    assert found["verified"] is False and "optimizer begins without state" in found["not_compared"][0]["why"]


def test_weights_that_a_first_launch_loads_are_pretrained_ones(tmp_path: Path, run_dir: Path) -> None:
    torch.save(Loop(None).model.state_dict(), tmp_path / "pretrained.pt")
    loop = Loop(run_dir)
    loop.model.load_state_dict(torch.load(tmp_path / "pretrained.pt", weights_only=True))
    loop.train(2)
    assert verdict(run_dir).get("verified") is None


def test_a_refusal_names_the_weights_that_differ_and_tells_no_consequence(tmp_path: Path, run_dir: Path) -> None:
    """One layer that is made anew after the load: its name, the step that was loaded, and no row about the gradient."""
    interrupted(run_dir, tmp_path / "step.pt")
    loop = Loop(run_dir).load(tmp_path / "step.pt")
    torch.nn.init.normal_(loop.model[3].weight)
    with pytest.raises(ResumeRefused) as refusal:
        loop.train(1)
    (check,) = refusal.value.checks
    assert check.name == "weights" and check.found == "1 of 4 weights differ: `3.weight`"
    assert "saved at step 6" in str(refusal.value)


def test_a_refusal_names_the_moments_that_differ(tmp_path: Path, run_dir: Path) -> None:
    interrupted(run_dir, tmp_path / "step.pt")
    loop = Loop(run_dir).load(tmp_path / "step.pt")
    loop.optimizer.state[loop.model[3].weight]["exp_avg"].zero_()
    with pytest.raises(ResumeRefused) as refusal:
        loop.train(1)
    found = {check.name: check.found for check in refusal.value.checks}
    assert found["optimizer moments"] == "1 of 8 moments differ: `exp_avg of 3.weight`"
