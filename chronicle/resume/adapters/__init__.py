"""One file per framework: how the guard hooks into its saves, loads and optimizer steps. `guard` picks one of them.

An adapter builds a `GuardSession` with a function that returns the objects in use, and tells it what happens by the nine events
of `events.py`. `deepspeed.py` is the shortest example.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, Unpack

from chronicle.errors import ChronicleError, UsageProblem
from chronicle.resume.contract import Options, Said, options_from
from chronicle.resume.faults import last_resort, or_else, record_without_session

__all__ = ["guard"]

T = TypeVar("T")


@or_else(lambda problem, target, *, run_dir=None, **_: _unguarded(problem, target, run_dir))
def guard(target: T, *, run_dir: str | Path | None = None, **said: Unpack[Said]) -> T:
    """Put an `Accelerator`, a DeepSpeed engine or a Lightning `Fabric` under guard and return the same object.

    `run_dir`: the run's directory or name; default `CHRONICLE_RUN_DIR`, else the settings. What else can be said: `Said`.
    Raises `UsageProblem` for other objects. A refusal is raised as `ResumeRefused`.
    """
    options = options_from(run_dir, said)
    origins = {base.__module__.partition(".")[0] for base in type(target).__mro__}
    names = {base.__name__ for base in type(target).__mro__}
    if "Accelerator" in names and "accelerate" in origins:
        from chronicle.resume.adapters.accelerate import guard_accelerator

        _set_up(guard_accelerator, target, options)
    elif "DeepSpeedEngine" in names:
        from chronicle.resume.adapters.deepspeed import guard_engine

        _set_up(guard_engine, target, options)
    elif "Fabric" in names and origins & {"lightning", "lightning_fabric"}:
        from chronicle.resume.adapters.fabric import guard_fabric

        _set_up(guard_fabric, target, options)
    else:
        raise UsageProblem(
            f"cannot guard a {type(target).__name__}: expected an Accelerator, a DeepSpeed engine or a Fabric",
            "plain torch: chronicle.attach(...); HF Trainer and Lightning: ChronicleCallback",
        )
    return target


def _unguarded(problem: Exception, target: T, run_dir: Any) -> T:
    """The guard itself failed: `target` trains without one, which is said and recorded."""
    record_without_session("attach", problem, run_dir)
    return target


def _set_up(work: Callable[[Any, Options], Any], target: Any, options: Options) -> None:
    """Put `target` under guard; when that fails, it trains without one, which is said and recorded."""
    try:
        work(target, options)
    except ChronicleError:
        raise
    except Exception as problem:  # noqa: BLE001 the guard's own errors never end a training
        session: Any = getattr(target, "chronicle", None)
        if hasattr(session, "retire"):
            last_resort(lambda _: session.retire(), problem)
            last_resort(lambda problem: session.faults.record("setup", problem), problem)
        else:
            record_without_session("setup", problem, options.run_dir)
