"""What a run's entries and per-step logs say together: launches, lineage, headline values, what is still open.

`assemble` is pure over values; `read_story` looks at the disk. `status`, `log`, `render` and `report` tell the same story
because they all ask here. Nothing here draws, imports a plotting library, or opens a checkpoint. Names are loaded on first
use: `chronicle note` needs `plain` alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chronicle.story.assemble import Headline, LaunchStory, SavedCheckpoint, Story
    from chronicle.story.matters import Intervention, Matter, Proposed
    from chronicle.story.read import read_story

__all__ = [
    "Headline",
    "Intervention",
    "LaunchStory",
    "Matter",
    "Proposed",
    "SavedCheckpoint",
    "Story",
    "read_story",
]

HOMES = {
    **dict.fromkeys(("Headline", "Story"), "chronicle.story.assemble"),
    **dict.fromkeys(("LaunchStory", "SavedCheckpoint"), "chronicle.story.assemble"),
    **dict.fromkeys(("Intervention", "Matter", "Proposed"), "chronicle.story.matters"),
    "read_story": "chronicle.story.read",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
