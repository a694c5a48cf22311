"""Which names are strays: files or directories that a loader could take for state and should not.

Pure. Two rules: a name that some tool leaves behind (backups, editor files, NFS and desktop leftovers), and a name
that contains a state file's name without being it. Seed exp9: `custom_checkpoint_0.pkl.orig`; `.bak`, `~` and copies
were reproduced with Accelerate 0.20 (accelerate #1563, PR #1571: "different software will use a different extension").
"""

from __future__ import annotations

import re

_LEFTOVERS = re.compile(
    r"""
      \.DS_Store | \.nfs[0-9a-fA-F]+ | Thumbs\.db | desktop\.ini | \._.+          # desktops, NFS
    | .+~ | \.\#.+ | \#.+\# | \.?.+\.sw[a-px]                                     # editors
    | .+[._-](?:orig|bak|backup|old|save|saved|copy|keep|tmp|temp|part|partial|new|broken|bad)[._-]?\d*
    | .+[ ]\(copy\)(?:.*) | .+[ ]copy(?:[ ]\d+)?(?:\..*)? | .+[ ]-[ ][Cc]opy.* | [Cc]opy[ ]of[ ].+ | .+[ ]\(\d+\).*
    | (?:tmp|temp|backup|old|orig)(?:[._-].*)?
    """,
    re.VERBOSE,
)


def is_leftover(name: str) -> bool:
    """Whether a tool or a person leaves such a name behind: backups, swap files, copies."""
    return _LEFTOVERS.fullmatch(name) is not None


def is_lookalike(name: str, stems: re.Pattern[str]) -> bool:
    """Whether `name` contains a state file's stem; ask only for names that are no state file."""
    return stems.search(name) is not None
