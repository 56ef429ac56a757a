"""Members' links to the scheduler, which outlive connections, and the journal by which they outlive the scheduler."""
