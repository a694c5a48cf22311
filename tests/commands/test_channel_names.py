"""One table of channel names: the detector, the views and the restart checks agree on what a logged series is."""

import math
import random
import re
from pathlib import Path

import pytest

from chronicle.metrics.log import read_metrics
from chronicle.report.page_data import build_page_data
from chronicle.story import read_story
from chronicle.story.series import read_series
from chronicle.watch.follow import follow_file
from chronicle.watch.log_checks import logged_row
from chronicle.watch.restart import LrPromise
from chronicle.watch.scan import scan_run
from rollback import channels
from rollback.channels import TABLE, Role, canonical_name, canonical_of, find_channel, role_of, value_of
from rollback.detect import Tier
from scripts.channel_names import check, main
from tests.builders.story_runs import StoryRun
from tests.commands.cli import Cli

STEPS = 700


def diverging_run(root: Path, loss: str, lr: str) -> StoryRun:
    """One launch that logs its loss and LR under these names and diverges from step 500 on."""
    noise, run = random.Random(3), StoryRun(root)
    run.start(1, 0)
    rise = [0.0 if step < 500 else 0.02 * math.expm1((step - 500) / 40) for step in range(STEPS)]
    values = {step: {loss: 2.0 + noise.gauss(0.0, 0.02) + rise[step], lr: 3e-4, "grad_norm": 1.0} for step in range(STEPS)}
    run.metrics(1, values)
    return run


@pytest.mark.parametrize(
    ("loss", "lr"),
    [("loss", "lr"), ("lm loss", "learning rate"), ("train/loss", "train/lr"), ("total_loss", "learning_rate")],
)
def test_every_part_finds_the_loss_and_the_lr_under_their_logged_names(
    tmp_path: Path, chronicle: Cli, loss: str, lr: str
) -> None:
    """`lm loss` was proposed on while `status` showed no loss; of `train/loss` `spikes` drew no curve."""
    run = diverging_run(tmp_path, loss, lr)
    path = run.paths.metrics_path(1)
    last = list(read_metrics(path))[-1].values
    scan = scan_run(run.paths, None)
    assert [event.channels[0] for event in scan.events if event.tier is Tier.PROPOSE] == [loss]  # the detector
    assert scan.spark  # the curve of `spikes`
    shown = chronicle("status", "--json").json
    assert (shown["loss"], shown["lr"]["value"]) == (last[loss], 3e-4)  # `status`
    text = chronicle("status").out
    assert "\nloss " in text and "\nlr " in text and "\ngrad_norm " in text
    story, series = read_story(run.paths), read_series(run.paths, [1])
    page = build_page_data(story, series, {})
    assert (page["loss"], page["lr"], page["channels"][:2]) == (loss, lr, [loss, lr])  # the report
    assert logged_row(1, last) == (1, {"loss": last[loss], "lr": 3e-4})  # the restart checks
    assert LrPromise(5, [1e-4]).add_to(5, {lr: 3e-4})["lr/expected"] == 1e-4  # the promised LR
    follower = follow_file(path, once=True)
    follower.look()
    assert f"{loss} " in follower.status_line() and f"{lr} " in follower.status_line()  # `watch`


def test_alias_has_the_role_of_the_name_it_is_read_as() -> None:
    """What the readers call `loss` must be a loss to the detector under the trainer's own name, too."""
    for row in TABLE:
        for name in (*row.aliases, *((row.canonical,) if row.canonical else ())):
            assert role_of(name) is row.role, name
            assert canonical_name(name) == row.canonical, name


def test_whole_series_is_preferred_to_that_of_one_part() -> None:
    values = {"lr/encoder": 1.0, "lr": 2.0, "grad_norm/layer1": 3.0}
    assert value_of(values, Role.LR) == 2.0
    assert find_channel(values, Role.NORM) == "grad_norm/layer1"
    assert find_channel(values, Role.LOSS) is None
    assert find_channel(["train_loss", "loss"], Role.LOSS) == "train_loss"  # the first one leads, as in the detector
    assert find_channel(["lr/expected"], Role.LR) is None


def test_roles_of_many_series_have_no_name_that_we_write() -> None:
    assert canonical_of(Role.LR) == "lr"
    with pytest.raises(KeyError):
        canonical_of(Role.WEIGHT)


@pytest.mark.parametrize(
    "text",
    ['X = ("loss", "train_loss")', '{"lr": ("lr", "Learning Rate")}', 'Y = {"learning_rate": "lr"}', 'Z = [b"loss", b"norm"]'],
)
def test_second_list_of_channel_names_is_a_lint_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert len(list(check(path))) == 1
    assert main([str(tmp_path)]) == 1


def test_measurements_under_our_own_names_are_no_list(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('values = {"loss": 1.0, "lr": rate, "grad_norm": norm}\nfields = ("lr", "initial_lr")')
    assert list(check(path)) == []


def test_packages_hold_one_list_of_channel_names() -> None:
    assert main([]) == 0


def test_the_short_way_of_a_usual_name_says_what_the_patterns_say() -> None:
    for name, role in channels.EXACT.items():
        assert channels._role_by_pattern(name) is role
        row = channels._row_of(name)
        assert row is not None and (not re.fullmatch(row.parts, name) or re.fullmatch(row.pattern, name)), name
