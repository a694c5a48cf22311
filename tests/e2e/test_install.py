"""`scripts/install.py` takes the build of torch that fits the machine: tried on fake indexes with tiny wheels."""

import importlib.util
import os
import sys
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install.py"
CUDA = ("nvidia-cublas", "nvidia-cudnn-cu13", "triton")
NOWHERE = "http://127.0.0.1:9/simple"  # nothing listens there: refused at once
pytestmark = [pytest.mark.slow, pytest.mark.sample]
HAS_UV = (Path(sys.executable).parent / "uv").exists()
INSTALLERS = ["pip", pytest.param("uv", marks=pytest.mark.skipif(not HAS_UV, reason="uv is not beside this Python"))]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["install"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment, with the uv of this one beside its interpreter where there is one."""
    environment = tmp_path_factory.mktemp("install") / "venv"
    venv.create(environment, with_pip=True)
    uv = Path(sys.executable).parent / "uv"
    if uv.exists():
        (environment / "bin" / "uv").symlink_to(uv)
    return environment / "bin" / "python"


def wheel(index: Path, name: str, version: str, needs: tuple[str, ...] = ()) -> None:
    """A wheel that holds nothing but its name, in a directory that pip and uv read as an index."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {need}" for need in needs)]
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(folder.glob("*.whl")))
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>", encoding="utf-8")


def cpu_index(where: Path) -> str:
    """What PyTorch's CPU index offers, or a configured index on macOS: torch alone."""
    wheel(where, "torch", "2.13.0+cpu")
    return where.as_uri()


def cuda_index(where: Path, version: str = "2.13.0") -> str:
    """What the public index offers for Linux: torch that needs CUDA libraries."""
    wheel(where, "torch", version, CUDA)
    for name in CUDA:
        wheel(where, name, "1.0")
    return where.as_uri()


def machine(script: ModuleType, device: str, system: str = "Linux") -> object:
    """A machine as `look` would describe it."""
    why = "an NVIDIA driver is loaded" if device == "cuda" else "no NVIDIA device is here"
    return script.Machine(system=system, processor="arm64" if system == "Darwin" else "x86_64", device=device, why=why)


@pytest.fixture
def world(script: ModuleType, python: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """Installs torch from a pretended PyTorch index and a pretended configured index; returns what was said and the version."""
    sources = script.torch_sources

    def run(here: object, installer: str, *, pytorch: str, configured: str) -> tuple[str, str]:
        for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", configured)

        def faked(*words: object) -> tuple[object, ...]:  # uv knows PyTorch's indexes by heart
            return tuple(
                one if not one.words else script.Source(installer="uv", where=one.where, words=("--default-index", pytorch))
                for one in sources(*words)
            )

        monkeypatch.setattr(script, "torch_sources", faked)
        script.quiet([python, "-m", "pip", "uninstall", "--quiet", "--yes", "torch", *CUDA])
        script.install_torch(script.Installers(python), script.parse_arguments([]), here, installer)
        return capsys.readouterr().err, script.installed_version(python, "torch")

    return run


@pytest.mark.parametrize("installer", INSTALLERS[1:])
def test_a_cpu_machine_gets_the_cpu_build_of_pytorchs_index(script: ModuleType, world, tmp_path: Path, installer: str) -> None:
    """Though the configured index would bring CUDA packages."""
    said, version = world(
        machine(script, "cpu"), installer, pytorch=cpu_index(tmp_path / "a"), configured=cuda_index(tmp_path / "b")
    )
    assert version == "2.13.0+cpu", said
    assert said == "[install] torch 2.13.0+cpu (CPU build) from PyTorch's index with uv: no NVIDIA device is here\n"


@pytest.mark.parametrize("installer", INSTALLERS)
def test_a_cpu_build_of_the_configured_index_is_taken_where_pytorchs_does_not_answer(
    script: ModuleType, world, tmp_path: Path, installer: str
) -> None:
    """No variable, no question, and nothing is said of the index that did not answer."""
    said, version = world(machine(script, "cpu"), installer, pytorch=NOWHERE, configured=cpu_index(tmp_path / "a"))
    assert version == "2.13.0+cpu", said
    where = f"the configured index with {installer}"
    assert said == f"[install] torch 2.13.0+cpu (CPU build) from {where}: no NVIDIA device is here\n"


@pytest.mark.parametrize("installer", INSTALLERS)
def test_cuda_packages_on_a_cpu_machine_are_said(script: ModuleType, world, tmp_path: Path, installer: str) -> None:
    """Where nothing else is to be had they are taken: torch works with them, and the line says what they cost."""
    said, version = world(machine(script, "cpu"), installer, pytorch=NOWHERE, configured=cuda_index(tmp_path / "a"))
    assert version == "2.13.0"
    assert "no CPU build was found, so this brings 3 CUDA packages of several GB together" in said


@pytest.mark.parametrize("installer", INSTALLERS)
def test_a_machine_with_an_nvidia_device_gets_a_cuda_build(script: ModuleType, world, tmp_path: Path, installer: str) -> None:
    """From PyTorch's index with uv, from the configured one with pip; that no test ran on such a machine is said."""
    pytorch = cuda_index(tmp_path / "a", "2.13.0+cu130")
    said, version = world(machine(script, "cuda"), installer, pytorch=pytorch, configured=cuda_index(tmp_path / "b"))
    assert version == ("2.13.0+cu130" if installer == "uv" else "2.13.0")
    assert "(CUDA build)" in said
    assert "an NVIDIA driver is loaded; not verified by this project's tests: Linux x86_64 with cuda" in said


def test_a_cpu_build_on_a_machine_with_a_device_is_said(script: ModuleType, world, tmp_path: Path) -> None:
    """The configured index may have nothing else."""
    said, _ = world(machine(script, "cuda"), "pip", pytorch=NOWHERE, configured=cpu_index(tmp_path / "a"))
    assert "no CUDA build was found there, so training will not use the device" in said


@pytest.mark.parametrize("installer", INSTALLERS)
def test_macos_takes_the_one_build_of_the_configured_index(script: ModuleType, world, tmp_path: Path, installer: str) -> None:
    """PyTorch's index is not asked: there is one build for macOS, on every index."""
    wheel(tmp_path / "a", "torch", "2.13.0")
    said, version = world(machine(script, "cpu", "Darwin"), installer, pytorch=NOWHERE, configured=(tmp_path / "a").as_uri())
    assert version == "2.13.0"
    assert "from the configured index" in said
    assert "not verified by this project's tests: Darwin arm64 with cpu" in said


def test_no_torch_anywhere_is_one_sentence_with_a_way_out(script: ModuleType, world, tmp_path: Path) -> None:
    """An index without torch."""
    wheel(tmp_path / "a", "other", "1.0")
    with pytest.raises(script.Problem, match=r"no index offers `torch==2\.13\.0`.*TORCH_INDEX"):
        world(machine(script, "cpu"), "pip", pytorch=NOWHERE, configured=(tmp_path / "a").as_uri())


def test_uv_is_told_what_pip_is_configured_with(script: ModuleType) -> None:
    """uv reads no configuration of pip's."""
    pip = {"index-url": "https://a/simple", "extra-index-url": "file:///b file:///c", "find-links": "/d /e", "timeout": "9"}
    assert script.uv_variables(pip) == {
        "UV_DEFAULT_INDEX": "https://a/simple", "UV_INDEX": "file:///b file:///c",
        "UV_FIND_LINKS": "/d,/e", "UV_INDEX_STRATEGY": "unsafe-best-match",
    }  # fmt: skip


def test_without_uv_pip_installs(script: ModuleType, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index without uv, and none on the PATH: None, and pip is the installer."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    environment = python.parent.parent.parent / "bare"
    venv.create(environment, with_pip=True)
    assert script.Installers(environment / "bin" / "python").find_uv() is None
