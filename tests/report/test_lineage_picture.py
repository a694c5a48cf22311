"""The picture: same bytes for the same story, the abandoned part grey, no line across a launch's border."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from chronicle.report.lineage_picture import GREY, _of_panels, draw_lineage
from chronicle.report.page_data import PALETTE, build_page_data
from chronicle.story import read_story
from chronicle.story.learning import would_have_resumed_at
from chronicle.story.series import ChannelCurve, read_series, robust_range, thin
from tests.builders.story_runs import StoryRun, toy_run

pytest.importorskip("matplotlib")


# How linear RGB is seen without one kind of cone: Machado, Oliveira and Fernandes (2009), severity 1
SIGHTS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """CIE L*a*b* of `#rrggbb`."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    light = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    light = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, light, strict=True)))) for row in SIGHTS[sight]]
    xyz = [sum(a * b for a, b in zip(row, light, strict=True)) for row in TO_XYZ]
    shares = [one / white for one, white in zip(xyz, (0.9505, 1.0, 1.089), strict=True)]
    x, y, z = (share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116 for share in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHTS)
def test_launches_are_told_apart_and_none_is_an_incident_for_any_eye(sight: str) -> None:
    def apart(one: str, other: str) -> float:
        return math.dist(seen(one, sight), seen(other, sight))

    assert min(apart(one, other) for one, other in zip(PALETTE, (*PALETTE[1:], PALETTE[0]), strict=True)) >= 16
    assert min(apart(PALETTE[i], PALETTE[j]) for i in range(4) for j in range(i)) >= 16
    for alarm in ("#c62f2f", "#d0453f"):  # the picture's and the page's
        assert min(apart(one, alarm) for one in PALETTE) >= 10


def draw(root: Path, name: str) -> bytes:
    paths = toy_run(root / name).paths
    story = read_story(paths)
    draw_lineage(story, read_series(paths, [1, 2]), root / f"{name}.png")
    return (root / f"{name}.png").read_bytes()


def test_the_same_story_gives_the_same_picture(tmp_path: Path) -> None:
    first, second = draw(tmp_path, "a"), draw(tmp_path, "b")
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    assert first == second


def test_the_abandoned_part_is_a_line_of_its_own_in_grey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **how: drawn.append(figure))
    paths = toy_run(tmp_path).paths
    draw_lineage(read_story(paths), read_series(paths, [1, 2]), tmp_path / "toy.png")
    lines = {tuple(line.get_xdata()): line.get_color() for line in drawn[0].axes[1].lines}
    assert lines[1, 2, 3, 4, 5] == PALETTE[0]
    assert lines[6, 7, 8, 9, 10] == GREY
    assert lines[6, 7, 8] == PALETTE[1]
    drawn[0].draw_without_rendering()
    loss, tree = (axes.get_position() for axes in drawn[0].axes[1:])
    assert 0 < loss.y0 - tree.y1 < 0.05, "no panel takes room that nothing stands in"


def test_a_refused_launch_stands_where_the_rollback_before_it_went(tmp_path: Path) -> None:
    """A guard that found the wrong schedule does not know the step; the contract of the rollback does."""
    run = StoryRun(tmp_path)
    run.start(1, 0)
    run.metrics(1, {step: {"loss": 1.0} for step in range(1, 31)})
    run.end(1, 30)
    run.rollback(20, 0.5, from_step=30)
    run.add("launch.start", launch=2, data={"argv": ["train"]})
    run.add("guard.verdict", launch=2, title="refused", data={"verdict": "refused", "checks": []})
    run.add("launch.end", launch=2, data={"exit_code": 78})
    story = read_story(run.paths, signs_of_life=False)
    assert [would_have_resumed_at(story, launch) for launch in story.launches] == [0, 20]
    stood = [launch["stood"] for launch in build_page_data(story, read_series(run.paths, [1, 2]), {})["launches"]]
    assert stood == [None, 20]


def test_thinning_keeps_a_spike_of_one_step() -> None:
    steps = list(range(100_000))
    values = [1.0] * 100_000
    values[77_777] = 9.0
    thinned = thin(ChannelCurve(steps, [None] * 100_000, values), 500)
    assert len(thinned.steps) <= 2000
    assert 77_777 in thinned.steps and max(thinned.values) == 9.0
    assert thinned.steps == sorted(thinned.steps)


def test_the_range_shows_the_drift_and_not_the_spike() -> None:
    low, high = robust_range([1.65 + i / 20000 for i in range(1000)] + [100.0] * 5)
    assert 1.6 < low < 1.66 and 1.69 < high < 1.8


def test_many_launches_are_few_artists_and_few_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One artist per launch and mark took minutes for 10^4 launches."""
    from matplotlib.figure import Figure

    run, seen = StoryRun(tmp_path), []
    for number in range(1, 301):
        start = 7 * (number - 1)
        if number % 5 == 0:
            run.rollback(start, 0.9)
        run.start(number, start)
        run.metrics(number, {step: {"loss": 3.0, "lr": 1e-3} for step in range(start + 1, start + 11)})
        run.end(number, start + 10)
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **how: seen.append(figure))
    story = read_story(run.paths)
    draw_lineage(story, read_series(run.paths, range(1, 301)), tmp_path / "many.png")
    assert max(len(axes.lines) for axes in seen[0].axes) < 240
    kept_steps = {step for line in seen[0].axes[1].lines for step in line.get_xdata() if line.get_color() != GREY}
    assert {1, 7 * 299 + 10} <= kept_steps


def test_a_launch_that_names_its_loss_otherwise_is_drawn(tmp_path: Path) -> None:
    paths = toy_run(tmp_path / "a").paths
    first, second = read_series(paths, [1, 2])
    renamed = replace(second, channels={"train/loss": second.channels["loss"]})
    shown = _of_panels([first, renamed])
    assert shown[1].channels["loss"] == second.channels["loss"]
