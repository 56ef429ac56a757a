"""Gradients: from autograd's hooks to the optimizer's step.

optimizer ─ optimizer_mixin ┬ backward_passes              which gradients a backward pass has computed
                            └ gradient_reducer ─ bucket    which gradients travel together, and their exchange
cross_barrier ─ pending_updates ─ optimizer_mixin
distributed_data_parallel ─ gradient_reducer
adasum_optimizer ─ optimizer_mixin
comm_hook

hosted/: an optimizer whose steps the communication services make
"""
