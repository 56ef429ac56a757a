"""``bpslaunch``: what must run on this machine, started, watched and ended together.

    spec     what one process is: a noun that the rest shares
    plan     pure: the environment of one role → the processes of this machine
    cluster  pure: -np, --machines, --servers → the processes of a whole cluster on loopback
    policy   pure: what to do when a process ends, a signal comes or time passes
    build    what this installation can do
    output   prefixed lines and files per process
    guard    nothing outlives the launcher, SIGKILL included
    supervisor  the only part that starts processes and waits

Importing any of it needs the standard library only, so that the launcher starts at once.
"""
