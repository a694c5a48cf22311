"""accelerate #4283: the random states are missing, which Accelerate logs at a level that nobody reads."""

from tests.reproductions.case import Answer, Case, planted

bare, guarded = planted("accelerate", "random_states_0.pkl missing")
CASE = Case(
    row=26,
    source="accelerate #4283, #1563; pytorch #126952",
    pain="random states lost, stray files beside the state, flipped bits",
    without="the resume goes on with other random numbers",
    answer=Answer.REFUSED,
    says=("before step 1",),
    bare=bare,
    guarded=guarded,
)
