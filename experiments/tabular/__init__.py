"""Parts of `experiments.tabular_smida`: the game, the jobs on it, and how their findings read."""
