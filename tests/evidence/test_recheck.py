"""`audit` looks at claims, sealed logs, chains and manifests again."""

import json

import pytest

from chronicle.audit import open_evidence
from chronicle.cli.main import run as chronicle
from chronicle.journal import JournalWriter
from chronicle.launch.record import seal_file
from chronicle.paths import RunPaths
from rollback.checkpoint.manifest import write_manifest


@pytest.fixture
def paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = RunPaths(tmp_path / "logs" / "demo")
    with JournalWriter(paths) as writer:
        writer.append("launch.start", launch=1, data={"host": "h"})
    record(paths, 100)
    return paths


def record(paths, counted):
    environ = {"CHRONICLE_LAUNCH_DIR": str(paths.launch_dir(1)), "RANK": "0"}
    open_evidence(environ).model(logical=counted, counted=counted, local=counted)


def findings(capsys):
    capsys.readouterr()
    code = chronicle(["audit", "--run", "demo", "--json"])
    return code, [(one["check"], one["message"]) for one in json.loads(capsys.readouterr().out)["findings"]]


def test_a_claim_that_evidence_no_longer_supports_is_found_by_audit(paths, capsys):
    assert chronicle(["claim", "--params", "100", "100 parameters", "--run", "demo"]) == 0
    assert [one for one in findings(capsys)[1] if one[0] == "claim"] == []
    record(paths, 50)
    code, found = findings(capsys)
    assert ("claim", "claim `100 parameters` was SUPPORTED and is CONTRADICTED now") in found
    assert code == 5


def test_a_log_changed_after_it_was_sealed_is_found_by_audit(paths, capsys):
    log = paths.rank_log(1, 0)
    log.write_text("loss 2.0\n")
    with JournalWriter(paths) as writer:
        writer.append("launch.end", launch=1, data={"exit_code": 0, "sealed": [seal_file(paths, log)]})
    assert [one for one in findings(capsys)[1] if one[0] == "seal-broken"] == []
    log.write_text("loss 1.0\n")
    assert [one[0] for one in findings(capsys)[1] if one[0] == "seal-broken"] == ["seal-broken"]


def test_a_claim_without_fields_is_said_and_not_judged_again(paths, capsys):
    """Journals of before claims had fields stay readable."""
    with JournalWriter(paths) as writer:
        writer.append("claim", data={"text": "1.21B on 4 GPUs", "verdict": "SUPPORTED", "statements": []})
    code, found = findings(capsys)
    assert code == 0
    expected = "claim `1.21B on 4 GPUs` has no fields and was not judged again (recorded: SUPPORTED)"
    assert [message for check, message in found if check == "claim"] == [expected]


@pytest.mark.parametrize("how", ["cut", "edited", "gone"])
def test_the_end_of_a_chain_is_held_by_who_saw_it(paths, capsys, how):
    """A chain shows edits in its middle; its last lines, and whole files, only another writer can vouch for."""
    (file,) = paths.journal_dir.iterdir()
    assert chronicle(["claim", "--params", "100", "100 parameters", "--run", "demo"]) == 0
    assert [one for one in findings(capsys)[1] if one[0] == "chain-cut"] == []
    if how == "gone":
        file.unlink()
    else:
        text = file.read_text()
        file.write_text("" if how == "cut" else text.replace('"host":"h"', '"host":"x"'))
    code, found = findings(capsys)
    assert code == 5
    assert [one[0] for one in found if one[0] == "chain-cut"] == ["chain-cut"]


def test_a_checkpoint_that_is_not_what_its_manifest_lists_is_found_by_audit(paths, capsys, tmp_path):
    state = tmp_path / "checkpoints" / "opt_step-5" / "accelerator_state"
    state.mkdir(parents=True)
    (state / "model.safetensors").write_bytes(b"weights")
    write_manifest(state.parent, step=5)
    assert [one for one in findings(capsys)[1] if "model.safetensors" in one[1]] == []
    (state / "model.safetensors").write_bytes(b"weightS")
    assert findings(capsys)[0] == 0  # names and sizes agree
    assert chronicle(["audit", "--run", "demo", "--full"]) == 5
    (state / "model.safetensors").write_bytes(b"other")
    assert findings(capsys)[0] == 5
