"""In a replay: what the script's own code asks of the machine, told to the watch of system calls (`replay/watched.py`).

What a library asks belongs to it: libraries of every training read `/proc`, draw from the system and look at the memory. Who
asks is known in this process alone, so the questions of the script are told: free memory and disk, load, processes, ids,
random numbers of the system, a connection that it takes, a variable that no record compares. `shutil`, `psutil` and the like
hand a question on. The answer may have been another in the record. Most scripts only print it: so in later replays it is as
small as it can be, or as large (`CHRONICLE_ANSWERS`), and who goes by it gives another result then.

And the other way round: what imports look at is passed by (thousands of paths, and what was imported is known anyway), by a
number of a directory that the filter lets through: with an absolute path the kernel does not use it. So is what `inspect`
looks for (the source of every module) and compiled modules below a package, whose first file is told.
"""
# mypy: ignore-errors

import builtins
import genericpath
import io
import os
import posix
import posixpath
import re
import sys
import types

MARK = "/.chronicle-asked/"  # nothing lies there: to look at it tells the watch
UNWATCHED = 0x7A7A7A7A
HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
PACKAGES = HERE[: -len("chronicle/launch/startup/")]
OURS = (PACKAGES + "chronicle" + os.sep, PACKAGES + "rollback" + os.sep)
HANDS_ON = ("psutil", "numpy")  # packages that hand a question on
VOLATILE = ("/proc/", "/sys/class/", "/sys/block/", "/sys/devices/virtual/", "/sys/fs/cgroup/", "/dev/urandom", "/dev/random")
READERS = ("/shutil.py", "/pathlib.py", "/codecs.py", "/glob.py", "/os.py", "/fileinput.py", "<frozen os>", "<frozen codecs>")
CAN_VARY = re.compile(r"/proc/(loadavg|meminfo|stat|(self|\d+)/statm?)")
COMPILED_BELOW = re.compile(r"(-packages/[^/]+/(?!__pycache__/)[^/]+/|/lib/python[^/]*/(?!(site|dist)-packages)).*\.pyc$")
VARIED = "varied: "  # before the words: other replays answer otherwise
MOST = 10**6
told = set()
answers = os.environ.get("CHRONICLE_ANSWERS", "")
inside = []
real = {name: getattr(posix, name) for name in ("stat", "open", "close", "listdir", "access", "readlink")}


def is_own(frame):
    """Whether this code is the script's: of no installed package, nor of the standard library, nor ours."""
    name = frame.f_code.co_filename
    return not ("-packages/" in name or "/lib/python" in name or name.startswith(("<frozen", *OURS)))


def is_asked(*between, packages=HANDS_ON):
    """Whether the script asks, by itself or by way of these files of the standard library, or of these packages."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(HERE):
            pass
        elif is_own(frame):
            return True
        elif not (name.endswith(between) or any("-packages/" + package + "/" in name for package in packages)):
            return False
        frame = frame.f_back
    return False


def tell(words):
    """Tell the watch, once a process."""
    if words not in told:
        told.add(words)
        real["access"](MARK + words.replace("/", "|"), 0)


def telling(holder, name, words, *between, packages=HANDS_ON, vary=None):
    """Put a function in the place of one, that tells who asks. `vary(answer, most)`: the answer in later replays."""
    original = getattr(holder, name, None)
    if original is None:
        return

    def asked(*args, **more):
        if not is_asked(*between, packages=packages):
            return original(*args, **more)
        tell((VARIED if vary else "") + words)
        answer = original(*args, **more)
        return vary(answer, answers == "most") if vary and answers else answer

    asked.__name__ = asked.__qualname__ = name
    asked.__doc__ = getattr(original, "__doc__", None)
    setattr(holder, name, asked)


def listen():
    """From now on the script's questions are told."""
    import resource

    def room(answer, most):
        row = list(answer)
        row[3], row[4], row[6], row[7] = (row[2], row[2], row[5], row[5]) if most else (1, 1, 1, 1)
        return type(answer)(row)

    def times(answer, most):
        return type(answer)([value * MOST if most else type(value)(0) for value in answer])

    def bits(answer, most):
        return (b"\xff" if most else b"\0") * len(answer)

    random = ("/random.py", "/secrets.py", "/uuid.py")
    telling(os, "urandom", "random numbers of the system", *random, vary=bits)
    telling(os, "getrandom", "random numbers of the system", *random, vary=bits)
    if "random" in sys.modules:  # it has its own name for it
        sys.modules["random"]._urandom = os.urandom
    telling(os, "getloadavg", "the load of the machine", vary=lambda answer, most: (1000.0 if most else 0.0,) * 3)
    for name in ("statvfs", "fstatvfs"):
        telling(os, name, "the room on a disk", "/shutil.py", vary=room)
    for name in ("getpid", "getppid", "getpgid", "getpgrp", "getsid"):
        # every replay has other ones; `psutil.Process()` asks for its own
        telling(os, name, "the id of a process", packages=(), vary=lambda answer, most: answer)
    telling(os, "times", "the processor's time", vary=times)
    telling(resource, "getrusage", "what the process has used", vary=times)
    builtins.open = io.open = opening(builtins.open)
    sys.addaudithook(hearing)
    hear_variables()


def hearing(event, args):
    """An audit hook: files of the system, a socket that others may connect to, lines of standard input."""
    try:
        if inside:
            return
        if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], str):
            path = args[0]
            if (path.startswith(VOLATILE) or path == "/proc") and is_asked(*READERS):
                tell("`" + path + "`")
        elif event == "socket.bind":
            if is_asked("/socketserver.py", "/http/server.py", "/socket.py"):
                tell("what connects to it")
        elif event == "builtins.input":
            tell("a line of standard input")
    except Exception:  # noqa: BLE001 what a hook raises ends the script's own call
        pass


def opening(original):
    """In the place of `open`: files of `/proc` are other ones for the script in later replays."""

    def open(file, mode="r", *args, **more):
        path = file if isinstance(file, str) else str(file) if hasattr(file, "__fspath__") else ""
        if not (CAN_VARY.fullmatch(path) and is_asked(*READERS)):
            return original(file, mode, *args, **more)
        tell(VARIED + "`" + path + "`")
        inside.append(1)  # the hook does not tell of it again
        try:
            if not answers:
                return original(file, mode, *args, **more)
            with original(file, "rb") as real_one:
                text = real_one.read().decode()
        finally:
            inside.pop()
        text = other_text(path, text, answers == "most")
        return io.BytesIO(text.encode()) if "b" in mode else io.StringIO(text)

    return open


def other_text(path, text, most):
    """What a file of `/proc` would hold on a machine that is idle, or has nothing left."""
    name = os.path.basename(path)
    if name == "loadavg":
        return re.sub(r"\d+\.\d+", "1000.00" if most else "0.00", text)
    if name == "meminfo":
        total = (re.findall(r"MemTotal: +(\d+)", text) or ["0"])[0]
        return re.sub(r"(?m)^(?!MemTotal|SwapTotal)(\w+:) +\d+", r"\g<1> " + (total if most else "0"), text)
    if name == "statm":
        return " ".join(str(int(word) * MOST if most else 1) for word in text.split()) + "\n"
    if path == "/proc/stat":  # the time of the start is whose process it is
        return re.sub(r"(?m)^cpu.*", lambda row: re.sub(r" \d+", " " + str(MOST**2 if most else 1), row[0]), text)
    begin, mark, rest = text.rpartition(")")
    words = rest.split()
    for place in (11, 12, 13, 14, 20, 21):  # times, sizes
        words[place] = str(MOST if most else int(place > 14))  # a process that has just begun has used no time
    return begin + mark + " " + " ".join(words) + "\n"


def hear_variables():
    """Which variables the script's own code reads; the record says which of them are others now."""
    kind = type(os.environ)
    original = kind.__getitem__

    def read(self, name):
        if self is os.environ and is_asked("/os.py", "/_collections_abc.py", "<frozen os>", "<frozen _collections_abc>"):
            tell("variable " + str(name))
        return original(self, name)

    kind.__getitem__ = read


def pass_imports_by():
    """What the import system looks at is let through by the filter."""
    holder = sys.modules["_frozen_importlib_external"]
    passed = types.ModuleType("posix")
    passed.__dict__.update({name: value for name, value in vars(posix).items() if not name.startswith("__")})

    def stat(path):
        if isinstance(path, str) and path.startswith("/"):
            return real["stat"](path, dir_fd=UNWATCHED)
        return real["stat"](path)

    def listdir(path):
        if not (isinstance(path, str) and path.startswith("/")):
            return real["listdir"](path)
        number = real["open"](path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=UNWATCHED)
        try:
            return real["listdir"](number)
        finally:
            real["close"](number)

    def listdir_of_all(path="."):
        """In the place of `os.listdir`: what packages there are is a question of the import system, too."""
        if sys._getframe(1).f_code.co_filename.endswith(("/importlib/metadata/__init__.py", "/pkgutil.py")):
            return listdir(os.path.abspath(path)) if isinstance(path, str) else real["listdir"](path)
        return real["listdir"](path)

    def open_code(path):
        """A compiled module below its package: that the package is read was told by its first file."""
        if not (path.startswith("/") and COMPILED_BELOW.search(path)):
            return real_open_code(path)
        return io.FileIO(real["open"](path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=UNWATCHED))

    real_open_code = holder._io.open_code
    opening_code = types.ModuleType("_io")
    opening_code.__dict__.update({name: value for name, value in vars(holder._io).items() if not name.startswith("__")})
    opening_code.open_code = open_code
    passed.stat, passed.listdir = stat, listdir
    holder._os, holder._io = passed, opening_code
    os.listdir = listdir_of_all
    posixpath.realpath = resolving(posixpath.realpath)
    posixpath.exists = genericpath.exists = finding(genericpath.exists)


def resolving(original):
    """In the place of `realpath`: `inspect` resolves the file of every module, part by part; here each directory once."""
    known = {}

    def real_directory(directory):
        number = real["open"](directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=UNWATCHED)
        try:
            return real["readlink"]("/proc/self/fd/" + str(number), dir_fd=UNWATCHED)
        finally:
            real["close"](number)

    def realpath(filename, **more):
        if more or not isinstance(filename, str) or not sys._getframe(1).f_code.co_filename.endswith("/inspect.py"):
            return original(filename, **more)
        directory, name = posixpath.split(filename)
        if directory not in known:
            try:
                known[directory] = real_directory(directory) if directory.startswith("/") else original(directory)
            except OSError:
                known[directory] = original(directory)
        return posixpath.join(known[directory], name)

    realpath.__doc__ = original.__doc__
    return realpath


def finding(original):
    """In the place of `exists`: `inspect` looks for the source of every module, which is known."""

    def exists(path):
        if not (isinstance(path, str) and path.startswith("/") and sys._getframe(1).f_code.co_filename.endswith("/inspect.py")):
            return original(path)
        try:
            real["stat"](path, dir_fd=UNWATCHED)
        except (OSError, ValueError):
            return False
        return True

    exists.__doc__ = original.__doc__
    return exists
