"""pytorch #65342: the scheduler is built after the optimizer was loaded, and the rate begins anew."""

from tests.reproductions.case import Answer, Case, planted

bare, guarded = planted("torch", "scheduler built after the load")
CASE = Case(
    row=8,
    source="pytorch #65342, #60265; lightning #4655; slime PR #1547",
    pain="a scheduler that is built after the load, stepped twice or off by one",
    without="training goes on with another learning rate and says nothing",
    answer=Answer.REFUSED,
    says=("before step 1",),
    bare=bare,
    guarded=guarded,
)
