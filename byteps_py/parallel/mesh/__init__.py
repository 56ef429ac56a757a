"""The mesh of ranks: tensor, context, pipeline and data dimensions (device_mesh, mesh_layout), and how large each
should be (sizing, formulas, model_shape). Only device_mesh needs torch."""
