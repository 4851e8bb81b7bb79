"""How long a step of a run will take, told before it starts: plain arithmetic over settings, a model and a cluster.

    work (what must be done) / machine (what it can do at most) x coefficients (how much of that is reached) = seconds

`machines` knows the cluster, `lengths` how long completions are, `rollout`, `training` and `switching` the work of
each phase, `coefficients` the few numbers that are not known exactly; `calibration` fits those to a measured run.
`step` puts a step together, `run` a whole run, `layouts` compares the layouts that it could have, `published` compares
with what others measured. The formulas are in docs/planning.md.
"""
