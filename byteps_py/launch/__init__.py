"""``bpslaunch``: starts, watches and ends the processes that this machine runs.

    process_spec        what one process is: the noun that the rest shares
    command_line        the options of ``bpslaunch``
    machine_plan        pure: the environment of one role → the processes of this machine
    cluster_plan        pure: -np, --machines, --servers → the processes of a whole cluster on loopback
    supervision_policy  pure: what to do when a process ends, a signal arrives or time passes
    supervisor          the only part that starts processes and waits for them
    process_output      prefixed lines, and files per process
    process_guard       no process outlives the launcher, not even after SIGKILL
    failure_report      what the launcher shows of a job that failed
    installation        what this machine and this installation can do

All of it imports only the standard library and modules that do so too: the launcher starts at once.
"""
