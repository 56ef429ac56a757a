"""Plans for training jobs, by the formulas of the papers (`bps plan`). Pure: no torch.

sizing          the sizes of a mesh, each with its reason
sizing_job      the job, transformers, the ways to divide it, and the memory that a division needs on its fullest GPU
formulas        closed formulas of models and pipelines
"""
