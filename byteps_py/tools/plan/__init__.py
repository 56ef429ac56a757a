"""Plans for training jobs, by the formulas of the papers (`bps plan`). Pure, but for the last two: no torch.

sizing          the sizes of a mesh, each with its reason
sizing_job      the job, transformers, the ways to divide it, and the memory that a division needs on its fullest GPU
formulas        closed formulas of models and pipelines
step_table      tables of measured steps, and the layouts in their rows
step_time       the time of a step, from shapes, the sizes of a mesh, and constants of the hardware
cluster         the cluster that a plan is for: from a file, or from `bps doctor`, a running job and a measurement
layout_cost     memory and time of a layout
layout_plan     all layouts of a job, the fastest ones that fit, and why
model_costs     what layers and operators of a traced model cost, its shape as a decoder, and where to cut it
calibration     these constants, and what they leave, fitted to measured steps
operators       a division of its own for each operator (FlexFlow)
module_trace    what a module of PyTorch costs, on the meta device
trace_recorder  counts its operators, and what autograd keeps
"""
