"""The clock as it stood in the record, for a replay's second launch: who reads it and trains by it gives another result then.

`chronicle replay` names a file in `CHRONICLE_CLOCK`: when the recorded launch began, and when it had taken which step. The code
of the script (no installed package, nor the standard library, nor chronicle) reads these times: from `time` and `datetime` of
this process, on the way between two steps with the seconds that pass. Everybody else reads the real ones, so no wait and no
limit of a library changes. The types of `datetime` stay what they are (pandas is built against them): their methods are others.
Clocks that a library in C reads are not reached.
"""
# mypy: ignore-errors

import ctypes
import datetime
import gc
import json
import os
import sys
import time

from asks import is_own

now_ns, steady_ns = time.time_ns, time.monotonic_ns


class Clock:
    """How far the script's clock is from the real one."""

    def __init__(self, begin, steps):
        self.steps = steps
        self.first = self.ahead = int(begin * 1e9) - now_ns()

    def at_step(self, step):
        """The record's clock stands where it stood when this step was over."""
        if step in self.steps:
            self.ahead = int(self.steps[step] * 1e9) - now_ns()

    def since(self):
        """By how much the clock was moved since the process began."""
        return self.ahead - self.first


def move(clock):
    """Put the clock in the place of the functions that tell the time."""

    def counted(original, moved, unit):
        def read():
            value = original()
            return value + moved() / unit if is_own(sys._getframe(1)) else value

        def read_ns():
            value = original()
            return value + moved() if is_own(sys._getframe(1)) else value

        return read_ns if unit == 1 else read

    def told(original, place):
        def read(*args):
            if len(args) <= place and is_own(sys._getframe(1)):
                given = (now_ns() + clock.ahead) / 1e9
                args = (*args, time_of["localtime"](given) if original.__name__ in ("strftime", "asctime") else given)
            return original(*args)

        return read

    time_of = {name: getattr(time, name) for name in ("localtime", "gmtime", "ctime", "strftime", "asctime")}
    for name, place in (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("strftime", 1), ("asctime", 0)):
        setattr(time, name, told(time_of[name], place))
    time.time, time.time_ns = counted(time.time, lambda: clock.ahead, 1e9), counted(time.time_ns, lambda: clock.ahead, 1)
    for name in ("monotonic", "perf_counter", "process_time"):
        setattr(time, name, counted(getattr(time, name), clock.since, 1e9))
        setattr(time, name + "_ns", counted(getattr(time, name + "_ns"), clock.since, 1))
    move_dates(clock)


def move_dates(clock):
    """`now`, `today` and `utcnow` of the types of `datetime`, in their place: a subclass would be another type."""

    def told(original, universal):
        def read(cls, *args, **more):
            if not is_own(sys._getframe(1)):
                return original.__get__(None, cls)(*args, **more)
            given = (now_ns() + clock.ahead) / 1e9
            if universal:
                return cls.fromtimestamp(given, datetime.timezone.utc).replace(tzinfo=None)  # noqa: UP017 any Python
            return cls.fromtimestamp(given, *args, **more)

        return classmethod(read)

    for kind in (datetime.datetime, datetime.date):
        (methods,) = gc.get_referents(kind.__dict__)  # the dictionary itself, which a type of C does not let set
        for name in {"now", "today", "utcnow"} & set(methods):
            methods[name] = told(methods[name], name == "utcnow")
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def set_clock(path):
    """Read the file and move the clock; the guard tells the steps (`sys._chronicle_clock`)."""
    with open(path) as file:
        found = json.load(file)
    clock = Clock(found["begin"], {int(step): when for step, when in found["steps"].items()})
    move(clock)
    if os.environ.get("CHRONICLE_RESUME_STEP", "").isdecimal():
        sys._chronicle_resumes = int(os.environ["CHRONICLE_RESUME_STEP"])
    sys._chronicle_clock = clock.at_step
