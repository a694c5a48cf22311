"""What a launch was started from: digests that change with the code, and never a secret, wherever it is handed in."""

import os
import subprocess
import sys

import pytest

from chronicle.credentials import hidden_arguments, redact_command, redact_values
from chronicle.launch.provenance import describe_launch

SECRET = "hf_" + "A1b2C3d4" * 4
PASSWORDS = ("s3cr3t-word", "pa55-in-url", "abcdef0123456789")
WORDS = ["--hub-token", PASSWORDS[0], f"--auth={SECRET}", f"postgresql://me:{PASSWORDS[1]}@db/x",
         f"Authorization: Bearer {PASSWORDS[2]}", f"API_KEY={PASSWORDS[0]}"]  # fmt: skip


def test_fake_secrets_in_environment_and_command_reach_no_file_of_the_run(driver):
    """Also not through `sweep`, which writes down the commands of what it ended."""
    environ = {"HF_TOKEN": SECRET, "NCCL_SECRET": PASSWORDS[0], "NCCL_DEBUG": f"http://u:{PASSWORDS[1]}@h", "TORCH_X": SECRET}
    driver.start([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(300)", *WORDS], environ=environ)
    driver.until(lambda: b"up" in driver.out.read_bytes(), "the trainer to start")
    shown = driver.call("ps")
    driver.process.kill()
    driver.wait()
    assert driver.call("sweep", "--yes").returncode in (0, 2)
    written = b"".join(path.read_bytes() for path in driver.paths.run_dir.rglob("*") if path.is_file())
    written += shown.stdout.encode() + shown.stderr.encode() + driver.out.read_bytes()
    for secret in (SECRET, *PASSWORDS):
        assert secret.encode() not in written
    assert b"--hub-token" in written


@pytest.mark.parametrize(
    "words, expected",
    [
        (["x", "--token", "abc", "--steps", "3"], ["x", "--token", "***", "--steps", "3"]),
        (["x", "--api-key=abc"], ["x", "--api-key=***"]),
        (["x", "--token", "--steps", "3"], ["x", "--token", "--steps", "3"]),
        (["x", "s3://bucket/a:b", "http://h:80/x"], ["x", "s3://bucket/a:b", "http://h:80/x"]),
        (["x", "glpat-" + "a" * 20], ["x", "***"]),
        (["x", "--auth", "abc", "--passphrase=abc", "-v"], ["x", "--auth", "***", "--passphrase=***", "-v"]),
        (["x", "--hftoken", "abc", "wandb.key=1", "db-pass=abc"], ["x", "--hftoken", "***", "wandb.key=1", "db-pass=***"]),
        (["x", "s3://me:abc@h/p", "https://h/x?api_key=abc&n=1"], ["x", "s3://me:***@h/p", "https://h/x?api_key=***&n=1"]),
        (["x", '{"api_key": "abc", "lr": 1}'], ["x", '{"api_key": "***", "lr": 1}']),
        (["sh", "-c", "HF_TOKEN=abc python t.py --lr 1"], ["sh", "-c", "HF_TOKEN=*** python t.py --lr 1"]),
        # names that only sound like it are what a launch is started again with
        (["x", "--tokenizer", "gpt2", "--max-tokens", "512"], ["x", "--tokenizer", "gpt2", "--max-tokens", "512"]),
        (["x", "--tokenizer_path=a", "tokens=8"], ["x", "--tokenizer_path=a", "tokens=8"]),
        (["x", "--pad-token", "<pad>", "--eos_token=</s>"], ["x", "--pad-token", "<pad>", "--eos_token=</s>"]),
        (["x", "--token", "-1", "--author", "me"], ["x", "--token", "***", "--author", "me"]),
    ],
)
def test_values_of_credential_options_and_known_shapes_are_replaced(words, expected):
    assert redact_command(words) == expected


def test_a_recorded_command_says_which_of_its_arguments_are_hidden():
    words = ["python", "t.py", "--lr", "1", "--hub-token", "abc", "--api-key=abc", "s3://me:abc@h/p"]
    assert hidden_arguments(redact_command(words)) == ("--hub-token", "--api-key", "s3://me:***@h/p")
    assert hidden_arguments(["python", "t.py", "--lr", "1"]) == ()


def test_the_code_digest_sees_edits_and_code_that_git_does_not_know_yet(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    def digests():
        told = describe_launch(["python"], tmp_path, dict(os.environ))
        return told["git_commit"], told["git_dirty_digest"], told["env_digest"]

    assert digests()[0] is None
    git("init", "-q")
    (tmp_path / "train.py").write_text("a = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    commit, dirty, packages = digests()
    assert len(commit) == 40 and dirty is None and len(packages) == 64
    (tmp_path / "train.py").write_text("a = 2\n")
    edited = digests()[1]
    (tmp_path / "new.py").write_text("b = 1\n")
    untracked = digests()[1]
    (tmp_path / "new.py").write_text("b = 2\n")
    assert len({edited, untracked, digests()[1]}) == 3
    (tmp_path / "run.log").write_text("output is no code")
    before = digests()[1]
    (tmp_path / "run.log").write_text("more output")
    assert digests()[1] == before


KEY = "MIIEowIBAAKCAQEAvSecretKeyMaterialXYZ12345"
KINDS = {
    "Slack": ("https://hooks.slack.com/services/T0AB1CD2E/B0FG3HI4J/", "kLmN0pQrStUvWxYz12345678", ""),
    "PEM": ("-----BEGIN RSA PRIVATE KEY-----\n", KEY, "\n-----END RSA PRIVATE KEY-----"),
    "Google": ("key ", "AIzaSy" + "B7dE9fG1hJ3kL5mN7pQ9rS1tU3vW5xY7z", ""),
    "Azure": ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey=", "Zm9vYmFyYmF6cXV4Zm9vYmFy==", ";EndpointSuffix=x"),
    "netrc": ("machine api.wandb.ai login user password ", "n3trcP4sswordQQ", ""),
    "W&B": ("wandb: ", "9f8e7d6c5b4a39281706f5e4d3c2b1a098765432", ""),
    "token": ("pushed with ", SECRET, ""),
    "URL": ("to https://bob:", "Tr0ub4dor-3x", "@git.example/x.git"),
}


@pytest.mark.parametrize("before, secret, after", KINDS.values(), ids=KINDS)
def test_what_a_trainer_printed_last_and_its_exception_reach_the_journal_without_secrets(driver, before, secret, after):
    """Whatever is written there: the last lines, the cause, a note of a person."""
    text = f"{before}{secret}{after}"
    driver.start([sys.executable, "-c", f"print('step 1 loss 1'); print({text!r}); raise RuntimeError({text!r})"])
    assert driver.wait() == 1
    assert driver.call("note", f"tried {text}").returncode == 0
    end = driver.entries("launch.end")[0].data
    assert "***" in "".join(end["tail"]) and "step 1 loss 1" in end["tail"]
    written = b"".join(path.read_bytes() for path in driver.paths.journal_dir.rglob("*") if path.is_file())
    assert secret.encode() not in written
    assert b"***" in written


def test_what_only_looks_like_a_secret_stays():
    """A commit, a directory that is called as a token is, plain words."""
    commit = "9f8e7d6c5b4a39281706f5e4d3c2b1a098765432"
    kept = {"git_commit": commit, "path": "/data/hf_checkpoints1234567/step-8", "tail": ["basic configuration", commit]}
    assert redact_values(kept) == kept
    cut = {"tail": ["step 1", KEY, "-----END RSA PRIVATE KEY-----", "bye"], "wandb_key": commit}
    assert redact_values(cut) == {"tail": ["step 1", "***", "***", "bye"], "wandb_key": "***"}


def test_a_token_within_a_path_is_hidden():
    drawn = "hf_" + "aB3dE5gH7jK9mN1pQ3"
    assert redact_values({"url": f"models/{drawn}/resolve", "lines": [f"/cache/{drawn}"]}) == {
        "url": "models/***/resolve", "lines": ["/cache/***"],
    }  # fmt: skip
