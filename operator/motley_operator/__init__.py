"""The operator: observe -> plan -> apply. `planner`, `manifests` and `status` are pure; `observe` and `apply` do the I/O."""
