"""All evidence that needs a GPU, in one command that can be cut and gone on with: `make gpu-evidence OUT=dir`.

    python -m benchmarks.gpu_evidence --out DIR [--seconds 520] [--device cuda|cpu] [--cells save,streams] [--again]

Each cell is a process of its own with a limit; its result is a file in `DIR/cells/`, and a cell with a result of this device,
torch and commit is not repeated. No cell is begun that may not end within `--seconds`: call again for the rest. `evidence.json`
and `evidence.md` are written after every cell, with what failed or was not played. Nothing is downloaded; what is not
installed is said. `--device cpu` plays the same code in tiny sizes: a trial of this program, and labelled so.

mfu-85M, mfu-1.21B   share of the device's peak arithmetic, in bf16
save          guard's description of memory, and writing the same state
streams       a loop on a stream of its own, bare and under the guard: losses and weights equal to the bit
guard-cost    steps and a save of 100M parameters in bf16, bare and under the guard, in turns
first-gradient   a resume whose labels are no longer shifted, in bf16
resume-*      n steps, a resume in a fresh process and n more against 2n steps: every tensor and every loss, to the bit
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: its function of the device, the seconds it may take there, and whether a CPU trial plays it."""

    play: Callable[[str], Result]
    seconds: int
    on_cpu: bool = True


# --- Cells


def python(words: Sequence[str], *, cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Run a program of this repository in this environment; return what it printed. Raises RuntimeError with its last words."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("CHRONICLE_")} | {"PYTHONPATH": _with_root()}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env={**own, **(environ or {})}, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"`{' '.join(words[:3])}` ended with code {done.returncode}: {last[0][:300]}")
    return done.stdout


def _with_root() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def mfu(shape: str) -> Callable[[str], Result]:
    """Share of the peak of one shape, with recomputed activations."""

    def play(device: str) -> Result:
        import torch

        from benchmarks.gpu_step import PEAK_TFLOPS, SHAPES, largest_batch, measure

        config = SHAPES[shape if device == "cuda" else "tiny"]
        batch = largest_batch(config, torch.device(device), 32) if device == "cuda" else 2
        found = measure(config, device=torch.device(device), batch=batch, steps=10 if device == "cuda" else 1)
        name = torch.cuda.get_device_name() if device == "cuda" else ""
        peak = next((value for kind, value in PEAK_TFLOPS.items() if kind in name), None)
        return {"parameters": found.parameters, "batch": batch, "ms_a_step": found.seconds_a_step * 1e3,
                "tflops": found.flops_a_second / 1e12, "mfu": found.flops_a_second / 1e12 / peak if peak else None,
                "peak_gb": found.peak_bytes / 1e9 if found.peak_bytes else None}  # fmt: skip

    return play


def save(device: str) -> Result:
    """Milliseconds of the guard's description of memory and of `torch.save` of the same state."""
    import torch

    from benchmarks.guard_overhead import build, median_of
    from chronicle.resume.fingerprint import fingerprint_memory

    with torch.device(device):
        model, optimizer, live = build(85 if device == "cuda" else 1)
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved, _ = median_of(lambda: torch.save(state, Path(folder) / "state.pt"), 3)
    described, _ = median_of(lambda: fingerprint_memory(live), 3)
    return {"parameters": sum(p.numel() for p in model.parameters()), "save_ms": saved * 1e3, "description_ms": described * 1e3,
            "ratio": described / saved}  # fmt: skip


def streams(device: str) -> Result:
    """A loop on its own stream, without and with the guard; the steps of both are timed in turns."""
    import torch

    import chronicle

    os.environ["CHRONICLE_RUN_DIR"] = tempfile.mkdtemp()
    os.environ["CHRONICLE_FRESH_START"] = "1"
    stream = torch.cuda.Stream() if device == "cuda" else None

    def loop(guarded: bool) -> tuple[list[float], str, float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (1 + at))
        if guarded:
            chronicle.attach(None, model, optimizer, scheduler)
        losses, times = [], []
        for _ in range(80):
            began = time.perf_counter()
            x = torch.randn(32, 64, device=device)
            if stream is None:
                loss = (model(x) - x).square().mean()
                torch.autograd.backward(loss)
                optimizer.step()
            else:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    loss = (model(x) - x).square().mean()
                    torch.autograd.backward(loss)
                    optimizer.step()
                torch.cuda.current_stream().wait_stream(stream)
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - began)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu().numpy().tobytes()
        return losses, hashlib.sha256(weights).hexdigest(), statistics.median(times[55:])

    bare, guarded = loop(False), loop(True)
    equal = bare[:2] == guarded[:2]
    if not equal:
        raise RuntimeError("losses or weights differ between the bare loop and the guarded one")
    return {"equal": equal, "steps": len(bare[0]), "ratio_of_steps": guarded[2] / bare[2]}


TINY = ("model.d_model=32", "num_layers=1", "d_ff=32", "window_bytes=8", "batch_size=8", "warmup_steps=3", "decay_steps=4",
        "raise_step=none", "raise_factor=1.0", "eval_windows=8", "eval_every=1000", "log_every=1", "summary=false",
        "checkpoint_every=1000", "total_steps=12")  # fmt: skip

MODERN = ("norm=pre", "rotary=true", "qk_norm=true", "muon_lr=0.02")  # a second optimizer, Muon


def resume(*settings: str) -> Callable[[str], Result]:
    """12 steps against 6, a resume and 6, of the bit transformer with these settings."""

    def play(device: str) -> Result:
        sharded = any(setting.startswith("sharding=") for setting in settings)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"] if sharded else []
        words = [*launcher, "-m", "bit_transformer.train", "--recipe", "demo"]
        for one in (*TINY, *settings, *(["device=auto"] if device == "cuda" else [])):
            words += ["--set", one]
        return compare_resume(words, "opt_step-12")

    return play


def compare_resume(words: Sequence[str], last: str) -> Result:
    """Play both and compare the tensors of the last checkpoint and the losses; raises RuntimeError where one differs."""
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        for where, launches in ((whole, [[]]), (parts, [["--stop-at", "6"], []])):
            where.mkdir()
            for extra in launches:
                run = ["-m", "chronicle_ml", "run", "--run", "cell", "--logs", str(where / "logs"), "--checkpoints",
                       str(where / "checkpoints"), "--", sys.executable, *words, *extra]  # fmt: skip
                python(run, cwd=where, environ={"CHRONICLE_MLFLOW_URI": "off", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        tensors = [_tensors(where / "checkpoints" / last) for where in (whole, parts)]
        losses = [[json.loads(line)["loss"] for path in sorted(where.glob("logs/cell/launches/*/metrics.jsonl"))
                   for line in path.read_text().splitlines()] for where in (whole, parts)]  # fmt: skip
    differ = sorted(name for name in tensors[0].keys() | tensors[1].keys() if tensors[0].get(name) != tensors[1].get(name))
    if differ or not tensors[0] or losses[0] != losses[1]:
        raise RuntimeError(f"not exact: {len(differ)} of {len(tensors[0])} tensors differ ({', '.join(differ[:3])}), losses "
                           f"{'equal' if losses[0] == losses[1] else 'differ'}")  # fmt: skip
    return {"exact": True, "tensors": len(tensors[0]), "losses": len(losses[0])}


def resume_loop(form: str) -> Callable[[str], Result]:
    """12 steps against 6, a resume and 6, of a plain loop in bf16 that saves by `torch.save`, DCP, or FSDP2 and DCP."""

    def play(device: str) -> Result:
        last = "step-12/state.pt" if form == "plain" else "step-12"
        words = ["-m", "benchmarks.gpu_loop", "--form", form, "--device", device]
        found = {}
        with tempfile.TemporaryDirectory() as folder:
            for name, launches in (("whole", [[]]), ("parts", [["--stop-at", "6"], ["--resume"]])):
                root = Path(folder) / name
                for extra in launches:
                    more = [*extra, str(root / "checkpoints" / "step-6")] if extra == ["--resume"] else extra
                    _guarded(root, [*words, "--checkpoints", str(root / "checkpoints"), *more])
                found[name] = (_losses(root), _digest(root / "checkpoints" / last))
            verdict = _verdicts(Path(folder) / "parts")[-1]
        if found["whole"] != found["parts"]:
            raise RuntimeError(f"not exact; the guard said {verdict}")
        return {"exact": True, "losses": len(found["whole"][0]), "guard": verdict}

    return play


def first_gradient(device: str) -> Result:
    """A resume in bf16 whose labels are no longer shifted: no file shows it, the first gradient does."""
    words = ["-m", "benchmarks.gpu_loop", "--device", device]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        words += ["--checkpoints", str(root / "checkpoints")]
        _guarded(root, [*words, "--stop-at", "8"])
        resumed = [*words, "--resume", str(root / "checkpoints" / "step-6")]
        _guarded(root, resumed)
        healthy = _verdicts(root)[-1]
        code = _guarded(root, [*resumed, "--plant", "shift"], check=False)
        planted = _verdicts(root)[-1]
    return {"healthy": healthy, "planted": planted, "exit_code_of_planted": code}


def guard_cost(device: str) -> Result:
    """Steady steps of a transformer of 100M parameters in bf16, bare and under the guard, in turns; and a save of each."""
    import torch

    import chronicle
    from benchmarks.gpu_loop import build, loss_of

    os.environ["CHRONICLE_RUN_DIR"] = tempfile.mkdtemp()
    os.environ["CHRONICLE_FRESH_START"] = "1"
    width, layers, batch, length = (1024, 8, 16, 512) if device == "cuda" else (64, 2, 2, 16)

    def prepare() -> tuple[Any, Any]:
        model = build(width, layers, device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    bare, guarded = prepare(), prepare()
    chronicle.attach(None, *guarded)
    times: dict[str, list[float]] = {"bare": [], "guarded": []}
    for step in range(1, 121 if device == "cuda" else 31):
        for name, (model, optimizer) in (("bare", bare), ("guarded", guarded)):
            _wait(device)
            began = time.perf_counter()
            torch.autograd.backward(loss_of(model, step, device, batch=batch, length=length))
            optimizer.step()
            optimizer.zero_grad()
            _wait(device)
            times[name].append(time.perf_counter() - began)
    saves = {}
    for name, (model, optimizer) in (("bare", bare), ("guarded", guarded)):
        began = time.perf_counter()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
        torch.save(state, Path(os.environ["CHRONICLE_RUN_DIR"]) / f"{name}.pt")
        saves[name] = time.perf_counter() - began
    steady = {name: statistics.median(values[len(values) // 2 :]) for name, values in times.items()}
    return {"parameters": sum(p.numel() for p in bare[0].parameters()), "bare_step_ms": steady["bare"] * 1e3,
            "guarded_step_ms": steady["guarded"] * 1e3, "ratio_of_steps": steady["guarded"] / steady["bare"],
            "ratio_of_all_steps": sum(times["guarded"][5:]) / sum(times["bare"][5:]),
            "bare_save_ms": saves["bare"] * 1e3, "guarded_save_ms": saves["guarded"] * 1e3}  # fmt: skip


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _guarded(root: Path, words: Sequence[str], *, check: bool = True) -> int:
    """Run a script under `chronicle run` with its journal below `root`; its exit code. Raises RuntimeError where it fails."""
    root.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "chronicle_ml", "run", "--run", "cell", "--logs", str(root / "logs"), "--checkpoints",
               str(root / "checkpoints"), "--", sys.executable, *words]  # fmt: skip
    more = {"PYTHONPATH": _with_root(), "CHRONICLE_MLFLOW_URI": "off", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, cwd=root, env=os.environ | more, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"ended with code {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")
    return done.returncode


def _losses(root: Path) -> list[float]:
    """The logged losses of all launches, in order."""
    paths = sorted(root.glob("logs/cell/launches/*/metrics.jsonl"))
    return [json.loads(line)["loss"] for path in paths for line in path.read_text().splitlines()]


def _verdicts(root: Path) -> list[str]:
    """What the guard said before the first step of each launch, oldest first."""
    lines = [line for path in sorted(root.glob("logs/cell/journal/*.jsonl")) for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines if '"kind":"guard.verdict"' in line]
    found.sort(key=lambda entry: str(entry["id"]))
    return [str(entry["data"].get("verdict")) for entry in found]


def _digest(path: Path) -> str:
    """A digest of the tensors of a `torch.save` file or a DCP directory."""
    import torch

    digest = hashlib.sha256()
    if path.is_dir():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        target = path.with_suffix(".whole.pt")
        dcp_to_torch_save(path, target)
        path = target
    state = torch.load(path, map_location="cpu", weights_only=False)
    leaves, _ = torch.utils._pytree.tree_flatten({"model": state["model"], "optim": state.get("optim", state.get("optimizer"))})
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            digest.update(leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a checkpoint by file and path; files of torch and of safetensors."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, bytes] = {}

    def feed(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(value, Mapping):
            for key, part in value.items():
                feed(f"{name}/{key}", part)
        elif isinstance(value, list | tuple):
            for number, part in enumerate(value):
                feed(f"{name}/{number}", part)

    for path in sorted(checkpoint.rglob("*")) if checkpoint.is_dir() else [checkpoint]:
        name = str(path.relative_to(checkpoint))
        if path.suffix == ".safetensors":
            feed(name, load_file(path))
        elif path.suffix in (".bin", ".pt", ".pkl") and "random_states" not in name:
            feed(name, torch.load(path, map_location="cpu", weights_only=False))
    return found


CELLS: dict[str, Cell] = {
    "guard-cost": Cell(play=guard_cost, seconds=100),
    "first-gradient": Cell(play=first_gradient, seconds=100),
    "resume-plain": Cell(play=resume_loop("plain"), seconds=100),
    "resume-dcp": Cell(play=resume_loop("dcp"), seconds=100),
    "resume-fsdp2-dcp": Cell(play=resume_loop("fsdp2"), seconds=120),
    "streams": Cell(play=streams, seconds=40),
    "save": Cell(play=save, seconds=60),
    "mfu-85M": Cell(play=mfu("85M"), seconds=120),
    "mfu-1.21B": Cell(play=mfu("1.21B"), seconds=200),
    "resume-fp32": Cell(play=resume(), seconds=120),
    "resume-bf16": Cell(play=resume("mixed_precision=bf16"), seconds=120),
    "resume-modern": Cell(play=resume(*MODERN), seconds=120),
    "resume-compile": Cell(play=resume("compile=true"), seconds=240, on_cpu=False),
    "resume-zero2": Cell(play=resume("sharding=zero2", "mixed_precision=bf16"), seconds=300, on_cpu=False),
}


# --- Playing them


def describe(device: str) -> dict[str, str]:
    """Device, versions and commit: a result holds for these."""
    import torch

    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    versions = {}
    for name in ("accelerate", "deepspeed", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {"device": torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})",
            "torch": torch.__version__, "cuda": str(torch.version.cuda), "python": platform.python_version(), **versions,
            "commit": commit.stdout.strip() or "unknown"}  # fmt: skip


def play_cell(name: str, device: str) -> Result:
    """Play one cell in a process of its own: `ok` with its figures, or `failed` with a sentence."""
    began = time.monotonic()
    limit = CELLS[name].seconds
    command = [sys.executable, "-m", "benchmarks.gpu_evidence", "--cell", name, "--device", device]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # its own session: the cell and what it started
        process.communicate()
        return {"state": "failed", "why": f"not done after {limit} s", "seconds": limit}
    seconds = round(time.monotonic() - began, 1)
    try:
        return {"state": "ok", "seconds": seconds, "found": json.loads(out.splitlines()[-1])}
    except (IndexError, ValueError):
        last = err.strip().splitlines()[-1:] or [f"ended with code {process.returncode}"]
        return {"state": "failed", "why": last[0][:400], "seconds": seconds}


def write_tables(out: Path, setting: Mapping[str, str], device: str, results: Mapping[str, Result]) -> None:
    """Write `evidence.json` and `evidence.md`; what was not played is in both."""
    rows = {name: results.get(name, {"state": "not played", "why": "no time left, or not chosen"}) for name in CELLS}
    if device == "cpu":
        rows |= {name: {"state": "not played", "why": "needs a GPU"} for name, cell in CELLS.items() if not cell.on_cpu}
    date = str(datetime.datetime.now(tz=datetime.UTC).date())
    record = {"v": 1, "date": date, "setting": dict(setting), "cells": rows}
    (out / "evidence.json").write_text(json.dumps(record, indent=1) + "\n")
    trial = "" if device == "cuda" else "**On a CPU, in tiny sizes: a trial of the program, no figure of a GPU.**\n\n"
    told = "; ".join(f"{key} {value}" for key, value in setting.items())
    lines = [f"# GPU evidence, {date}\n\n{trial}{told}.\n", "| cell | state | seconds | found |", "|---|---|---|---|"]
    for name, row in rows.items():
        found = row.get("why") or ", ".join(f"{key} {_shown(value)}" for key, value in row["found"].items())
        lines.append(f"| {name} | {row['state']} | {row.get('seconds', '')} | {found.replace('|', '/')} |")
    (out / "evidence.md").write_text("\n".join(lines) + "\n")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "not measured" if value is None else str(value)


def collect(out: Path, device: str, chosen: Sequence[str], seconds: float, *, again: bool) -> int:
    """Play what has no result yet, as long as there is time; return the exit code: 0, or 3 where a cell failed."""
    began = time.monotonic()
    (out / "cells").mkdir(parents=True, exist_ok=True)
    setting, results = describe(device), dict[str, Result]()
    for name in CELLS:
        path = out / "cells" / f"{name}.json"
        if path.is_file():
            record = json.loads(path.read_text())
            if record["setting"] == setting and not (again and name in chosen):
                results[name] = record["result"]
    left = []
    for name in chosen:
        if results.get(name, {}).get("state") == "ok" or (device == "cpu" and not CELLS[name].on_cpu):
            continue
        if time.monotonic() - began + CELLS[name].seconds > seconds:
            left.append(name)
            continue
        results[name] = play_cell(name, device)
        text = json.dumps({"setting": setting, "result": results[name]}, indent=1)
        (out / "cells" / f"{name}.json").write_text(text + "\n")
        write_tables(out, setting, device, results)
        print(f"{name}: {results[name]['state']} {results[name].get('why', '')}".rstrip(), flush=True)
    write_tables(out, setting, device, results)
    print((out / "evidence.md").read_text())
    if left:
        print(f"no time left for {', '.join(left)}: call again with the same directory")
    return 3 if any(results[name]["state"] == "failed" for name in chosen if name in results) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Play, or play one cell and print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-evidence"))
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--cells", help="only these, separated by commas")
    parser.add_argument("--again", action="store_true", help="repeat what has a result")
    parser.add_argument("--cell", choices=CELLS, help="play one and print its figures as the last line")
    options = parser.parse_args(argv)
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "")
    if not device or (device == "cuda" and not torch.cuda.is_available()):
        print("no GPU here: nothing was measured (`--device cpu` tries the program in tiny sizes)")
        return 0
    if options.cell:
        print(json.dumps(CELLS[options.cell].play(device)))
        return 0
    chosen = [name.strip() for name in (options.cells or ",".join(CELLS)).split(",")]
    unknown = [name for name in chosen if name not in CELLS]
    if unknown:
        print(f"error: unknown cell `{unknown[0]}`: expected some of {', '.join(CELLS)}", file=sys.stderr)
        return 2
    return collect(options.out, device, chosen, options.seconds, again=options.again)


if __name__ == "__main__":
    sys.exit(main())
