"""`spikes`, `watch`: exit codes, JSON as promised, hooks, and no heavy import on the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.commands.spikes import sparkline, spikes
from chronicle.commands.watch import watch
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.metrics.log import MetricsWriter
from tests.detect.series import noise

FIELDS = {
    "kind", "tier", "status", "onset_step", "onset_low_step", "onset_row", "onset_low_row", "alarm_step", "alarm_row",
    "peak_step", "peak_row", "recovered_step", "recovered_row", "channels", "cluster", "evidence",
}  # fmt: skip


def write(path: Path, losses: list[float]) -> Path:
    with MetricsWriter(path) as log:
        for step, loss in enumerate(losses):
            log.write(step, {"loss": loss}, time=float(step))
    return path


SPIKE = [x + (1.0 if row == 200 else 0.0) for row, x in enumerate(noise(400))]
DIVERGENCE = [x + max(0.0, 0.01 * (row - 300)) for row, x in enumerate(noise(500))]


def test_json_has_the_promised_fields(tmp_path: Path) -> None:
    result = spikes([str(write(tmp_path / "a.jsonl", SPIKE))])
    assert isinstance(result.data, dict)
    assert set(result.data) == {"file", "rows", "events", "proposals"}
    (event,) = result.data["events"]
    assert set(event) == FIELDS
    assert json.loads(json.dumps(result.data)) == result.data
    assert (event["kind"], event["tier"], event["onset_row"]) == ("instant-spike", "notice", 200)


def test_two_files_are_two_objects(tmp_path: Path) -> None:
    result = spikes([str(write(tmp_path / "a.jsonl", SPIKE)), str(write(tmp_path / "b.jsonl", DIVERGENCE))])
    assert isinstance(result.data, list) and [scan["rows"] for scan in result.data] == [400, 500]
    assert [bool(scan["proposals"]) for scan in result.data] == [False, True]


def test_fail_means_warn_or_above(tmp_path: Path) -> None:
    """A recovered spike is no reason for CI to fail, a divergence is."""
    assert spikes([str(write(tmp_path / "a.jsonl", SPIKE))], fail=True).exit_code == 0
    assert spikes([str(write(tmp_path / "b.jsonl", DIVERGENCE))], fail=True).exit_code == 5
    assert spikes([str(tmp_path / "b.jsonl")]).exit_code == 0


def test_proposal_names_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    """Without a directory of checkpoints there is no target, and it says so."""
    result = spikes([str(write(tmp_path / "b.jsonl", DIVERGENCE))])
    assert isinstance(result.data, dict)
    assert result.data["proposals"][0]["target_step"] is None
    assert "no verified checkpoint" in result.text


def test_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    spikes([str(write(tmp_path / "b.jsonl", DIVERGENCE))], plot=tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "error"), [("no/such/file", UsageProblem), ("nosuchrun", ChronicleError)])
def test_missing_log_is_one_sentence(
    name: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=name):
        spikes([name])


def test_sparkline_shows_what_is_not_finite() -> None:
    assert sparkline([1.0, 2.0, float("nan"), 3.0]) == "▁█✗█"


def test_watch_once_reads_printed_logs(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"iter {step}: loss {loss:.6f}, time 1ms\n" for step, loss in enumerate(SPIKE)))
    result = watch(str(path), once=True)
    assert isinstance(result.data, dict) and result.data["rows"] == 400
    assert [event["kind"] for event in result.data["events"]] == ["instant-spike"]


def test_watch_refuses_what_does_not_grow_by_lines(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(UsageProblem, match="not a log that grows"):
        watch(str(tmp_path / "x.csv"), once=True)


def test_hook_of_the_tier_is_called_with_the_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """on_propose gets the facts in its environment; a hook that fails is said and changes nothing."""
    out = tmp_path / "out"
    hook = f"echo $CHRONICLE_EVENT_KIND $CHRONICLE_EVENT_ONSET >> {out}"
    (tmp_path / "chronicle.toml").write_text(f'run = "r"\non_propose = "{hook}"\non_notice = "exit 3"\n')
    write(tmp_path / "logs" / "r" / "launches" / "0001" / "metrics.jsonl", DIVERGENCE)
    monkeypatch.chdir(tmp_path)
    assert watch(None, once=True).exit_code == 0
    kind, onset = out.read_text().split()
    assert kind == "gradual-divergence" and 250 <= int(onset) <= 340


def test_nothing_heavy_is_imported_to_list_spikes(tmp_path: Path) -> None:
    """`spikes` runs on a login node: no torch, mlflow, numpy, pydantic, matplotlib; metrics and detector no typer."""
    path = write(tmp_path / "a.jsonl", SPIKE)
    code = (
        "import sys; import chronicle.metrics.readers, rollback.detect, rollback.propose\n"
        "assert 'typer' not in sys.modules\n"
        f"from chronicle.commands.spikes import spikes; spikes([{str(path)!r}])\n"
        "print([m for m in ('torch','mlflow','numpy','pydantic','matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_metrics_package_knows_no_rollback() -> None:
    code = "import sys, chronicle.metrics.readers; print([m for m in sys.modules if m.split('.')[0] == 'rollback'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
