"""What the real frameworks do with the data at a resume, and what the guard says about it."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.checks.check import Outcome
from chronicle.resume.data import BatchRecord
from chronicle.resume.first_pass import ENTRY, FirstPass, OtherBatch, Position, read_first_pass


def verdict(run_dir: Path) -> dict[str, Any]:
    return [entry.data for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")][-1]


def said(run_dir: Path) -> str:
    check = next(check for check in verdict(run_dir)["checks"] if check["name"] == "next batch")
    return "equal" if check["outcome"] == "equal" else str(check["cause"])


def numbers(length: int = 16) -> TensorDataset:
    return TensorDataset(torch.arange(float(length)).unsqueeze(1))


# ---- Accelerate: the documented recipe in the second epoch (accelerate #2016) ----------------------------------------


def accelerated(run_dir: Path, *, shuffle: bool = True, **options: Any) -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DataLoaderConfiguration, set_seed

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
    set_seed(0)
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator: Any = chronicle.guard(Accelerator(cpu=True, dataloader_config=config), run_dir=run_dir, **options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(numbers(), batch_size=2, shuffle=shuffle)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def step(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> None:
    accelerator.backward(model(batch[0]).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def two_epochs(run_dir: Path, checkpoint: Path, *, save_at: int, shuffle: bool = True) -> None:
    accelerator, model, optimizer, loader = accelerated(run_dir, shuffle=shuffle)
    done = 0
    for _ in range(2):
        for batch in loader:
            step(accelerator, model, optimizer, batch)
            done += 1
            if done == save_at:
                accelerator.save_state(str(checkpoint))
                accelerator.chronicle.sealer.finish()


def test_accelerate_in_a_later_epoch_repeats_and_is_not_called_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, checkpoint = tmp_path / "run", tmp_path / "ck" / "step-11"
    two_epochs(run_dir, checkpoint, save_at=11)
    accelerator, model, optimizer, loader = accelerated(run_dir)
    accelerator.load_state(str(checkpoint))
    for batch in accelerator.skip_first_batches(loader, 3):
        step(accelerator, model, optimizer, batch)
    assert said(run_dir) == "the batch of step 4 of the first pass comes again: 8 batches repeat"
    assert verdict(run_dir)["verified"] is False
    assert warned(run_dir) == [12]
    assert "chronicle guard: warn: data-not-as-recorded: the data order changed at step 12: " in capsys.readouterr().err


def warned(run_dir: Path) -> list[Any]:
    """The steps from which on the run is warned of other data."""
    found = [entry.data for entry in read_journal(RunPaths(run_dir)).of_kind("incident")]
    return [data["onset_step"] for data in found if data["kind"] == "data-not-as-recorded" and data["tier"] == "warn"]


def test_another_file_is_warned_of_where_the_pass_goes_on(tmp_path: Path) -> None:
    """At a new pass, which may come in a new order, and in a script without a seed it is only said."""

    def launch(*, seed: int | None, shift: float, generator: bool, first: int, last: int) -> None:
        torch.seed() if seed is None else torch.manual_seed(seed)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        rows = TensorDataset(torch.arange(16.0).unsqueeze(1) + shift)
        options = {"generator": torch.Generator().manual_seed(1)} if generator else {}
        loader = DataLoader(rows, batch_size=2, shuffle=True, **options)
        chronicle.attach(tmp_path / "run", model, optimizer, data=loader)
        if first:
            state = torch.load(tmp_path / "state.pt", weights_only=True)
            model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
        batches = [(epoch, index) for epoch in range(2) for index in range(8)]
        passes = [iter(loader), iter(loader)] if not first else [iter(loader)] * 2
        for done, (epoch, _) in enumerate(batches[first:last], first + 1):
            model(next(passes[epoch])[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not first and done == save_at:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")

    for save_at, seed, generator, expected in (
        (5, 0, False, [6]),
        (5, None, False, []),
        (8, 0, False, []),
        (8, 0, True, []),
    ):
        launch(seed=seed, shift=0.0, generator=generator, first=0, last=12)
        launch(seed=seed, shift=100.0, generator=generator, first=save_at, last=save_at + 2)
        assert warned(tmp_path / "run") == expected, (save_at, seed, generator)
        shutil.rmtree(tmp_path / "run")


def test_batches_skipped_in_every_epoch_are_an_incident(tmp_path: Path) -> None:
    """Whatever skips them: here the script itself, which no attribute of a loader shows."""
    run_dir, checkpoint = tmp_path / "run", tmp_path / "ck" / "step-5"
    two_epochs(run_dir, checkpoint, save_at=5, shuffle=False)
    accelerator, model, optimizer, loader = accelerated(run_dir, shuffle=False)
    accelerator.load_state(str(checkpoint))
    for _ in range(3):
        for index, batch in enumerate(loader):
            if index >= 5:
                step(accelerator, model, optimizer, batch)
    assert said(run_dir) == "equal"
    kinds = [entry.data["kind"] for entry in read_journal(RunPaths(run_dir)).of_kind("incident")]
    assert "data-skipped" in kinds


def test_healthy_resume_inside_an_epoch_has_no_incident(tmp_path: Path) -> None:
    run_dir, checkpoint = tmp_path / "run", tmp_path / "ck" / "step-5"
    two_epochs(run_dir, checkpoint, save_at=5, shuffle=False)
    accelerator, model, optimizer, loader = accelerated(run_dir, shuffle=False, same_data=True)
    accelerator.load_state(str(checkpoint))
    for epoch in range(3):
        for batch in accelerator.skip_first_batches(loader, 5) if epoch == 0 else loader:
            step(accelerator, model, optimizer, batch)
    assert (said(run_dir), verdict(run_dir)["verified"]) == ("equal", True)
    assert not list(read_journal(RunPaths(run_dir)).of_kind("incident"))


# ---- a script that restarts its epoch on purpose (timm, the ImageNet example) ----------------------------------------


def test_seeded_script_that_begins_its_epoch_again_is_not_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It saves at the end of an epoch, dies in the middle of the next, and starts that one from its beginning.

    Its second resume repeats what its first one began with, which is as much on purpose.
    """

    def launch(*, resume: bool, num_batches: int) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        chronicle.attach(tmp_path / "run", model, optimizer)
        if resume:
            state = torch.load(tmp_path / "state.pt", weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        loader = DataLoader(numbers(), batch_size=2, shuffle=True)
        done = 0
        for _ in range(2):
            for batch in loader:
                model(batch[0]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done == num_batches:
                    return
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")

    launch(resume=False, num_batches=12)
    launch(resume=True, num_batches=10)
    words = "this pass of the loader comes in the order of the pass that began at step 1"
    assert said(tmp_path / "run") == words
    assert [line for line in capsys.readouterr().err.splitlines() if "chronicle" in line and "batch" in line] == [
        f"chronicle guard: not verified: next batch ({words})"
    ]
    launch(resume=True, num_batches=2)
    words = "this pass of the loader comes in the order of the pass that began at step 9"
    assert said(tmp_path / "run") == words
    assert [line for line in capsys.readouterr().err.splitlines() if "chronicle" in line and "batch" in line] == [
        f"chronicle guard: not verified: next batch ({words})"
    ]
    assert not list(read_journal(RunPaths(tmp_path / "run")).of_kind("incident"))


# ---- HF Trainer and Lightning ----------------------------------------------------------------------------------------


def test_trainer_that_was_told_to_ignore_the_data_is_told_what_repeats(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from chronicle.resume.transformers import ChronicleCallback
    from tests.guard.test_compile import Net

    class Model(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            out = super().forward(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    def train(resume: str | None, **options: Any) -> str:
        torch.manual_seed(0)
        rows = [{"x": torch.randn(8), "labels": torch.zeros(1)} for _ in range(32)]
        arguments = TrainingArguments(
            str(tmp_path / "out"), max_steps=6, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, **options
        )
        callback = ChronicleCallback(tmp_path / "run", accept_change={"checkpoint": "on purpose"})
        Trainer(Model(), arguments, train_dataset=rows, callbacks=[callback]).train(resume_from_checkpoint=resume)
        return said(tmp_path / "run") if resume else ""

    train(None)
    older = str(tmp_path / "out" / "checkpoint-2")
    assert train(older) == "equal"
    assert train(older, ignore_data_skip=True).endswith("2 batches repeat; the data start again from their beginning")


def test_lightning_in_the_middle_of_an_epoch_is_told_truly(tmp_path: Path) -> None:
    """Lightning #19764: the sampler's order is not restored. No hook of the model sees `training_step`."""
    import lightning.pytorch as pl

    from chronicle.resume.lightning import ChronicleCallback

    logging.getLogger("lightning.pytorch").setLevel("ERROR")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step == 3 and not trainer.ckpt_path:
                trainer.save_checkpoint(tmp_path / "step=3.ckpt")

    def fit(path: Path | None, *, shuffle: bool) -> None:
        torch.manual_seed(0)
        callbacks: list[pl.Callback] = [ChronicleCallback(tmp_path / f"run-{shuffle}"), Save()]
        quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(max_steps=7, accelerator="cpu", enable_model_summary=False, callbacks=callbacks, **quiet)
        loader = DataLoader(numbers(), batch_size=2, shuffle=shuffle, num_workers=0)
        trainer.fit(Module(), loader, ckpt_path=path)

    fit(None, shuffle=True)
    fit(tmp_path / "step=3.ckpt", shuffle=True)
    again = "the batch of step 1 of the first pass comes again: 3 batches repeat; the data start again from their beginning"
    assert said(tmp_path / "run-True") == again
    assert verdict(tmp_path / "run-True")["verified"] is False


def test_a_rank_beside_the_save_does_not_say_that_the_run_stopped_there(tmp_path: Path) -> None:
    """Rank 0 saves alone and is killed three steps later; rank 1 had not written its last batches."""
    recorded(tmp_path, "abcdef")
    assert told(tmp_path, Position("one", 6), "x")[1].startswith("the run stopped right at this save, or before")
    assert told(tmp_path, Position("one", 9), "x")[1] == "the record of batches ends before this save"
    before = read_first_pass(tmp_path, Position("one", 6), 0)
    assert before is not None
    check = OtherBatch(before, ord("x")).check(exactly=False, continues=False, beside=1)
    assert check.cause == "rank 1 took no part in this save, and the batch that followed there is not on record"


# ---- the record itself -----------------------------------------------------------------------------------------------


def recorded(directory: Path, digests: str, *, parent: Position | None = None, name: str = "one") -> BatchRecord:
    """A record of one batch a letter; a space begins a new pass of the loader."""
    record = BatchRecord(directory)
    record.begin(name, 0, start_step=0 if parent is None else parent.num_seen, parent=parent, launch=1)
    start, count = 0 if parent is None else parent.num_seen, 0
    for one in digests.split(" "):
        for place, letter in enumerate(one):
            count += 1
            record.add(ord(letter), start + count, place + 1)
    return record


def told(directory: Path, position: Position, letter: str, **promise: bool) -> tuple[Outcome, str]:
    before = read_first_pass(directory, position, 0)
    assert isinstance(before, FirstPass)
    check = OtherBatch(before, ord(letter)).check(**{"exactly": False, "continues": False, **promise})
    return check.outcome, check.cause


def followed(directory: Path, position: Position) -> int | None:
    before = read_first_pass(directory, position, 0)
    return None if before is None else before.followed


def test_words_for_every_kind_of_other_batch(tmp_path: Path) -> None:
    recorded(tmp_path, "abcdef ghijkl")
    inside = Position("one", 9)
    assert followed(tmp_path, inside) == ord("j")
    assert told(tmp_path, inside, "h")[1] == "the batch of step 8 of the first pass comes again: 2 batches repeat"
    assert told(tmp_path, inside, "g")[1].endswith("3 batches repeat; the pass of the loader starts again")
    assert told(tmp_path, inside, "a")[1].endswith("9 batches repeat; the data start again from their beginning")
    assert told(tmp_path, inside, "l")[1] == "2 batches of the first pass are left out; the batch of step 12 comes first"
    assert told(tmp_path, inside, "z")[1].startswith("the batch is none of the 12 of the first pass")
    assert told(tmp_path, inside, "z")[0] is Outcome.NOTED
    assert told(tmp_path, inside, "z", exactly=True)[0] is Outcome.DIFFERENT
    assert told(tmp_path, inside, "h", continues=True)[0] is Outcome.NOTED
    assert told(tmp_path, inside, "a", continues=True)[0] is Outcome.DIFFERENT


def test_run_that_stopped_at_its_save_is_not_compared(tmp_path: Path) -> None:
    """In unshuffled data every batch of the second epoch is one of the first: what came after the save is not known."""
    recorded(tmp_path, "abcdef abc")
    end = Position("one", 9)
    assert told(tmp_path, end, "d")[0] is Outcome.NOT_COMPARED
    assert told(tmp_path, end, "a")[0] is Outcome.NOT_COMPARED
    assert told(tmp_path, end, "z")[0] is Outcome.NOT_COMPARED
    assert told(tmp_path, end, "c")[1].endswith("this launch begins with the batch of step 3")


def test_records_of_two_launches_are_one_first_pass(tmp_path: Path) -> None:
    recorded(tmp_path, "abcdefgh")
    recorded(tmp_path, "efXY", parent=Position("one", 4), name="two")
    before = read_first_pass(tmp_path, Position("two", 2), 0)
    assert before is not None
    assert "".join(chr(digest) for digest in before.entries["digest"]) == "abcdefXY"
    assert (before.position, before.resumed) == (6, frozenset({4}))


def test_a_resume_that_began_in_the_middle_of_a_pass_is_no_beginning_of_data(tmp_path: Path) -> None:
    """The second resume starts where the first one did, as with a position that was not saved again: that is no new start."""
    recorded(tmp_path, "abcdefgh")
    recorded(tmp_path, "efgh abcd", parent=Position("one", 4), name="two")
    before = read_first_pass(tmp_path, Position("two", 2), 0)
    assert before is not None and all(OtherBatch(before, ord(letter)).is_astray for letter in "ef")
    recorded(tmp_path, "abcd", parent=Position("one", 4), name="three")
    before = read_first_pass(tmp_path, Position("three", 2), 0)
    assert before is not None and [OtherBatch(before, ord(letter)).is_astray for letter in "ab"] == [False, True]


def test_record_that_was_cut_by_a_crash_ends_with_its_last_whole_batch(tmp_path: Path) -> None:
    recorded(tmp_path, "abc")
    path = tmp_path / "one.0"
    path.write_bytes(path.read_bytes()[:-3])
    before = read_first_pass(tmp_path, Position("one", 1), 0)
    assert before is not None and len(before.entries) == 2
    assert followed(tmp_path, Position("one", 2)) is None
    assert ENTRY.size == 16


def test_old_batches_are_dropped_and_positions_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronicle.resume.data.MAX_BATCHES", 100)
    record = BatchRecord(tmp_path)
    record.begin("one", 0, start_step=0, parent=None, launch=None)
    for number in range(450):
        record.add(number, number + 1, 0)
    assert followed(tmp_path, Position("one", 440)) == 440
    assert followed(tmp_path, Position("one", 3)) is None
    assert (tmp_path / "one.0").stat().st_size < 300 * ENTRY.size


def test_promised_batch_that_is_another_is_refused(tmp_path: Path) -> None:
    run_dir, checkpoint = tmp_path / "run", tmp_path / "ck" / "step-5"
    two_epochs(run_dir, checkpoint, save_at=5, shuffle=False)
    accelerator, model, optimizer, loader = accelerated(run_dir, shuffle=False, same_data=True)
    accelerator.load_state(str(checkpoint))
    with pytest.raises(ResumeRefused):
        step(accelerator, model, optimizer, next(iter(loader)))
