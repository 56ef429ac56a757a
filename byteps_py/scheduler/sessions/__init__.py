"""The scheduler's sessions with its members, and the journal that lets them survive a restart of the scheduler."""
