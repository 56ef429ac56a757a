"""Gradients: from autograd's hooks to the optimizer's step.

optimizer ─ optimizer_mixin ┬ backward_passes              which gradients a backward pass has computed
                            └ gradient_reducer ─ bucket    which gradients travel together, and their exchange
cross_barrier ─ pending_updates ─ optimizer_mixin
distributed_data_parallel ─ gradient_reducer
adasum_optimizer ─ optimizer_mixin
comm_hook

hosted_optimizer ┬ optimizer_mixin
                 ├ hosted_reducer ┬ gradient_reducer
                 │                ├ hosted_states        the states that services keep of a bucket's gradients
                 │                └ hosted_overflow      sums that are NaN or infinite
                 ├ hosted_rules, hosted_delay, hosted_sparse_rows, hosted_trust_ratios
                 └ hosted_shadow ─ common_record         steps that other machines make as well
hosted_in_backward_optimizer ─ hosted_optimizer, hosted_in_backward
hosted_restore ─ stored_checkpoint, stored_elements, stored_buffers
"""
