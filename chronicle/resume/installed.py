"""Where the standard library and installed packages lie."""

import sys
import sysconfig
from collections.abc import Iterator

__all__ = ["places_of_installed"]


def places_of_installed() -> Iterator[str]:
    """The directories of the standard library and of installed packages."""
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        if path := sysconfig.get_paths().get(name):
            yield path
    yield from (path for path in sys.path if path.rstrip("/").endswith(("site-packages", "dist-packages")))
