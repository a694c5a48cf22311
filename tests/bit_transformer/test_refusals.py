"""What cannot be trained on is one sentence before the first step, through the trainer's own command line.

One process goes through all cases, each with its own working directory and arguments, as a user would type them.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bit_transformer.launches import ROOT, TINY

LINES = "".join(f"line {number} of a text that is long enough to be cut\n" for number in range(9_000))
WORKER = """
import json, os, sys
from accelerate.state import AcceleratorState, GradientState
from bit_transformer import train
for name, arguments in json.loads(sys.argv[1]).items():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    print(f"=== {name}", file=sys.stderr, flush=True)
    print(f"=== {name}", flush=True)
    os.environ["CHRONICLE_RUN_DIR"] = os.path.join(os.getcwd(), "logs", name)  # a run of its own each
    code = train.main(arguments)
    print(f"code {code}", file=sys.stderr, flush=True)
"""
REFUSED = {
    "missing": r"lines/train-000001.tar` cannot be opened",
    "truncated": r"train-000001.tar` is truncated: it ends at byte 1000",
    "no source": r"holds no built source: manifest.json is missing",
    "batch": "data.batch_size 15 does not divide among 1 ranks × 2 accumulation steps",
    "window": "a window of 999 bytes has 8991 symbols, model.max_bits is 216",
    "held out": "holds out",
    "scaleup": "recipe `scaleup` has",
    "stop in the past": "--stop-at is 0, this launch starts after step 0",
    "checkpoints in a file": "is a file, expected a directory for checkpoints",
    "no such protocol": "remote shard `foo://x/lines/manifest.json` cannot be opened: Protocol not known: foo",
    "nobody answers": "cannot be opened: Cannot connect to host 127.0.0.1:9",
}


def _chronicle(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    return subprocess.run([sys.executable, "-m", "chronicle.cli.main", *arguments], cwd=directory, check=False,
                          env={**environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What each case said on stdout and on stderr."""
    root = tmp_path_factory.mktemp("refused")
    text = root / "text"
    text.mkdir()
    (text / "a.txt").write_text(LINES, encoding="utf-8")
    built = _chronicle(root, "data", "build", "good", "--corpus", "lines=./text", "--shard-size", "100000")
    assert built.returncode == 0, built.stderr
    for name in ("missing", "truncated"):
        shutil.copytree(root / "good", root / name)
    (root / "missing/lines/train-000001.tar").unlink()
    shard = root / "truncated/lines/train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:1000])

    def case(*settings: str, data: str = "good", recipe: str = "demo") -> list[str]:
        tiny = (*TINY, f"data_dir={root / data}", "data.sources={'lines': 1}", "total_steps=8") if recipe == "demo" else ()
        return ["--recipe", recipe, "--checkpoints", str(root / f"c{len(cases)}"),
                *(f"--set={setting}" for setting in (*tiny, *settings))]

    cases: dict[str, list[str]] = {}
    cases["missing"] = case(data="missing")
    cases["truncated"] = case(data="truncated")
    cases["no source"] = case(data="nowhere")
    cases["batch"] = case("batch_size=15", "accumulation_steps=2")
    cases["window"] = case("window_bytes=999")
    cases["held out"] = case("eval_windows=1000000")
    cases["scaleup"] = case(recipe="scaleup")
    cases["stop in the past"] = [*case(), "--stop-at", "0"]
    cases["checkpoints in a file"] = [*case(), "--checkpoints", str(text / "a.txt")]
    cases["no such protocol"] = case("data_dir=foo://x")
    cases["nobody answers"] = case("data_dir=http://127.0.0.1:9/x")
    cases["one shard, three readers"] = case("num_workers=3")
    cases["no workers"] = case()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    done = subprocess.run([sys.executable, "-c", WORKER, json.dumps(cases)], cwd=root, capture_output=True, text=True,
                          env={**environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (_part(done.stdout, name), _part(done.stderr, name)) for name in cases}


def _part(text: str, name: str) -> str:
    return text.partition(f"=== {name}\n")[2].partition("=== ")[0]


@pytest.mark.parametrize(("name", "sentence"), list(REFUSED.items()), ids=lambda value: value)
def test_what_cannot_be_trained_on_is_one_sentence(spoken: dict[str, tuple[str, str]], name: str, sentence: str) -> None:
    """`error:` with file or field, code 1, a hint where there is a way out, and not one step."""
    out, err = spoken[name]
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and sentence in errors[0] and "Traceback" not in err
    assert err.strip().endswith("code 1") and "step 1/" not in out


def test_fewer_shards_than_readers_changes_nothing(spoken: dict[str, tuple[str, str]]) -> None:
    """Three workers over five shards, as none: stock WebDataset starves a reader; here every loss is the same."""
    losses = [[line.split(" | lr")[0] for line in spoken[name][0].splitlines() if line.startswith("step ")]
              for name in ("one shard, three readers", "no workers")]
    assert len(losses[0]) == 8 and losses[0] == losses[1]


@pytest.mark.parametrize(("content", "sentence"), [
    (None, "holds no text files"), (b"caf\xe9 " * 10, "is not UTF-8: byte 0xe9 at offset 3"),
    (b"too short", "9 bytes of text, expected")])
def test_text_that_cannot_be_built_is_one_sentence(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    """Empty folder, foreign encoding, too little: through `chronicle data build`."""
    folder = tmp_path / "text"
    folder.mkdir()
    if content is not None:
        (folder / "a.txt").write_bytes(content)
    done = _chronicle(tmp_path, "data", "build", "out", "--corpus", "notes=./text")
    assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "notes" / "manifest.json").exists()


def test_no_option_is_an_abbreviation_of_torchruns() -> None:
    """`torchrun -m bit_transformer.train --max…`: torchrun would take `--m` for its own; ours have no such prefix."""
    done = subprocess.run([sys.executable, "-m", "bit_transformer.train", "--help"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=600)
    from torch.distributed.run import get_args_parser

    theirs = {option for action in get_args_parser()._actions for option in action.option_strings if option.startswith("--")}
    ours = {word.strip(",[]") for word in done.stdout.split() if word.strip(",[]").startswith("--")} - {"--help"}
    assert ours and not [(a, b) for a in ours for b in theirs if b.startswith(a) or a.startswith(b)]
