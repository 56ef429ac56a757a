"""What a training run is beside its weights: where its data are, its random states, schedulers. ``RunState``.

run_state ─► loader_position, trainjob_progress
"""
