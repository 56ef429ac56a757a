"""Which machine sums what: optimal shares (shares, link_optimum), the table that follows them (placement_table,
packing), and plans for whole models (placement_plan, models)."""
