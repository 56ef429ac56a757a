"""``bpslaunch``: starts, watches and ends the processes that this machine runs.

    command_line        the options of ``bpslaunch``
    process_plan        pure: the environment, or -np, --machines and --servers → the processes of this machine
    supervision_policy  pure: what to do when a process ends, a signal arrives or time passes
    supervisor          the only part that starts processes and waits for them
    hosts               pure: lists of hosts, and hostfiles
    remote_hosts        bpslaunch -H: asks all hosts, starts a launcher on each over ssh, and is that launcher
    host_link           what these launchers say to each other
    joining             machines that join a job which runs: a spare machine, servers that a job of SLURM's lends
    process_output      prefixed lines, and files per process
    process_guard       no process outlives the launcher, not even after SIGKILL
    installation        what this machine and this installation can do

The messages of processes to the launcher: launch_protocol.py. All modules import only the standard library and modules
that do so too: the launcher starts at once.
"""
