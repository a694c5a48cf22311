"""Start the process group of a run, supervise it, and leave no process behind.

    admission    may a launch start now, and under which number
    launching    one launch from `launch.start` to `launch.end`
    supervisor   the loop over processes, signals and output; knows no journal
    processes, containment, orphans   the process tree, and what earlier launches left in it

Nothing here imports torch. Processes are identified by token, cgroup or (pid, start time), not by name.
"""
