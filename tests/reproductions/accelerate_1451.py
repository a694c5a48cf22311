"""accelerate #1451: `skip_first_batches` is applied in every epoch, not only in the one that is resumed."""

from tests.reproductions.case import Answer, Case, planted

bare, guarded = planted("accelerate", "skip_first_batches applied in every epoch")
CASE = Case(
    row=14,
    source="accelerate #1451; open-instruct PR #681",
    pain="after a resume every later epoch misses the same batches",
    without="the epochs are shorter for ever and nothing says so",
    answer=Answer.STOPPED,
    says=("at a later step",),
    bare=bare,
    guarded=guarded,
)
