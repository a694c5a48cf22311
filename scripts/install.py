"""Make `.venv` and install this project into it, with the build of torch that fits the machine. Run by the Makefile.

No variable is needed. uv is the installer where it can be had, because its `--torch-backend=auto` knows which of PyTorch's
indexes fits a driver; pip is the fall-back, with pip's own configuration. A machine with an NVIDIA device gets CUDA builds,
any other machine a CPU build. Where PyTorch's index cannot be reached, the configured index is asked for what it has. One
line says what was taken and why, and what was not verified. A stamp makes a second run take no time while pyproject.toml
and the arguments are unchanged and its extras are there (`dev` holds all of them). Standard library only.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The only combination that this project's own tests run on.
VERIFIED = ("Linux", "x86_64", "cpu")
PROBE_SECONDS = 60  # for finding out whether an index answers; a download has no limit
# pip's settings that uv does not read, and uv's variable for each
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
}


class Problem(Exception):
    """One sentence, with the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What decides which build of torch fits."""

    system: str  # platform.system(): Linux, Darwin
    processor: str  # platform.machine(): x86_64, arm64
    device: str  # cpu or cuda
    why: str  # what was seen of the device

    @property
    def is_verified(self) -> bool:
        """Whether the project's tests run on this combination."""
        return (self.system, self.processor, self.device) == VERIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One way to ask for torch: an installer and where it looks."""

    installer: str  # uv or pip
    where: str  # as the closing line says it
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a source would install, found out without downloading torch."""

    source: Source
    version: str
    cuda_packages: int

    @property
    def is_cuda(self) -> bool:
        """Whether this is a CUDA build: by its version, or by what it needs."""
        return self.cuda_packages > 0 or "+cu" in self.version

    def fits(self, machine: Machine) -> bool:
        """Whether the build is the one for the machine; torch for macOS has one build only."""
        return machine.system == "Darwin" or self.is_cuda == (machine.device == "cuda")


def main() -> int:
    """Install; returns the exit code of the process."""
    arguments = parse_arguments()
    environment = ROOT / arguments.venv
    stamp = environment / ".chronicle-installed"
    wanted = fingerprint(arguments)
    there = stamp.read_text(encoding="utf-8").splitlines() if stamp.exists() else []
    if there[:1] == [wanted] and {arguments.extras, "dev"} & set(there[1:]):
        return 0
    try:
        python = create(environment)
        install(Installers(python), arguments, look(arguments.device))
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    extras = there[1:] if there[:1] == [wanted] else []
    stamp.write_text("\n".join([wanted, *extras, arguments.extras]) + "\n", encoding="utf-8")
    return 0


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the Makefile's variables say; every one has a default that fits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("--extras", default="all")
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement, such as torch==2.13.0")
    parser.add_argument("--torch-index", default="", help="index to take torch from instead of finding one")
    parser.add_argument("--device", default="", choices=("", "cpu", "cuda"), help="build to take instead of the fitting one")
    parser.add_argument("--installer", default="", choices=("", "uv", "pip"), help="installer to use instead of finding one")
    return parser.parse_args(words)


def fingerprint(arguments: argparse.Namespace) -> str:
    """Changes when anything that decides what is installed changes; the extras stand beside it in the stamp."""
    settings = sorted((name, value) for name, value in vars(arguments).items() if name != "extras")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8") + repr(settings) + str(ROOT)
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


def look(device: str = "") -> Machine:
    """This machine; a device that the caller names is taken at its word."""
    seen = ""
    if Path("/proc/driver/nvidia/version").exists():
        seen = "an NVIDIA driver is loaded"
    elif shutil.which("nvidia-smi"):
        seen = "nvidia-smi is on the PATH"
    found, why = ("cuda", seen) if seen else ("cpu", "no NVIDIA device is here")
    if device and device != found:
        found, why = device, f"asked for by DEVICE={device}"
    return Machine(system=platform.system(), processor=platform.machine(), device=found, why=why)


class Installers:
    """uv and pip, working on one environment with one configuration."""

    def __init__(self, python: Path) -> None:
        """Nothing is run before it is needed."""
        self.python = python
        self._uv: str | None = None

    def find_uv(self) -> str | None:
        """uv from the PATH, else put into the environment by pip; None where it cannot be had."""
        if self._uv is None:
            beside = self.python.parent / "uv"
            found = shutil.which("uv")
            if found is None and not beside.exists():
                quiet([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv>=0.8"])
            self._uv = found or (str(beside) if beside.exists() else "")
        return self._uv or None

    def command(self, installer: str, *words: str) -> list[str | Path]:
        """The whole command line of `install …` with one installer."""
        if installer == "uv":
            uv = self.find_uv()
            assert uv is not None
            return [uv, "pip", *words[:1], "--python", self.python, *words[1:]]
        return [self.python, "-m", "pip", "--disable-pip-version-check", *words]

    def environment(self, installer: str) -> dict[str, str]:
        """The process environment: uv is told what pip is configured with."""
        mine = dict(os.environ)
        if installer == "uv":
            mine = uv_variables(self.pip_configuration()) | mine
        return mine

    def pip_configuration(self) -> dict[str, str]:
        """pip's settings by name without their section; a variable beats a file, as in pip."""
        done = quiet([self.python, "-m", "pip", "config", "list"])
        found: dict[str, str] = {}
        for line in sorted(done.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
            name, _, value = line.partition("=")
            found[name.rpartition(".")[2]] = value.strip("'\"").replace("\\n", " ")
        return found

    def run(self, installer: str, *words: str) -> bool:
        """Install; the installer's own output is the progress. False when it failed."""
        line = self.command(installer, *words)
        return subprocess.run(line, env=self.environment(installer), check=False).returncode == 0

    def ask(self, source: Source, requirement: str) -> Offer | None:
        """What a source would install for a requirement; None where it cannot, or does not answer in time."""
        limits = {"UV_HTTP_TIMEOUT": "10", "UV_HTTP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10", "PIP_RETRIES": "1"}
        report = ("--quiet", "--report", "-") if source.installer == "pip" else ()
        line = self.command(source.installer, "install", "--dry-run", *report, *source.words, requirement)
        done = quiet(line, environment=self.environment(source.installer) | limits, seconds=PROBE_SECONDS)
        if done.returncode != 0:
            return None
        packages = read_report(done.stdout) if source.installer == "pip" else read_plan(done.stderr)
        if "torch" not in packages:
            return None
        return Offer(source=source, version=packages["torch"], cuda_packages=count_cuda(packages))


def uv_variables(pip: Mapping[str, str]) -> dict[str, str]:
    """uv's environment variables that say what pip's configuration says, with pip's rule for choosing among indexes."""
    found = {UV_VARIABLES[name]: value for name, value in pip.items() if name in UV_VARIABLES}
    if "UV_FIND_LINKS" in found:  # pip separates by spaces, uv by commas
        found["UV_FIND_LINKS"] = ",".join(found["UV_FIND_LINKS"].split())
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return found


def read_report(text: str) -> dict[str, str]:
    """Packages by name from pip's JSON report."""
    return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in json.loads(text)["install"]}


def read_plan(text: str) -> dict[str, str]:
    """Packages by name from the lines ` + name==version` that uv prints."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.removeprefix("+ ").split(" ")[0].partition("==") for line in lines if line.startswith("+ "))
    return {name.lower(): version for name, _, version in pairs}


def count_cuda(packages: Mapping[str, str]) -> int:
    """How many packages bring CUDA libraries, several GB together."""
    return sum(name.startswith(("nvidia-", "cuda-")) or name == "triton" for name in packages)


def torch_sources(machine: Machine, installer: str, index: str) -> tuple[Source, ...]:
    """Where to ask for torch, best first."""
    if index:
        option = "--default-index" if installer == "uv" else "--index-url"  # beats UV_DEFAULT_INDEX, which --index-url does not
        return (Source(installer=installer, where="the index that TORCH_INDEX names", words=(option, index)),)
    configured = Source(installer=installer, where="the configured index")
    if installer == "pip" or machine.system == "Darwin":  # torch for macOS has one build only, on every index
        return (configured,)
    backend = "auto" if machine.device == "cuda" else "cpu"
    return (Source(installer="uv", where="PyTorch's index", words=("--torch-backend", backend)), configured)


def choose(offers: Sequence[Offer], machine: Machine) -> Offer | None:
    """The first offer that fits the machine; else the first one, because any build works on a CPU."""
    return next((offer for offer in offers if offer.fits(machine)), offers[0] if offers else None)


def explain(offer: Offer, machine: Machine) -> str:
    """One line: what was taken, from where, why, and what was not verified."""
    build = "CUDA build" if offer.is_cuda else "CPU build"
    text = f"torch {offer.version} ({build}) from {offer.source.where} with {offer.source.installer}: {machine.why}"
    if machine.device == "cpu" and offer.is_cuda:
        text += f"; no CPU build was found, so this brings {offer.cuda_packages} CUDA packages of several GB together"
    if machine.device == "cuda" and not offer.is_cuda:
        text += "; no CUDA build was found there, so training will not use the device"
    if not machine.is_verified:
        text += f"; not verified by this project's tests: {machine.system} {machine.processor} with {machine.device}"
    return text


def install(installers: Installers, arguments: argparse.Namespace, machine: Machine) -> None:
    """torch first and alone, so that no later requirement picks another build; then this project."""
    remove_old_name(installers)
    installer = arguments.installer or ("uv" if installers.find_uv() else "pip")
    if installer == "uv" and not installers.find_uv():
        raise Problem("uv cannot be installed; take INSTALLER=pip")
    present = installed_version(installers.python, "torch")
    if present and present.split("+")[0] == arguments.torch.partition("==")[2].split("+")[0]:
        say(f"torch {present} is there already")
    else:
        install_torch(installers, arguments, machine, installer)
    version = installed_version(installers.python, "torch")
    constraint = installers.python.parent.parent / "torch-constraint.txt"
    constraint.write_text(f"torch=={version}\n", encoding="utf-8")
    say(f"installing chronicle-ml[{arguments.extras}]  (minutes the first time)")
    words = ("install", "--quiet", "--constraint", str(constraint), "--editable", f"{ROOT}[{arguments.extras}]")
    if not first_that_works(installer, lambda one: installers.run(one, *words)):
        raise Problem(f"chronicle-ml[{arguments.extras}] could not be installed; the lines above say why")


def install_torch(installers: Installers, arguments: argparse.Namespace, machine: Machine, installer: str) -> None:
    """Ask the sources one after the other, take the first offer that fits, and say so."""
    sources = torch_sources(machine, installer, arguments.torch_index)
    if installer == "uv":  # pip looks at some things that uv does not
        sources += torch_sources(machine, "pip", arguments.torch_index)
    offers: list[Offer] = []
    for source in sources:
        offer = installers.ask(source, arguments.torch)
        if offer is not None:
            offers.append(offer)
            if offer.fits(machine):
                break
    chosen = choose(offers, machine)
    if chosen is None:
        raise Problem(
            f"no index offers `{arguments.torch}` for {machine.system} {machine.processor}, Python "
            f"{platform.python_version()}; name another version, TORCH=torch==…, or an index, TORCH_INDEX=<its URL>"
        )
    say(explain(chosen, machine))
    source = chosen.source
    if not installers.run(source.installer, "install", "--quiet", *source.words, f"torch=={chosen.version}"):
        raise Problem(f"torch {chosen.version} could not be installed; the lines above say why")


def first_that_works(installer: str, attempt: Callable[[str], bool]) -> bool:
    """Try the installer that was chosen, and pip after uv."""
    if attempt(installer):
        return True
    if installer == "pip":
        return False
    say("uv could not do it: trying pip")
    return attempt("pip")


def remove_old_name(installers: Installers) -> None:
    """Take out an earlier editable install of this directory under its old name, whose entry points would count twice."""
    code = (
        "import importlib.metadata as m, sys\n"
        "try: text = m.distribution('chronicle').read_text('direct_url.json') or ''\n"
        "except m.PackageNotFoundError: text = ''\n"
        "sys.exit('\"editable\": true' not in text)"
    )
    if quiet([installers.python, "-c", code]).returncode == 0:
        quiet([installers.python, "-m", "pip", "uninstall", "--quiet", "--yes", "chronicle"])


def installed_version(python: Path, name: str) -> str:
    """The installed version of a distribution; empty where there is none."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    return quiet([python, "-c", code, name]).stdout.strip()


def quiet(
    line: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, seconds: float | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run and keep the output; a limit that is reached counts as a failure."""
    try:
        return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(line, 1, "", "")


def say(text: str) -> None:
    """One line of progress."""
    print(f"[install] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
