"""Errors of the guard itself: they are recorded and said once, and training never sees them.

Whatever a framework calls (hooks, callbacks, wrapped functions, threads, exit) is a `shield`, and inside the guard every save,
load and step runs in `contained`. An error becomes one `guard.fault` entry and one line on stderr: from this step on the launch
is unverified. A verdict is a `SystemExit` and passes. So does an exception that the script's own signal handler raised while
the guard was running: it is the script's.
"""

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TypeVar

from chronicle.errors import ChronicleError
from chronicle.journal.events import GuardFault
from chronicle.resume.contract import launch_number
from chronicle.resume.journal import GuardJournal, find_run_dir

F = TypeVar("F", bound=Callable[..., Any])


NUM_FAULTS = 3  # errors at one place, after which the guard no longer tries there
NUM_FRAMES = 4  # innermost frames that an entry names


class Faults:
    """The guard's own errors in one process. `step`: optimizer steps completed, as far as it is known."""

    def __init__(self, journal: GuardJournal, step: Callable[[], int | None] = lambda: None) -> None:
        self._journal, self._step = journal, step
        self._counts: dict[str, int] = {}
        self.found: list[tuple[str, str]] = []  # where, error

    def contained(self, where: str) -> "Containment":
        """A context in which an error is recorded instead of raised. `where`: what the guard is doing."""
        return Containment(functools.partial(self.record, where))

    def shield(self, where: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, as a framework may call it: an error is recorded."""
        return shield(work, functools.partial(self.record, where))

    def count(self, where: str) -> int:
        """How often the guard failed at this place."""
        return self._counts.get(where, 0)

    def record(self, where: str, problem: BaseException | str) -> None:
        """Record one error, or its text; never raises. An error that repeats at the same place is recorded once."""
        try:
            self._record(where, problem)
        except Exception as worse:  # noqa: BLE001 the last line of defence: what is left is to say it
            _say_unrecorded(worse, problem)

    def _record(self, where: str, problem: BaseException | str) -> None:
        error = problem if isinstance(problem, str) else reason_of(problem)
        self._counts[where] = self._counts.get(where, 0) + 1
        if (where, error) in self.found:
            return
        self.found.append((where, error))
        step = None
        with contextlib.suppress(Exception):  # an error is being recorded already
            step = self._step()
        since = "" if step is None else f" from step {step}"
        words = f"this run is unverified{since}: the guard failed at its {where} ({error}); training goes on"
        self._journal.say("fault", words)
        trace = () if isinstance(problem, str) else tuple(_frames(problem.__traceback__))
        event = GuardFault(where=where, error=error, trace=trace, rank=self._journal.rank)
        self._journal.write(event, step=step, title=f"unverified{since}: the guard failed at its {where}", from_any_rank=True)


class Containment:
    """A `with` block whose errors are handed to `failed` and not raised; it may be entered again and again.

    Those of the kinds in `passes` are raised. A class: a generator would cost every step more.
    """

    __slots__ = ("_failed", "_passes")

    def __init__(self, failed: Callable[[Exception], Any], passes: tuple[type[Exception], ...] = ()) -> None:
        self._failed, self._passes = failed, passes

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(problem, Exception) or isinstance(problem, self._passes) or raised_by_script(problem):
            return False
        last_resort(self._failed, problem)
        return True


def shield(work: Callable[..., Any], failed: Callable[[Exception], Any]) -> Callable[..., Any]:
    """`work`, as a framework may call it: an error is given to `failed` and goes no further. Returns None then."""

    @functools.wraps(work)
    def call(*args: Any, **kwargs: Any) -> Any:
        with Containment(failed):
            return work(*args, **kwargs)

    return call


def shielded(where: str, *, wrong_use: tuple[type[Exception], ...] = ()) -> Callable[[F], F]:
    """Decorates a method of an adapter that a framework calls; the adapter's `lost` hears of an error.

    An adapter that `gave_up` is not called any more. Errors of `wrong_use` (arguments that do not exist) are raised.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, "gave_up", False):
                return None
            with Containment(lambda problem: self.lost(where, problem), passes=wrong_use):
                return method(self, *args, **kwargs)
            return None

        return call  # type: ignore[return-value]

    return decorate


def or_else(otherwise: Callable[..., Any]) -> Callable[[F], F]:
    """Decorates a function that a script calls: after an error of the guard it returns `otherwise(problem, *arguments)`.

    Errors that are raised on purpose and arguments that do not exist are raised.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except ChronicleError:
                raise
            except Exception as problem:
                never_began = problem.__traceback__ is None or problem.__traceback__.tb_next is None
                if (isinstance(problem, TypeError) and never_began) or raised_by_script(problem):
                    raise
                return otherwise(problem, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def last_resort(failed: Callable[[Exception], Any], problem: Exception) -> None:
    """Hand an error to `failed`; if that fails too, stderr hears of both."""
    try:
        failed(problem)
    except Exception as worse:  # noqa: BLE001 nothing may reach training
        _say_unrecorded(worse, problem)


def record_without_session(where: str, problem: Exception, run_dir: Any = None) -> None:
    """An error before there is a session: the launch goes on without a guard, which its journal and stderr say."""

    def record(problem: Exception) -> None:
        found, _ = find_run_dir(run_dir, os.environ, Path.cwd())
        journal = GuardJournal(found, launch=launch_number(os.environ), rank=lambda: int(os.environ.get("RANK", "0")))
        Faults(journal).record(where, problem)

    last_resort(record, problem)


def reason_of(problem: BaseException) -> str:
    """An exception in one line; one that the guard raised on purpose is its text alone."""
    try:
        if type(problem).__module__.startswith("chronicle."):
            return " ".join(str(problem).split())[:300]
        return " ".join(f"{type(problem).__name__}: {problem}".split())[:300]
    except Exception:  # noqa: BLE001 an exception whose text cannot be made
        return type(problem).__name__


def _frames(trace: TracebackType | None) -> Iterator[str]:
    frames = []
    while trace is not None:
        frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    yield from frames[-NUM_FRAMES:]


def raised_by_script(problem: BaseException) -> bool:
    """Whether a signal handler of the script raised this while the guard happened to run."""
    handlers, trace = None, problem.__traceback__
    while trace is not None:
        if handlers is None:
            handlers = set(_handler_codes())
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _handler_codes() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        for made in (handler, vars(type(handler)).get("__call__")):  # a function, a bound method, an object
            code = getattr(getattr(made, "__func__", made), "__code__", None)
            if isinstance(code, CodeType) and handler is not signal.default_int_handler:
                yield code


def _say_unrecorded(worse: Exception, problem: BaseException | str) -> None:
    error = problem if isinstance(problem, str) else reason_of(problem)
    text = f"this run is unverified: an error of the guard could not be recorded ({reason_of(worse)}): {error}"
    with contextlib.suppress(Exception):  # stderr is closed
        print(f"chronicle guard: {text}", file=sys.stderr, flush=True)
