"""How often one rollback reads a state file: once for each purpose, not once for each function that wants it."""

from __future__ import annotations

import subprocess
import traceback
from collections import Counter
from pathlib import Path

import pytest

from rollback.files import state_file
from tests.rollback.command_line import chronicle

PURPOSES = {
    "read_accelerate_state": "state",
    "account_for": "account",
    "check_moments": "moments",
    "check_values": "values",
    "_check_edited": "check of the edit",
    "read_identity": "identity",
    "_write": "edit",
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_one_rollback_reads_each_state_file_once_a_purpose(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["cp", "-a", str(pristine / "checkpoints"), str(tmp_path)], check=True)
    reads: Counter[tuple[str, str]] = Counter()
    real = state_file.read_torch_content

    def counted(fd: int, path: Path, *args: object, **options: object) -> object:
        callers = {frame.name for frame in traceback.extract_stack()}
        purpose = next(name for function, name in PURPOSES.items() if function in callers)
        reads[path.name, purpose] += 1
        return real(fd, path, *args, **options)

    monkeypatch.setattr(state_file, "read_torch_content", counted)
    assert chronicle(tmp_path, "rollback", "--to", "10", "--lr-scale", "0.5", "--yes") == 0
    state = ("optimizer.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl")
    edited = ("optimizer.bin", "custom_checkpoint_0.pkl")
    assert dict(reads) == {
        **{(name, "state"): 1 for name in state},
        **{(name, "account"): 1 for name in state},
        ("optimizer.bin", "moments"): 1,
        **{(name, "values"): 1 for name in state},
        ("optimizer.bin", "identity"): 1,
        **{(name, "edit"): 1 for name in edited},
        **{(name, "check of the edit"): 1 for name in edited},
    }
