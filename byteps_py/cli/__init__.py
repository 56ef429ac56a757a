"""`bps`, the command for everything except starting processes, which `bpslaunch` does."""
