"""The code of a launch can be had again: commit and patch; and nothing is written into the user's repository."""

import os
import subprocess
from pathlib import Path

import pytest

from chronicle.credentials import redact_source
from chronicle.journal import read_journal
from chronicle.journal.events import LaunchStart, events_of
from chronicle.launch.code import MOST_PATCH_BYTES, files_of, read_code
from chronicle.paths import RunPaths
from chronicle.story.launch_settings import Told, files_changed_between, packages_changed_between
from rollback.disk.content import ObjectStore
from tests.launch.driver import Driver

NO_CONFIG = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


def git(where: Path, *words: str, given: bytes | None = None) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command, environ = ["git", "-C", str(where), *author, *words], {**os.environ, **NO_CONFIG}
    done = subprocess.run(command, input=given, capture_output=True, check=True, env=environ)
    return done.stdout.decode()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    where = tmp_path / "re po"
    where.mkdir()
    git(where, "init", "-q")
    (where / "train.py").write_text("print(1)\n")
    (where / "table.bin").write_bytes(bytes(range(256)))
    git(where, "add", "-A")
    git(where, "commit", "-q", "-m", "first")
    return where


def tree(where: Path) -> dict[str, bytes]:
    """Every file of the repository's own directory."""
    return {str(p.relative_to(where)): p.read_bytes() for p in sorted((where / ".git").rglob("*")) if p.is_file()}


def test_the_patch_on_the_commit_is_the_code_that_ran(repository: Path, tmp_path: Path) -> None:
    (repository / "train.py").write_text("print(2)\n")
    (repository / "table.bin").write_bytes(bytes(reversed(range(256))))
    (repository / "sub dir").mkdir()
    (repository / "sub dir" / "néw.py").write_text("x = 1\n")
    (repository / "notes.txt").write_text("not a source\n")
    before = tree(repository)
    state = read_code(repository / "sub dir" / "..")
    assert tree(repository) == before, "nothing is written into the repository, its index included"
    assert state.commit == git(repository, "rev-parse", "HEAD").strip() and state.digest and not state.hidden
    assert state.patch is not None and "notes.txt" not in files_of(state.patch)
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(repository), str(again))
    git(again, "apply", "-", given=state.patch)
    for name in ("train.py", "table.bin", "sub dir/néw.py"):
        assert (again / name).read_bytes() == (repository / name).read_bytes(), name


def test_from_a_directory_below_and_in_a_worktree_it_is_the_same(repository: Path, tmp_path: Path) -> None:
    (repository / "lib").mkdir()
    (repository / "lib" / "a.py").write_text("a = 1\n")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "second")
    other = tmp_path / "tree"
    git(repository, "worktree", "add", "-q", str(other))
    for where in (repository, other):
        (where / "lib" / "a.py").write_text("a = 2\n")
        (where / "lib" / "b.py").write_text("b = 1\n")
        patch = read_code(where / "lib").patch
        assert patch is not None and set(files_of(patch)) == {"lib/a.py", "lib/b.py"}


def test_what_cannot_be_had_is_said(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_code(repository) == read_code(repository, with_patch=False)  # clean: no patch and no reason
    assert read_code(repository).digest is None and read_code(repository).why == ""
    (repository / "weights.txt").write_text("1")
    assert (read_code(repository).patch, read_code(repository).why) == (None, "only files that are no source are new")
    (repository / "train.py").write_text("".join(f"x{i} = {i}\n" for i in range(MOST_PATCH_BYTES // 10)))
    large = read_code(repository)
    assert large.patch is None and "more than 1 MB" in large.why and large.digest
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert read_code(empty) == (None, None, None, "", False)
    git(empty, "init", "-q")
    assert read_code(empty).commit is None  # no commit yet


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ('api_key = "abcdef123456"', 'api_key = "***"'),
        ("+    'hf_token': 'hunter2hunter2',", "+    'hf_token': '***',"),
        ('url = "https://me:s3cret@host/x"', 'url = "https://me:***@host/x"'),
        ("key = 'hf_abcdefghijklmnop'", "key = '***'"),
        ("pad_token = '<|endoftext|>'", "pad_token = '<|endoftext|>'"),
        ("max_tokens = 512", "max_tokens = 512"),
        ("token = tokenizer.next()", "token = tokenizer.next()"),
        ('name = "baseline"', 'name = "baseline"'),
    ],
)
def test_passwords_in_code_are_not_kept(line: str, kept: str) -> None:
    assert redact_source(line) == kept


def test_launches_keep_their_code_and_say_which_files_differ(repository: Path, driver: Driver) -> None:
    """Two launches of one commit with other changes; the third with a password in its code; the fourth keeps none."""
    (repository / "train.py").write_text("print(3)\n")
    driver.directory = repository
    driver.paths = RunPaths(repository / "logs" / driver.run)
    (repository / ".gitignore").write_text("logs/\n")
    for number, text in enumerate(["a = 1\n", "a = 2\n", "api_key = 'abcdef123456'\n", "a = 4\n"], 1):
        (repository / "more.py").write_text(text)
        driver.start(["true"], environ={"CHRONICLE_CODE": "off"} if number == 4 else None)
        assert driver.wait() == 0, driver.out.read_text()
    entries = read_journal(driver.paths).entries
    starts = [start for _, start in events_of(entries, LaunchStart)]
    assert [start.code_patch.get("hidden") for start in starts] == [False, False, True, None]
    stored = ObjectStore(driver.paths.objects_dir).find(starts[2].code_patch["sha256"]).read_text()
    assert "abcdef" not in stored and "***" in stored
    one, two, _, four = (Told(driver.paths, entries, number) for number in (1, 2, 3, 4))
    assert files_changed_between(one, two) == ["more.py"]
    assert files_changed_between(one, one) == []
    assert files_changed_between(one, four) is None
    assert packages_changed_between(one, two) == []  # both lists were kept
    said = driver.call("settings", "@1", "@2")
    assert "uncommitted changes differ in more.py" in said.stdout, said
    assert driver.call("audit").returncode == 0
