"""The story of a run, from its journal and per-step logs: launches, lineage, headline values, open matters.

`assemble` computes it from values, `read_story` reads the disk. `status`, `log`, `render` and `report` show the same facts
because all of them start from this story. Names are imported on first use, because `chronicle note` needs only `plain`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chronicle.story.assemble import Headline, LaunchStory, SavedCheckpoint, Story
    from chronicle.story.matters import Intervention, Matter, OpenProposal
    from chronicle.story.read import read_story

__all__ = [
    "Headline",
    "Intervention",
    "LaunchStory",
    "Matter",
    "OpenProposal",
    "SavedCheckpoint",
    "Story",
    "read_story",
]

HOMES = {
    **dict.fromkeys(("Headline", "Story"), "chronicle.story.assemble"),
    **dict.fromkeys(("LaunchStory", "SavedCheckpoint"), "chronicle.story.assemble"),
    **dict.fromkeys(("Intervention", "Matter", "OpenProposal"), "chronicle.story.matters"),
    "read_story": "chronicle.story.read",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
