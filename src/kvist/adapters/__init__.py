"""Engine types end here: one package for each engine."""
