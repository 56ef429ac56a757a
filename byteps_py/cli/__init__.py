"""`bps`, the one command for everything but starting processes (that is `bpslaunch`)."""
