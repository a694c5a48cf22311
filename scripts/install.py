"""Make `.venv` and install this project into it, without surprises. Standard library only; run by the Makefile.

On a machine without an NVIDIA device, a torch that would bring CUDA packages (several GB) is refused before anything is
downloaded, with the way out. On a machine with one, torch is installed as its index offers it. A stamp makes a second run
take no time while pyproject.toml and the arguments are unchanged.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Install; returns the exit code of the process."""
    arguments = parse_arguments()
    environment = ROOT / arguments.venv
    stamp = environment / ".chronicle-installed"
    wanted = fingerprint(arguments)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return 0
    try:
        python = create(environment)
        install_torch(python, arguments)
        install_project(python, arguments)
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    stamp.write_text(wanted, encoding="utf-8")
    return 0


class Problem(Exception):
    """One sentence, with the way out."""


def parse_arguments() -> argparse.Namespace:
    """What the Makefile's variables say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--extras", default="all")
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement, such as torch==2.13.0")
    parser.add_argument("--torch-index", default="", help="index to take torch from, such as PyTorch's CPU index")
    parser.add_argument("--accept-cuda", default="", help="take CUDA packages on a machine without a GPU")
    return parser.parse_args()


def fingerprint(arguments: argparse.Namespace) -> str:
    """Changes when anything that decides what is installed changes."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8") + repr(sorted(vars(arguments).items())) + str(ROOT)
    return hashlib.sha256(text.encode()).hexdigest()


def create(environment: Path) -> Path:
    """The environment's interpreter; made when missing."""
    if sys.version_info < (3, 11):  # noqa: UP036 this script is what an older interpreter would run
        raise Problem(f"Python {sys.version.split()[0]} is too old: 3.11 or newer is needed; make PYTHON=python3.12 …")
    python = environment / "bin" / "python"
    if not python.exists():
        say(f"creating {environment}")
        try:
            venv.create(environment, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as problem:
            raise Problem(f"cannot create {environment}: {problem}; on Debian: apt install python3-venv") from problem
    return python


def install_torch(python: Path, arguments: argparse.Namespace) -> None:
    """torch first and alone, so that no later requirement picks another build."""
    index = ["--index-url", arguments.torch_index] if arguments.torch_index else []
    request = [arguments.torch, *index]
    if not has_gpu() and not arguments.accept_cuda and not satisfied(python, arguments.torch):
        refuse_cuda(python, request)
    say(f"installing {arguments.torch}")
    pip(python, "install", "--quiet", *request)


def install_project(python: Path, arguments: argparse.Namespace) -> None:
    """This project, editable, with its extras; torch is held at what is there."""
    version = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    constraint = ROOT / arguments.venv / "torch-constraint.txt"
    constraint.write_text(f"torch=={version}\n", encoding="utf-8")
    say(f"installing chronicle-ml[{arguments.extras}]  (a few minutes the first time)")
    pip(python, "install", "--quiet", "--constraint", str(constraint), "--editable", f"{ROOT}[{arguments.extras}]")


def refuse_cuda(python: Path, request: list[str]) -> None:
    """Ask pip what it would install; stop when that holds CUDA packages and no NVIDIA device is here."""
    done = subprocess.run(
        [python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *request],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise Problem(f"pip cannot resolve `{' '.join(request)}`:\n{done.stderr.strip()[-2000:]}")
    names = [item["metadata"]["name"].lower() for item in json.loads(done.stdout)["install"]]
    cuda = [name for name in names if name.startswith(("nvidia-", "cuda-")) or name == "triton"]
    if cuda:
        raise Problem(
            f"`{' '.join(request)}` would bring {len(cuda)} CUDA packages ({', '.join(cuda[:3])}, …) and no NVIDIA "
            "device is here; use PyTorch's CPU index: make … TORCH_INDEX=<its URL> (see README), "
            "or ACCEPT_CUDA=1 to take them"
        )


def satisfied(python: Path, requirement: str) -> bool:
    """Whether torch is there already in the version asked for."""
    code = "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != sys.argv[1])"
    version = requirement.partition("==")[2].split("+")[0]
    return subprocess.run([python, "-c", code, version], capture_output=True, check=False).returncode == 0


def has_gpu() -> bool:
    """An NVIDIA device or driver on this machine."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def pip(python: Path, *words: str) -> None:
    """Run pip of the environment; its own output is the progress."""
    done = subprocess.run([python, "-m", "pip", "--disable-pip-version-check", *words], check=False)
    if done.returncode != 0:
        raise Problem(f"pip {' '.join(words)} ended with code {done.returncode}")


def say(text: str) -> None:
    """One line of progress."""
    print(f"[install] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
