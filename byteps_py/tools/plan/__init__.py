"""Plans for training jobs, by the formulas of the papers (`bps plan`). Pure: no torch.

sizing          the sizes of a mesh, each with its reason
sizing_job      the job, shapes of transformers, the ways to divide the job, and the memory that this needs on the fullest GPU
formulas        closed formulas of models and pipelines
"""
