"""M4: the data a resume really begins with."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import chronicle
from chronicle import ResumeRefused
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.resume.batches import samples_of
from chronicle.resume.first_pass import Position
from chronicle.resume.samples import digest_of
from tests.guard.training import start


def batch_digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    return digest_of(samples_of((args, kwargs)))


def batches(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(4, 8, generator=generator)


def train(launch: Any, source: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        loss = launch.model(next(source)).square().mean()
        launch.optimizer.zero_grad()
        launch.accelerator.backward(loss)
        launch.optimizer.step()
        launch.scheduler.step()


@pytest.fixture
def interrupted(run_dir: Path, checkpoint: Path) -> Path:
    """Seven steps, a save, three more, then the end."""
    launch = start(run_dir)
    source = batches(0)
    train(launch, source, 7)
    launch.save(checkpoint)
    train(launch, source, 3)
    return checkpoint


def resumed(run_dir: Path, checkpoint: Path, **options: Any) -> Any:
    launch = start(run_dir, seed=1, **options)
    launch.accelerator.load_state(str(checkpoint))
    return launch


def verdict(run_dir: Path) -> dict[str, Any]:
    return [entry.data for entry in read_journal(RunPaths(run_dir)).of_kind("guard.verdict")][-1]


def num_seen(launch: Any) -> int:
    position = Position.parse(launch.accelerator.chronicle.data.position)
    assert position is not None
    return position.num_seen


def next_batch(run_dir: Path) -> str:
    check = next(check for check in verdict(run_dir)["checks"] if check["name"] == "next batch")
    return check["found"] if check["outcome"] == "equal" else str(check["cause"])


def test_resume_that_goes_on_with_the_next_batch_says_so(run_dir: Path, interrupted: Path) -> None:
    source = batches(0)
    for _ in range(7):
        next(source)
    train(resumed(run_dir, interrupted), source, 1)
    assert next_batch(run_dir) == "equal"


def test_data_that_start_again_are_named_and_refused_where_the_next_batch_was_promised(
    run_dir: Path, interrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accelerate by default: model, optimizer, schedule and generators are right, and the first samples come again."""
    again = "the batch of step 1 of the first pass comes again: 7 batches repeat; the data start again from their beginning"
    with pytest.raises(ResumeRefused) as refusal:
        train(resumed(run_dir, interrupted, same_data=True), batches(0), 1)
    assert [(check.code, check.cause) for check in refusal.value.checks] == [("M4", again)]
    train(resumed(run_dir, interrupted), batches(0), 1)
    assert next_batch(run_dir) == again
    assert capsys.readouterr().err.splitlines()[-1] == f"chronicle guard: not verified: next batch ({again})"


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (5, "the batch of step 6 of the first pass comes again: 2 batches repeat"),
        (9, "2 batches of the first pass are left out; the batch of step 10 comes first"),
    ],
)
def test_batch_that_is_not_the_next_one_is_named(run_dir: Path, interrupted: Path, seen: int, words: str) -> None:
    source = batches(0)
    for _ in range(seen):
        next(source)
    train(resumed(run_dir, interrupted), source, 1)
    assert next_batch(run_dir) == words
    assert verdict(run_dir)["verified"] is False


def test_first_pass_is_put_together_from_all_launches_that_led_to_the_checkpoint(
    tmp_path: Path, run_dir: Path, interrupted: Path
) -> None:
    source = batches(0)
    for _ in range(7):
        next(source)
    second = resumed(run_dir, interrupted)
    train(second, source, 4)
    later = second.save(tmp_path / "checkpoints" / "opt_step-11")
    train(second, source, 2)
    train(resumed(run_dir, later), batches(0), 1)
    assert next_batch(run_dir).startswith("the batch of step 1 of the first pass comes again: 11 batches repeat")


def test_run_that_stopped_at_its_save_is_not_compared_and_not_verified(
    run_dir: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = start(run_dir)
    source = batches(0)
    train(launch, source, 7)
    launch.save(checkpoint)
    train(resumed(run_dir, checkpoint, same_data=True), source, 1)
    assert next_batch(run_dir).startswith("the run stopped right at this save")
    assert verdict(run_dir)["verified"] is False
    assert "chronicle guard: passed, not compared: next batch (the run stopped" in capsys.readouterr().err


def test_batches_that_go_astray_later_are_an_incident(run_dir: Path, checkpoint: Path) -> None:
    """A shuffle buffer that was lost shows from the second batch on; the run goes on."""
    launch = start(run_dir)
    source = batches(0)
    train(launch, source, 7)
    launch.save(checkpoint)
    train(launch, source, 10)
    launch.accelerator.chronicle.data.finish()
    source = batches(0)
    for _ in range(7):
        next(source)
    again = resumed(run_dir, checkpoint)
    train(again, source, 2)
    train(again, batches(3), 5)
    assert next_batch(run_dir) == "equal"
    (incident,) = read_journal(RunPaths(run_dir)).of_kind("incident")
    assert (incident.data["kind"], incident.data["onset_step"]) == ("data-order", 10)


def test_micro_batches_of_the_first_step_are_followed_one_by_one(run_dir: Path, checkpoint: Path) -> None:
    """Four micro-batches a step enter before the first comparison: the next ones must not be taken for it."""

    def steps(launch: Any, source: Any, num_steps: int) -> None:
        for _ in range(num_steps):
            for _ in range(4):
                launch.accelerator.backward(launch.model(next(source)).square().mean())
            launch.optimizer.step()
            launch.scheduler.step()
            launch.optimizer.zero_grad()

    launch, source = start(run_dir), batches(0)
    steps(launch, source, 7)
    launch.save(checkpoint)
    steps(launch, source, 3)
    launch.accelerator.chronicle.data.finish()
    source = batches(0)
    for _ in range(28):
        next(source)
    steps(resumed(run_dir, checkpoint), source, 3)
    assert next_batch(run_dir) == "equal"
    assert list(read_journal(RunPaths(run_dir)).of_kind("incident")) == []


def test_evaluation_and_generation_are_no_batches(run_dir: Path) -> None:
    launch = start(run_dir)
    train(launch, batches(0), 2)
    with torch.no_grad():
        launch.model(torch.ones(4, 8))
    launch.model.eval()
    launch.model(torch.ones(4, 8))
    launch.model.train()
    train(launch, batches(0), 1)
    assert num_seen(launch) == 3


def test_another_order_passes_unless_the_same_was_promised(run_dir: Path, interrupted: Path) -> None:
    """Most scripts shuffle anew after a resume: no accident, but it stands in the verdict."""
    train(resumed(run_dir, interrupted), batches(5), 1)
    assert next_batch(run_dir).startswith("the batch is none of the 10 of the first pass")
    with pytest.raises(ResumeRefused):
        train(resumed(run_dir, interrupted, same_data=True), batches(5), 1)


def test_a_constant_batch_is_no_restart(run_dir: Path, checkpoint: Path) -> None:
    same = iter([torch.ones(4, 8)] * 20)
    launch = start(run_dir)
    train(launch, same, 7)
    launch.save(checkpoint)
    train(launch, same, 3)
    train(resumed(run_dir, checkpoint), same, 1)
    assert next_batch(run_dir) == "equal"


def test_digest_sees_values_order_and_shape() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    seen = {
        batch_digest((x,), {}),
        batch_digest((x.flip(0),), {}),
        batch_digest((x.reshape(4, 3),), {}),
        batch_digest((), {"x": x + 1}),
    }
    assert len(seen) == 4
    assert batch_digest((), {"a": x, "b": x + 1}) == batch_digest((), {"b": x + 1, "a": x})


def test_tracker_logs_into_the_launch_with_one_line_of_adoption(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    from chronicle.metrics.log import read_metrics

    launch = {"CHRONICLE_LAUNCH_DIR": tmp_path / "launch", "CHRONICLE_RUN_DIR": run_dir, "CHRONICLE_RUN": "r"}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    accelerator: Any = chronicle.guard(Accelerator(cpu=True, log_with="chronicle"), run_dir=run_dir)
    accelerator.init_trackers("tr-190")
    accelerator.log({"loss": 2.5, "lr": 1e-3}, step=4)
    accelerator.end_training()
    points = list(read_metrics(tmp_path / "launch" / "metrics.jsonl"))
    assert [(point.step, dict(point.values)) for point in points] == [(4, {"loss": 2.5, "lr": 1e-3})]


def test_model_under_guard_can_be_copied_and_pickled_and_the_copy_is_not_watched(
    run_dir: Path, checkpoint: Path
) -> None:
    """EMA copies are made by `copy.deepcopy(model)`: a hook that held the guard would drag the whole process along."""
    import copy
    import io

    launch = start(run_dir)
    average = copy.deepcopy(launch.model)
    torch.save(launch.model, io.BytesIO())
    average(torch.ones(4, 8))
    train(launch, batches(0), 4)
    assert num_seen(launch) == 4


class _Table(Mapping[str, Any]):
    """As a TensorDict: a mapping with a dtype and a shape that iterates over its rows."""

    dtype, shape = torch.float32, (3,)

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3

    def keys(self) -> Any:
        return self._tensors.keys()

    def values(self) -> Any:
        return self._tensors.values()

    def items(self) -> Any:
        return self._tensors.items()

    def detach(self) -> "_Table":
        return self

    def numel(self) -> int:
        return 12


def _objects(text: str) -> Any:
    out = np.empty(2, dtype=object)
    out[:] = [text, object()]
    return out


STRANGE: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr(),
    "sparse whole numbers": lambda x: x.round().long().to_sparse_csr(),
    "sparse columns": lambda x: x.to_sparse_csc(),
    "jagged": lambda x: torch.nested.nested_tensor([x[:2], x], layout=torch.jagged),
    "nested": lambda x: torch.nested.nested_tensor([x[:2], x]),
    "table of tensors": lambda x: _Table(a=x),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "negative": lambda x: torch._neg_view(x),
    "eight bits": lambda x: x.to(torch.float8_e4m3fn),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "packed": lambda x: torch.nn.utils.rnn.pack_sequence([x, x[:2]]),
    "texts": lambda x: np.array([str(float(x[0, 0]))]),
    "objects": lambda x: _objects(str(float(x[0, 0]))),
    "dates": lambda x: np.array([int(x[0, 0])], dtype="datetime64[D]"),
    "whole numbers of numpy": lambda x: x.long().numpy(),
    "backwards": lambda x: x.numpy()[::-1],
    "long doubles": lambda x: x.numpy().astype(np.longdouble),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.filterwarnings("ignore")  # torch warns of formats that are young or old
def test_whatever_a_batch_is_made_of_is_seen_and_ends_nothing(kind: str, tmp_path: Path) -> None:
    make = STRANGE[kind]
    x, y = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) + 5
    assert batch_digest((make(x),), {}) == batch_digest((make(x),), {}) != batch_digest((make(y),), {})

    class Takes(torch.nn.Linear):
        def forward(self, batch: Any, x: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(torch.ones(2, 4) if x is None else x)

    model = Takes(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = chronicle.attach(tmp_path / "logs" / "r", model, optimizer)
    model(make(x)).sum().backward()
    optimizer.step()
    assert run.session is not None
    run.session.sealer.finish()
    assert "guard.fault" not in [entry.kind for entry in read_journal(RunPaths(tmp_path / "logs" / "r")).entries]
    assert run.session.batches.has_seen


def test_batch_without_numbers_is_seen_by_its_shape() -> None:
    assert batch_digest((torch.ones(2, 3, device="meta"),), {}) != batch_digest((torch.ones(3, 3, device="meta"),), {})
