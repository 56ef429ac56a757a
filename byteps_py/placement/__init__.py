"""Which machine sums what: the formula (shares), the table that follows it (table, packing), plans (plan, models)."""
