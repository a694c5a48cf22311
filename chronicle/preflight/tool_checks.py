"""What DeepSpeed builds when it is first used: a C++ compiler and ninja must be there, or it ends in a traceback much later.

On a CPU it builds `shm_comm` at every first use (deepspeed/comm/torch.py); on a GPU what is built depends on the
configuration and on what was built at installation, so that a missing tool is only a warning there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence

from chronicle.preflight.answers import Answer
from chronicle.preflight.results import CheckResult

__all__ = ["check_build_tools"]

DEEPSPEED = re.compile(r"(?:^|[/_=-])(?:deepspeed|zero-?[123])\b", re.IGNORECASE)


def check_build_tools(command: Sequence[str], environ: Mapping[str, str]) -> CheckResult:
    """PF29 before a launch: tools that the launcher's words call for. Unknown where they call for none."""
    answer = Answer("PF29", "requested flags")
    named = next((word for word in command if DEEPSPEED.search(word)), None)
    if named is None:
        return answer.unknown("no word of the launcher calls for a build")
    path = environ.get("PATH")
    compilers = (environ.get("CXX") or "c++", "g++")
    missing = [] if any(shutil.which(name, path=path) for name in compilers) else ["a C++ compiler"]
    missing += [] if shutil.which("ninja", path=path) else ["ninja"]
    read = f"`{named}`, the PATH"
    if not missing:
        return answer.passed("a C++ compiler and ninja are there for what DeepSpeed builds", read)
    text = f"DeepSpeed builds parts of itself when it is first used, and {' and '.join(missing)} is not on the PATH"
    remedy = "install g++ and `pip install ninja`, and put both on the PATH (activate the environment)"
    on_cpu = environ.get("DS_ACCELERATOR") == "cpu" or shutil.which("nvidia-smi", path=path) is None
    return (answer.failed if on_cpu else answer.warned)(text, read, remedy)
