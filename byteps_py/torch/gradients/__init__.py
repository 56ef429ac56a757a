"""Gradients: from autograd's hooks to the optimizer's step.

optimizer ─ hooks ┬ passes            which gradients a backward pass has computed
                  └ buckets ─ bucket  which gradients travel together, their way out and back
cross_barrier ─ pending_updates ─ hooks;  distributed_data_parallel ─ buckets;  adasum_optimizer;  comm_hook
"""
