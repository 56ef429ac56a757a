"""Gradients: from autograd's hooks to the optimizer's step.

optimizer ┬ optimizer_mixin ─ stepper ┬ backward_passes            which gradients a backward pass has computed
          │                           └ gradient_reducer ─ bucket  which gradients travel together, and where sums go
          └ hosted/                                                the communication services make the steps
whole_state                                                        states that lie in pieces, as a state_dict has them
cross_barrier ─ stepper
distributed_data_parallel ─ gradient_reducer
"""
