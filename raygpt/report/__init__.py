"""Pictures made from a run directory. Imports neither engine."""
