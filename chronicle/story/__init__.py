"""What a run's entries and per-step logs say together: launches, lineage, headline values, what is still open.

`assemble` is pure over values; `read_story` looks at the disk. `status`, `log`, `render` and `report` tell the same story
because they all ask here. Nothing here draws, imports a plotting library, or opens a checkpoint.
"""

from chronicle.story.assemble import Headline, Story, assemble
from chronicle.story.launches import LaunchStory, SavedCheckpoint
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
    "assemble",
    "read_story",
]
