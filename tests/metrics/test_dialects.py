"""Every dialect is read: the planted spike is seen at its place, cut, coloured, interleaved or behind a prefix."""

import math
import random
from pathlib import Path

import pytest

from chronicle.metrics.readers import Contents, form_of, read_log
from chronicle.watch.follow import follow_file
from chronicle.watch.scan import scan_file
from rollback.channels import Role, find_channel
from rollback.detect import Kind, Tier
from tests.metrics.dialects import WRITERS

SPIKE = 240
LOSSES = [2.0 + 3.0 / (1 + row / 30) + random.Random(row).gauss(0.0, 0.02) + 2.5 * (row == SPIKE) for row in range(300)]


SHORT = LOSSES[:150]  # for tests that read a log many times: two epochs and more of every dialect that has them


def write(path: Path, name: str, losses: list[float] = LOSSES) -> Path:
    suffix, writer = WRITERS[name]
    file = path / f"log{suffix}"
    file.write_text(writer(losses))
    return file


def series(path: Path) -> list[tuple[int, float]]:
    """The leading loss of a log: (step, value)."""
    points = list(read_log(path))
    name = find_channel({name: None for point in points for name in point.values}, Role.LOSS)
    return [(point.step, point.values[name]) for point in points if name in point.values]


@pytest.mark.parametrize("name", WRITERS)
def test_the_planted_spike_is_seen(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    read = series(path)
    assert [value for _, value in read] == pytest.approx(LOSSES, rel=0.03), name
    steps = [step for step, _ in read]
    assert steps == sorted(steps) and len(set(steps)) == len(steps)
    scan = scan_file(path)
    assert steps[SPIKE] in [event.onset_step for event in scan.events], [e.onset_step for e in scan.events]
    assert scan.contents is not None and scan.contents.judged


LINES = [name for name, (suffix, _) in WRITERS.items() if suffix == ".log"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_log_cut_at_any_byte_is_a_shorter_log(name: str, tmp_path: Path) -> None:
    """A number that a kill cut in half (`11.3` as `1`) would be a fall of the loss."""
    path = write(tmp_path, name, SHORT)
    whole, data, dice = series(path), path.read_bytes(), random.Random(7)
    for at in [len(data) - 1, len(data) - 3, *(dice.randrange(len(data) // 8, len(data)) for _ in range(3))]:
        path.write_bytes(data[:at])
        read = series(path)
        assert read == whole[: len(read)] and len(read) >= len(whole) * at // len(data) - 3, data[at - 60 : at]


@pytest.mark.parametrize("name", WRITERS)
def test_colours_line_ends_and_prefixes_change_nothing(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, SHORT)
    whole, text = series(path), path.read_text()
    colour = "".join(f"\x1b[32m\x1b[1m{line}\x1b[0m\n" for line in text.splitlines())
    collected = "".join(f"2026-01-02T03:04:05.678901Z node-7 {line}\n" for line in text.split("\n")[:-1])
    container = "".join(f"2026-01-02T03:04:05.678901234Z stdout F {line}\n" for line in text.split("\n")[:-1])
    for dress in (colour, text.replace("\n", "\r\n"), collected, container):
        path.write_text(dress, newline="")
        assert series(path) == whole, dress[:300]


def test_of_two_workers_of_ray_that_print_one_is_read(tmp_path: Path) -> None:
    form = "(RayTrainWorker pid={pid}, ip=10.0.0.1) step {step} loss {step}.0{pid}\n"
    rows = [form.format(pid=pid, step=step) for step in range(9) for pid in (1, 2)]
    (tmp_path / "ray.log").write_text("".join(rows))
    assert [point.values["loss"] for point in read_log(tmp_path / "ray.log")] == [step + 0.01 for step in range(9)]


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("form", ["[rank{0}]: "])
def test_of_two_ranks_that_print_one_is_read(name: str, form: str, tmp_path: Path) -> None:
    """Both ranks print, each its own loss, the second one lags: one series comes out."""
    path = write(tmp_path, name, SHORT)
    whole, writer = series(path), WRITERS[name][1]
    first, second = writer(SHORT).splitlines(), writer([loss + 0.3 for loss in SHORT]).splitlines()
    dice, mixed = random.Random(3), []
    at = [0, 0]
    while at[0] < len(first) or at[1] < len(second):
        rank = 0 if at[1] >= len(second) or (at[0] < len(first) and dice.random() < 0.5 + 0.05 * (at[1] - at[0])) else 1
        mixed.append(form.format(rank) + (first, second)[rank][at[rank]])
        at[rank] += 1
    path.write_text("\n".join(mixed) + "\n")
    assert [step for step, _ in series(path)] == [step for step, _ in whole]
    assert len({round(value - other, 1) for (_, value), (_, other) in zip(series(path), whole, strict=True)}) <= 2


@pytest.mark.parametrize("name", WRITERS)
def test_a_growing_log_gives_what_the_finished_one_gives(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name)
    follower = follow_file(path, once=True)
    follower.look()
    assert follower.contents.judged == _contents(path).judged
    onsets = {event.onset_step for event in follower.detector.events}
    assert series(path)[SPIKE][0] in onsets


# The same losses with the steps left out, and with them
COUNTED = {
    "trainer.log": lambda row, x: f"{{'loss': {x:.4f}, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': {row / 100:.2f}}}",
    "records.jsonl": lambda row, x: f'{{"loss": {x:.4f}, "grad_norm": 1.2}}', "column.txt": lambda row, x: f"{x:.4f}",
    "table.csv": lambda row, x: f"{x:.4f},0.1", "history.json": lambda row, x: f"{x:.4f},",
}  # fmt: skip
NAMED = {
    "trainer.log": lambda row, x: f"step {row} {{'loss': {x:.4f}, 'learning_rate': 5e-05, 'epoch': {row / 100:.2f}}}",
    "records.jsonl": lambda row, x: f'{{"step": {row}, "loss": {x:.4f}}}', "table.csv": lambda row, x: f"{x:.4f},{row}",
}  # fmt: skip
HEADS = {"column.txt": "loss\n", "history.json": '{"loss": [\n'}


@pytest.mark.parametrize(("name", "named"), [*((name, False) for name in COUNTED), *((name, True) for name in NAMED)])
def test_the_report_says_where_steps_were_counted(name: str, named: bool, tmp_path: Path) -> None:
    """A log without steps was read as steps 0 to n, without a word that nobody had written them."""
    line = (NAMED if named else COUNTED)[name]
    head = HEADS.get(name, "loss,step\n" if named else "loss,lr\n") if name.endswith((".csv", ".txt", "history.json")) else ""
    rows = [line(10 * row if named else row, x) for row, x in enumerate(LOSSES[:50])]
    path = tmp_path / name
    path.write_text(head + "\n".join(rows).removesuffix(",") + ("]}" if name == "history.json" else "") + "\n")
    follower = follow_file(path, once=True)
    follower.look()
    for contents in (_contents(path), follower.contents):
        assert (contents.points, contents.last_step) == (50, 490 if named else 49)
        assert ("counted" in contents.lines()[0]) is contents.to_json()["steps_counted"] is not named


def _contents(path: Path) -> Contents:
    contents = Contents(form_of(path))
    for point in read_log(path):
        contents.note(point)
    return contents


@pytest.mark.parametrize("name", WRITERS)
def test_a_loss_that_is_no_number_is_proposed(name: str, tmp_path: Path) -> None:
    suffix, writer = WRITERS[name]
    path = tmp_path / f"log{suffix}"
    path.write_text(writer([*LOSSES[:120], *[math.nan] * 30]))
    assert _nan_proposed(path) == [series(path)[120][0]]


LINE = "step: {step}, loss: {x}"
ROWS: dict[str, tuple[str, str, str]] = {  # name: the line or row, its head, what a loss looks like
    "printed": (LINE, "", "{:.4f}"), "printed, blanks": ("step {step} loss {x}", "", "{:.4f}"),
    "printed, with lr": ("Step {step} | loss:{x} lr:2e-05 tokens_per_second:12.5", "", "{:.4f}"),
    "bar": ("Epoch 0: 10%|#  | {step}/9000 [00:10<00:30, 1.00it/s, v_num=0, train_loss={x}]", "", "{:.3f}"),
    "table": ("{step},{x}", "step,loss\n", "{:.4f}"), "record": ('{{"step": {step}, "loss": {x}}}', "", "{:.4f}"),
    "of Trainer": ("{{'loss': {x}, 'learning_rate': 5e-05, 'epoch': 1.0}}", "", "{:.4f}"),
}  # fmt: skip
DISGUISES = [
    *(("printed", word) for word in (
        "None", "null", "N/A", "<NA>", "--", "****", "skipped", "nan (skipped)", "-nan(ind)", "1.#QNAN", "-1.#IND", "1.#INF",
        "Array(nan, dtype=float32)", "tensor(nan, device='cuda:0', grad_fn=<NllLossBackward0>)", "tf.Tensor(nan, shape=())",
    )),
    *(("printed, blanks", word) for word in ("None", "NA", "-nan(ind)")),
    *(("printed, with lr", word) for word in ("None", "nan")),
    *(("table", word) for word in ("", "None", "NA", "#N/A", "nan", "inf", "-nan(ind)", "1.#QNAN")),
    *(("record", word) for word in ("null", "NaN", '"None"', '"nan"', '"-nan(ind)"', "-Infinity")),
    *(("of Trainer", word) for word in ("nan", "'nan'", "0.0", "'0'", "None")), ("bar", "nan.0"), ("bar", "inf.0"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "word"), DISGUISES)
def test_a_loss_that_is_written_as_no_number_is_told(form: str, word: str, tmp_path: Path) -> None:
    """36 of 178 logs said "0 events": the words were skipped, and `1.#QNAN` was read as 1.

    What is a number that is not finite is proposed; a word in its place is a warning in the words of what was seen.
    """
    line, head, number = ROWS[form]
    path = tmp_path / ("log.csv" if head else "log.jsonl" if form == "record" else "log.txt")
    texts = [number.format(x) for x in LOSSES[:220]] + [word] * 40
    path.write_text(head + "".join(line.format(step=row, x=x) + "\n" for row, x in enumerate(texts)))
    told = [event for event in scan_file(path).events if event.kind in HIDDEN]
    assert [event.onset_step for event in told] == [220] and told[0].tier is not Tier.NOTICE
    assert "nan" not in word.lower() or told[0].tier is Tier.PROPOSE or told[0].kind is not Kind.NAN


def test_a_last_line_that_says_so_is_read(tmp_path: Path) -> None:
    """`Loss is nan, stopping training` names no step and ends the log; before any loss it is a line of a help text."""
    path, good = tmp_path / "log.txt", "".join(f"step {row} lm loss {x:.4f}\n" for row, x in enumerate(LOSSES[:220]))
    path.write_text("--stop: end when the loss is nan\n" + good)
    assert _nan_proposed(path) == []
    for said in ("Loss is nan, stopping training\n" * 4, "WARNING: non-finite loss, ending training tensor(nan)\n"):
        path.write_text(good + said)
        assert _nan_proposed(path) == [219]


def test_a_loss_that_is_not_written_from_the_start_is_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    for quiet in (lambda row: row % 4, lambda row: row < 100, lambda row: row in (150, 200)):
        texts = [None if quiet(row) else f"{x:.4f}" for row, x in enumerate(LOSSES[:SPIKE])]
        path.write_text("".join(LINE.format(step=row, x=text) + "\n" for row, text in enumerate(texts)))
        assert _nan_proposed(path) == []


HIDDEN = (Kind.NAN, Kind.STANDS_STILL, Kind.LOSS_MISSING)


def _nan_proposed(path: Path) -> list[int]:
    """The onsets that the finished log has; the growing one has them too."""
    follower = follow_file(path, once=True)
    follower.look()
    follower.detector.finish()
    found = [
        [event.onset_step for event in events if event.kind is Kind.NAN and event.tier is Tier.PROPOSE]
        for events in (scan_file(path).events, follower.detector.events)
    ]
    assert found[0] == found[1]
    return found[0]


# Form of a line, and its first series: eriklindernoren/PyTorch-GAN, Unity-Technologies/ml-agents,
# junyanz/pytorch-CycleGAN-and-pix2pix, pytorch/examples dcgan, vwxyzjn/cleanrl and leggedrobotics/rsl_rl
PLAYERS = {
    "cyclegan": ("(epoch: {e}, iters: {at}, time: 0.294, data: 0.152) D_A: {x:.3f} G_A: {x:.3f} cycle_A: {x:.3f} ", "D_A"),
    "dcgan": ("[{e0}/25][{at}/1000]\tLoss_D: {x:.4f}\tLoss_G: {x:.4f}\tD(x): 0.7012\tD(G(z)): 0.2011 / 0.1002", "Loss_D"),
    "pytorch-gan": ("[Epoch {e0}/200] [Batch {at}/1000] [D loss: {x:.6f}] [G loss: 0.693147]", "D loss"),
    "ml-agents": ("[INFO] 3DBall. Step: {step}. Time Elapsed: 30.112 s. Mean Reward: {x:.3f}. Std of Reward: 0.724. Training.",
                  "Mean Reward"),
    "cleanrl": ("global_step={step}, episodic_return=[{x}]", "episodic_return"),
    "rsl_rl": (" Learning iteration {row}/1500 \n  Computation: 98304 steps/s (collection: 0.9s, learning 0.1s)\n"
               "   Value function loss: {x:.4f}\n  Surrogate loss: -0.0041\n  Mean reward: 10.20", "Value function loss"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAYERS)
def test_logs_of_players_are_read_by_the_steps_they_print(name: str, tmp_path: Path) -> None:
    """Two of them have no word `loss`, and the bracket of another was no step: four refusals of healthy logs."""
    form, leads = PLAYERS[name]
    rows = [
        form.format(step=row * 100, row=row, e=1 + (row - 1) // 10, e0=(row - 1) // 10, at=(row - 1) % 10 * 100 + 100, x=x)
        for row, x in enumerate([*LOSSES[:120], *[math.nan] * 10], 1)
    ]
    path = tmp_path / "train.log"
    path.write_text("\n".join(rows) + "\n")
    every = 1 if name == "rsl_rl" else 100
    points = [(point.step, point.values.get(leads)) for point in read_log(path)]
    assert [step for step, _ in points] == [every * row for row in range(1, 131)]
    assert [value for _, value in points[:120]] == pytest.approx(LOSSES[:120], rel=0.03)
    scan = scan_file(path)
    onsets = {event.onset_step for event in scan.events if event.kind is Kind.NAN and event.tier is Tier.PROPOSE}
    assert onsets == {121 * every}


def test_statistics_in_place_of_numbers_are_their_means(tmp_path: Path) -> None:
    """NVlabs/stylegan3 training/training_loop.py writes stats.jsonl: each value with its number, mean and spread."""
    path = tmp_path / "stats.jsonl"
    path.write_text("".join(
        f'{{"Loss/G/loss": {{"num": 32.0, "mean": {x}, "std": 0.1}}, '
        f'"Progress/tick": {{"num": 1.0, "mean": {row}.0, "std": 0.0}}, "timestamp": {1_700_000_000 + row}.0}}\n'
        for row, x in enumerate(LOSSES)
    ))  # fmt: skip
    points = list(read_log(path))
    assert [point.step for point in points] == list(range(len(LOSSES)))
    assert [dict(point.values) for point in points] == [{"Loss/G/loss": x} for x in LOSSES]
