"""What is trained: its record is equal before and after training, names every difference, and notes what may differ."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.checks.check import Outcome
from chronicle.resume.configuration import folded, model_facts
from chronicle.resume.contract import Expectation
from chronicle.resume.events import StepBegins
from chronicle.resume.feed import Shapes, dataset_facts, is_shuffled
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.learning_rate import BoundScheduler
from chronicle.resume.memory import Memory, Scheduler
from chronicle.resume.trained import VERSION, TrainedWatch, check_trained
from tests.guard.architectures import ARCHITECTURES, Rotary, gpt2, train

ROOT = Path(__file__).parents[2]


def live(model: Any, **parts: Any) -> LiveState:
    return LiveState(models=(model,), **parts)


def checks(saved: dict[str, Any], found: dict[str, Any], **options: Any) -> dict[str, Outcome]:
    """Name of every check that is not equal -> its outcome. Records go through JSON, as a manifest does."""
    saved = json.loads(json.dumps(saved, allow_nan=False))
    accepted = options.pop("accepted", {})
    expected = Expectation(basis="manifest", memory=Memory(trained=saved), accepted=accepted)
    made = check_trained(expected, Memory(trained=found), **options)
    return {check.name: check.outcome for check in made if check.outcome is not Outcome.EQUAL}


def network() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def refused(saved: dict[str, Any], found: dict[str, Any], **options: Any) -> set[str]:
    return {name for name, outcome in checks(saved, found, **options).items() if outcome is Outcome.DIFFERENT}


def watch_of(*models: Any) -> TrainedWatch:
    """Of a training that takes steps with these models."""
    return TrainedWatch(SimpleNamespace(models=models))  # type: ignore[arg-type]


def record(model: Any, **parts: Any) -> dict[str, Any]:
    return watch_of().begin(live(model, **parts), None)


# ---- never wrong about a healthy model -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_and_a_new_process_change_nothing_in_the_record(name: str) -> None:
    """Counters, caches that the forward pass fills, and modules that get their parameters late."""
    make, loss = ARCHITECTURES[name]
    torch.manual_seed(0)
    first, watch = make(), watch_of()
    train(first, loss, 5, lambda: watch.begin(live(first), None))
    saved = watch.record(live(first))
    second, again = make(), watch_of()
    found: list[dict[str, Any]] = []
    train(second, loss, 5, lambda: found.append(again.begin(live(second), saved)))
    assert checks(saved, found[0]) == {}
    assert checks(again.record(live(second)), found[0]) == {}


def test_values_that_move_in_training_are_known_for_every_later_launch() -> None:
    """PointNet lowers the momentum of its batch norms every few epochs."""
    first, watch = nn.Sequential(nn.BatchNorm1d(4)), watch_of()
    watch.begin(live(first), None)
    first[0].momentum = 0.05
    saved = watch.record(live(first))
    assert saved["moved"] == ["*.momentum"]
    again, fresh = watch_of(), nn.Sequential(nn.BatchNorm1d(4))
    again.begin(live(fresh), saved)
    assert again.record(live(fresh))["moved"] == saved["moved"]


@pytest.mark.parametrize("wrap", ["compile", "module.compile", "parametrized", "DataParallel"])
def test_wrappers_leave_the_record_as_it_is(wrap: str) -> None:
    plain, wrapped = gpt2(), gpt2()
    if wrap == "compile":
        wrapped = torch.compile(wrapped, backend="eager")
    elif wrap == "module.compile":
        wrapped.compile(backend="eager")
        wrapped.transformer.h[0] = torch.compile(wrapped.transformer.h[0], backend="eager")
    elif wrap == "DataParallel":
        wrapped = nn.DataParallel(wrapped)
    else:
        plain = nn.Sequential(nn.Linear(4, 4))
        wrapped = nn.Sequential(nn.Linear(4, 4))
        nn.utils.parametrizations.weight_norm(wrapped[0])
        assert not any(name == "0.class" for name in checks(record(plain), record(wrapped)))
        return
    assert checks(record(plain), record(wrapped)) == {}


def test_an_annealed_value_of_a_script_is_not_compared() -> None:
    """A script may set it from epoch to epoch; where its own code does, a resume at an epoch's start looks like a change."""
    one, other = Annealed(0.5), Annealed(0.5)
    other.weight = 0.25
    assert checks(record(one), record(other)) == {}


class Annealed(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight, self.layer = weight, nn.Linear(2, 2)

    def on_epoch(self) -> None:
        self.weight = self.weight / 2


# ---- a difference is named -------------------------------------------------------------------------------------------


def _set(place: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(place), name, value)


def _every_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_set("transformer.h.0.attn.attn_dropout", "p", 0.0), {"transformer.h.0.attn.attn_dropout.p"}),
        (_set("transformer.h.1.ln_1", "eps", 1e-3), {"transformer.h.1.ln_1.eps"}),
        (_set("transformer.h.0.attn", "scaling", 1.0), {"transformer.h.0.attn.scaling"}),
        (lambda model: setattr(model.config, "attn_pdrop", 0.0), {"config.attn_pdrop"}),
        (lambda model: setattr(model.transformer.h[0].mlp, "act", nn.ReLU()), {"transformer.h.0.mlp.act.class"}),
        (lambda model: model.transformer.h[1].eval(), {"transformer.h.1", "transformer.h.1.attn.attn_dropout"}),
    ],
)
def test_one_changed_value_is_refused_by_its_name(change: Callable[[Any], None], names: set[str]) -> None:
    one, other = gpt2(), gpt2()
    one.train(), other.train()
    change(other)
    assert names <= refused(record(one), record(other))
    assert refused(record(one), record(other), accepted={"model": "wanted", "module_mode": "wanted"}) == set()


def _saved_after_freezing(evaluated: bool = False) -> tuple[Any, dict[str, Any]]:
    """A model whose norm is in evaluation mode from its second step on, and the record of a save after that."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    watch = watch_of(model)
    watch.begin(live(model), None)
    watch.step_begins(StepBegins(optimizer=None))
    model[1].eval()
    watch.step_begins(StepBegins(optimizer=None))
    if evaluated:
        model.eval()
    watch.record(live(model))  # what follows a save is recorded between two steps, too
    return model, watch.record(live(model))


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_module_frozen_in_the_middle_is_expected_as_the_last_step_had_it(evaluated: bool) -> None:
    model, saved = _saved_after_freezing(evaluated)
    model.train()
    model[1].eval()
    assert checks(saved, record(model)) == {}


def test_modes_as_at_the_first_step_of_the_last_launch_are_said_and_others_are_refused() -> None:
    model, saved = _saved_after_freezing()
    model.train()
    assert checks(saved, record(model)) == {"module_mode": Outcome.NOTED}
    model[0].eval()
    assert refused(saved, record(model)) == {"0", "1"}


def test_the_mode_of_a_model_is_that_of_the_last_steps() -> None:
    """A validation before a save, and one before the first step of a resume, are two things."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1))
    watch = watch_of(model)
    watch.begin(live(model), None)
    watch.step_begins(StepBegins(optimizer=None))
    model.eval()
    saved = watch.record(live(model))
    assert refused(saved, record(model)) == {"training mode"}
    assert checks(saved, record(model.train())) == {}


def test_a_value_that_changed_in_every_layer_is_named_once() -> None:
    one, other = gpt2(), gpt2()
    _every_dropout(other)
    assert refused(record(one), record(other)) == {
        "transformer.drop.p",
        "transformer.h.*.attn.attn_dropout.p",
        "transformer.h.*.attn.resid_dropout.p",
        "transformer.h.*.mlp.dropout.p",
    }


@pytest.mark.parametrize("option", [{"theta": 5e5}, {"dropout": 0.0}])
def test_arguments_of_a_scripts_own_modules_are_refused(option: dict[str, float]) -> None:
    assert refused(record(Rotary()), record(Rotary(**option)))


def test_scale_that_a_script_computes_is_refused_when_only_the_constructor_sets_it() -> None:
    other = Rotary()
    other.scale = 1.0
    assert refused(record(Rotary()), record(other)) == {"scale"}


def test_activation_function_of_a_layer_is_refused() -> None:
    one, other = (nn.TransformerEncoderLayer(8, 2, activation=name) for name in ("relu", "gelu"))
    assert "activation" in refused(record(one), record(other))


class Turned(nn.Module):
    """A layer with frequencies that no checkpoint holds, and one tensor that is built for each length of the input."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("frequencies", base ** (-torch.arange(8.0) / 8), persistent=False)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.layer(x * self.frequencies)


def test_tensors_that_no_checkpoint_holds_are_compared_by_value() -> None:
    """Another base of the rotary positions leaves weights and attributes as they are; last digits are no difference."""
    saved = record(Turned(10_000.0))
    assert refused(saved, record(Turned(500_000.0))) == {"frequencies"}
    close, longer = Turned(10_000.0), Turned(10_000.0)
    close.frequencies *= 1 + 1e-6
    longer.mask = torch.zeros(3, 3)
    assert checks(saved, record(close)) == {}
    assert checks(saved, record(longer)) == {}
    library = nn.LayerNorm(4)
    library.register_buffer("cache", torch.ones(3), persistent=False)
    assert "tensor" not in record(library)["facts"]


def test_arguments_that_shape_the_gradient_are_refused_and_no_others() -> None:
    saved = record(network(), arguments={"max_grad_norm": 1.0, "data_seed": 1, "beta": 0.1})
    found = record(network(), arguments={"max_grad_norm": 0.0, "data_seed": 2, "beta": 0.1, "loss_type": "new"})
    assert refused(saved, found) == {"max_grad_norm"}
    assert refused(saved, found, accepted={"trainer": "no clipping"}) == set()
    assert Outcome.NOTED not in checks(saved, found).values()


def test_another_autocast_around_the_model_is_refused() -> None:
    def seen(*, half: bool) -> dict[str, Any]:
        watch = watch_of()
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                watch.shapes.see(((torch.ones(4, 8),), {}))
        return watch.begin(live(network()), None)

    assert refused(seen(half=True), seen(half=False)) == {"autocast"}
    assert checks(seen(half=True), seen(half=True)) == {}


def test_a_new_library_version_adds_and_drops_values_without_a_refusal() -> None:
    one = record(gpt2())
    other = json.loads(json.dumps(one))
    other["versions"] = {"torch": "9.9"}
    other["facts"]["model"]["config.new_option"] = 3
    del other["facts"]["model"]["config.n_head"]
    assert checks(one, other) == {}


def test_a_record_of_many_different_modules_stays_small_and_still_names_the_module() -> None:
    def model(p: float) -> nn.Module:
        return nn.Sequential(*(nn.Dropout(p if i == 700 else 1e-4 * i) for i in range(2500)))

    one, other = record(model(0.1)), record(model(0.2))
    assert len(json.dumps(one)) < 200_000
    assert refused(one, other)


# ---- data ------------------------------------------------------------------------------------------------------------


def feed(dataset: Any, **options: Any) -> dict[str, Any]:
    return record(nn.Linear(2, 2), feed=DataLoader(dataset, 4, **options))


def rows(seed: int, count: int = 64) -> TensorDataset:
    return TensorDataset(torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)))


class Windows(Dataset[Any]):
    """A script's own dataset over a file of tokens."""

    def __init__(self, path: Path, block_size: int = 8) -> None:
        self.path, self.block_size, self.epoch = path, block_size, 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the guard must not index a dataset: it may augment or download")


def test_another_dataset_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"0123")
    one = feed(Windows(tmp_path / "a.bin"))
    assert refused(one, feed(Windows(tmp_path / "a.bin"))) == set()
    assert refused(one, feed(Windows(tmp_path / "a.bin", block_size=4))) == {"dataset.block_size"}
    assert refused(feed(rows(1)), feed(rows(1, count=32))) == {"dataset.length"}
    assert refused(feed(rows(1)), feed(rows(2)), same_data=True) == {"dataset.tensors"}
    assert refused(feed(rows(1)), feed(rows(2)), same_data=True, accepted={"dataset": "grown"}) == set()


def test_other_rows_are_noted_unless_the_same_data_are_promised() -> None:
    """An unseeded split and generated noise differ in every launch of a healthy script."""
    one, other = feed(rows(1)), feed(rows(2))
    assert checks(one, other) == {"rows of the dataset (may differ)": Outcome.NOTED}
    assert refused(one, other, same_data=True) == {"dataset.tensors"}


def test_an_epoch_counter_is_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"0123")
    other = Windows(path)
    other.epoch = 3
    assert checks(feed(Windows(path)), feed(other)) == {}


def test_hugging_face_dataset_is_known_by_its_rows() -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": [str(i) for i in range(100)]})
    same, other = one.select(range(100)), datasets.Dataset.from_dict({"text": [str(i + 1) for i in range(100)]})
    assert refused(feed(one), feed(same)) == set()
    assert refused(feed(one), feed(other), same_data=True) == {"dataset.rows"}
    assert refused(feed(one), feed(one.select(range(50)))) >= {"dataset.length"}
    assert refused(feed(one), feed(one.map(lambda row: {"more": 1}))) >= {"dataset.columns"}


def test_shuffling_is_refused_and_its_seed_is_not_compared() -> None:
    one = feed(rows(1), shuffle=True, generator=torch.Generator().manual_seed(1))
    assert refused(one, feed(rows(1), shuffle=False)) == {"order.shuffle"}
    other = feed(rows(1), shuffle=True, generator=torch.Generator().manual_seed(2))
    assert checks(one, other) == {}


def test_order_of_an_unknown_sampler_is_not_claimed() -> None:
    loader = SimpleNamespace(batch_sampler=SimpleNamespace(sampler=SimpleNamespace()))
    assert is_shuffled(loader) is None and is_shuffled(SimpleNamespace()) is None
    assert list(dataset_facts(object())) == [("dataset", "dataset.class", "object")]


def shapes(*batches: torch.Tensor, mask: bool = False) -> dict[str, Any]:
    seen = Shapes()
    for batch in batches:
        seen.see((batch, (batch != 0).long()) if mask else (batch,))
    return {"v": VERSION, "shape": seen.to_json()}


def tokens(length: int, count: int = 4) -> torch.Tensor:
    return torch.arange(1, 1 + count * length).reshape(count, length)


def test_sequence_length_is_refused_only_where_no_batch_was_padded() -> None:
    fixed = shapes(tokens(16), tokens(16), tokens(16))
    assert refused(fixed, shapes(tokens(8))) == {"sequence length"}
    padded = tokens(8)
    padded[0, -3:] = 0
    assert refused(fixed, shapes(padded)) == set(), "rows that end in one repeated token may be padded"
    assert refused(fixed, shapes(padded, mask=True)) == set()
    assert refused(shapes(tokens(16), tokens(12), tokens(16)), shapes(tokens(8))) == set()
    assert refused(shapes(tokens(16)), shapes(tokens(8))) == set(), "one batch proves no fixed length"
    single = shapes(tokens(16, 1), tokens(16, 1), tokens(16, 1))
    assert refused(single, shapes(tokens(8, 1))) == set()


def test_more_rows_than_any_batch_had_are_refused_and_fewer_may_be_the_last_of_an_epoch() -> None:
    batches = [torch.randn(4, 3) for _ in range(3)]
    assert refused(shapes(*batches), shapes(torch.randn(8, 3))) == {"rows of a batch"}
    assert refused(shapes(*batches), shapes(torch.randn(2, 3))) == set()
    assert refused(shapes(*batches), shapes(torch.randn(8, 3)), accepted={"global_batch": "bigger card"}) == set()


# ---- the whole way, in a plain loop ----------------------------------------------------------------------------------


class Loop:
    """A loop as people write it, with a scheduler that decides by the loss."""

    def __init__(self, run_dir: Path, *, batch: int = 4, accumulation: int = 1, dropout: float = 0.1, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=3)
        self.loader, self.accumulation = DataLoader(rows(1, 256), batch, shuffle=True), accumulation
        self.run = chronicle.attach(
            run_dir, self.model, self.optimizer, self.scheduler, data=self.loader, accumulation=accumulation, **options
        )

    def train(self, num_steps: int) -> None:
        batches = iter(self.loader)
        for _ in range(num_steps):
            for _ in range(self.accumulation):
                (x,) = next(batches)
                loss = self.model(x).square().mean() / self.accumulation
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step(loss.item())

    def save(self, path: Path) -> Path:
        torch.save({name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")}, path)
        return path

    def load(self, path: Path) -> None:
        for name, state in torch.load(path, weights_only=True).items():
            getattr(self, name).load_state_dict(state)


@pytest.fixture
def saved(tmp_path: Path, run_dir: Path) -> Path:
    loop = Loop(run_dir, batch=8)
    loop.train(6)
    return loop.save(tmp_path / "step-6.pt")


def verdict_of(run_dir: Path) -> Any:
    return [entry.data for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")][-1]


def names_of(refusal: Any) -> set[str]:
    return {check.name for check in refusal.value.checks if not check.ok}


def test_a_changed_dropout_is_refused_and_accepted_by_name(
    saved: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(run_dir, batch=8, dropout=0.0)
    loop.load(saved)
    with pytest.raises(ResumeRefused) as refusal:
        loop.train(1)
    assert names_of(refusal) == {"1.p"}
    assert 'accept "model: why"' in capsys.readouterr().err
    loop = Loop(run_dir, batch=8, dropout=0.0, accept_change={"model": "regularised enough"})
    loop.load(saved)
    loop.train(1)
    assert "noted: 1.p: 0.1 → 0.0, accepted as `model`" in capsys.readouterr().err


def test_the_same_global_batch_in_another_split_is_noted(
    saved: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(run_dir, batch=4, accumulation=2)
    loop.load(saved)
    loop.train(1)
    assert "the global batch is the same: 8 samples a step" in capsys.readouterr().err
    loop = Loop(run_dir, batch=4)
    loop.load(saved)
    with pytest.raises(ResumeRefused) as refusal:
        loop.train(1)
    assert names_of(refusal) == {"batch size"}
    loop = Loop(run_dir, batch=4, accept_change={"global_batch": "smaller card"})
    loop.load(saved)
    loop.train(1)


class Tally:
    """An object of the script's own: it has a state, and nothing that torch knows."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}


def test_objects_and_averages_that_the_script_names_are_compared(tmp_path: Path, run_dir: Path) -> None:
    """Not every average is a module: Diffusers keeps its own in a list of tensors."""
    tally, average = Tally(), Tally()
    loop = Loop(run_dir, objects={"tally": tally}, averages={"ema": average})
    loop.train(3)
    tally.seen, average.seen = 12, 5
    path = loop.save(tmp_path / "step-3.pt")
    for named, wrong in (("tally", {"state of `tally`"}), ("ema", {"averaged weights `ema`"}), ("", set())):
        tally, average = Tally(), Tally()
        loop = Loop(run_dir, objects={"tally": tally}, averages={"ema": average})
        loop.load(path)
        tally.seen, average.seen = (0 if named == "tally" else 12), (0 if named == "ema" else 5)
        if wrong:
            with pytest.raises(ResumeRefused) as refusal:
                loop.train(1)
            assert names_of(refusal) == wrong
        else:
            loop.train(1)


class Stream(Tally):
    """Reads one row ahead of its batch."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_a_stream_that_has_read_on_when_its_first_batch_comes_is_as_in_the_first_pass(tmp_path: Path, run_dir: Path) -> None:
    """What the first pass had read when the batch after the save came; where it ended there, a stream that moves is open."""
    stream = Stream()
    loop = Loop(run_dir, objects={"stream": stream})
    for _ in range(3):
        stream.seen += 4
        loop.train(1)
    last = loop.save(tmp_path / "last.pt")
    for loaded, path in ((12, last), (11, last), (12, tmp_path / "step-3.pt")):
        if path != last:  # the first pass goes on
            path = loop.save(path)
            stream.seen += 4
            loop.train(1)
        other = Stream()
        resumed = Loop(run_dir, objects={"stream": other})
        resumed.load(path)
        other.load_state_dict({"seen": loaded})
        other.seen += 4
        resumed.train(1)
        outcome = {check["name"]: check["outcome"] for check in verdict_of(run_dir)["checks"]}["state of `stream`"]
        assert outcome == ("not compared" if path == last else "equal")


def test_the_decay_of_an_average_is_compared() -> None:
    """torch keeps it in a closure, which no state shows."""
    swa = torch.optim.swa_utils

    def averaged(decay: float) -> dict[str, Any]:
        model = network()
        average = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(decay))
        return record(model, averages={"ema": average})

    assert refused(averaged(0.999), averaged(0.999)) == set()
    assert refused(averaged(0.999), averaged(0.5)) == {"ema.decay"}
    assert refused(averaged(0.999), averaged(0.5), accepted={"average": "why"}) == set()


def test_a_function_that_is_bound_to_a_module_breaks_no_record() -> None:
    """x-transformers binds functions to its layers; the record of every save failed."""
    model = network()
    model[1].act = functools.partial(torch.nn.functional.linear, nn.Linear(2, 2), bias=None)
    assert json.dumps(folded(model_facts([model])))


class Irreps(tuple[int, ...]):
    """As in e3nn: a tuple that forbids its length."""

    def __len__(self) -> int:
        raise NotImplementedError


class Forbidding:
    """Answers nothing."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_a_value_that_cannot_be_read_breaks_no_record() -> None:
    """e3nn: the record of every save failed. What can be read is still compared."""
    models = []
    for size in (8, 16):
        models.append(network())
        models[-1][1].irreps, models[-1][1].odd, models[-1][1].config = Irreps((size, 0)), {"a": Forbidding()}, Forbidding()
        models[-1].append(torch.jit.script(nn.Linear(2, 2)))
    one, other = (folded(model_facts([model])) for model in models)
    assert json.dumps(one) != json.dumps(other) and "1.irreps" in one["model"]


@pytest.mark.parametrize("own", [True, False])
def test_a_checkpoint_of_another_run_where_this_one_has_its_own(tmp_path: Path, run_dir: Path, own: bool) -> None:
    other = Loop(tmp_path / "logs" / "other")
    other.train(2)
    path = other.save(tmp_path / "other.pt")
    if own:
        first = Loop(run_dir)
        first.train(3)
        first.save(tmp_path / "own.pt")
    loop = Loop(run_dir)
    loop.load(path)
    loop.train(1)
    incidents = [one.title for one in read_journal(RunPaths(run_dir)).entries if one.kind == "incident"]
    assert [one.startswith("warn: checkpoint-of-another-run: this checkpoint belongs to run other") for one in incidents] == (
        [True] if own else []
    )


def test_an_optimizer_whose_constructor_makes_its_state_was_not_loaded(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adagrad's sums begin with the optimizer, at step 0: it is no sign of a load before `attach`."""
    model = network()
    optimizer = torch.optim.Adagrad(model.parameters())
    chronicle.attach(run_dir, model, optimizer)
    model(torch.ones(4, 8)).mean().backward()
    optimizer.step()
    assert "already had state" not in capsys.readouterr().err


class OwnScheduler:
    """A scheduler of the script's own make, with a position and a field that its load computes again."""

    def __init__(self, last_epoch: int, field: float) -> None:
        self.last_epoch, self.field = last_epoch, field

    def step(self) -> None:
        self.last_epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "field": self.field}


class OwnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """A class of the script's own, of torch's make."""


def scheduler_outcomes(before: Any, after: Any) -> set[Outcome]:
    saved, found = (
        Memory(
            trained=record(nn.Linear(2, 2), schedulers=[BoundScheduler(scheduler=one)]),
            schedulers=(Scheduler(name="Own", last_epoch=one.last_epoch),),
        )
        for one in (before, after)
    )
    made = check_trained(Expectation(basis="manifest", memory=saved), found)
    return {check.outcome for check in made if "scheduler" in check.name and check.outcome is not Outcome.EQUAL}


def test_field_of_a_scheduler_of_another_make_is_not_compared() -> None:
    """Some recompute fields in their load; their position is compared by itself. One of torch's make is refused."""
    assert scheduler_outcomes(OwnScheduler(6, 0.1), OwnScheduler(6, 0.2)) == set()
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    before, after = OwnPlateau(optimizer), OwnPlateau(optimizer)
    before.best = 3.0
    assert scheduler_outcomes(before, after) == {Outcome.DIFFERENT}


@pytest.mark.parametrize(("field", "value"), [("best", 99.0), ("num_bad_epochs", 3), ("cooldown_counter", 2)])
def test_plateau_state_that_was_lost_is_refused(saved: Path, run_dir: Path, field: str, value: float) -> None:
    loop = Loop(run_dir, batch=8)
    loop.load(saved)
    setattr(loop.scheduler, field, value)
    with pytest.raises(ResumeRefused) as refusal:
        loop.train(1)
    assert names_of(refusal) == {f"scheduler.{field}"}


def test_gradients_that_were_left_over_are_noted(saved: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(run_dir, batch=8)
    loop.load(saved)
    loop.model[0].weight.grad = torch.ones_like(loop.model[0].weight)
    loop.train(1)
    assert "noted: gradients left over" in capsys.readouterr().err


def test_a_record_of_an_earlier_form_is_not_compared_and_that_is_said() -> None:
    assert checks({**record(network()), "v": VERSION - 1}, record(network())) == {"what is trained": Outcome.NOT_COMPARED}


def test_memory_of_an_older_version_holds_no_record_and_none_is_compared() -> None:
    assert Memory.from_json({"step": 3}).trained == {}
    memory = Memory(trained=record(gpt2()))
    assert Memory.from_json(json.loads(json.dumps(memory.to_json()))).trained == memory.trained
    expected = Expectation(basis="manifest", memory=replace(memory, trained={}))
    assert list(check_trained(expected, memory)) == []
