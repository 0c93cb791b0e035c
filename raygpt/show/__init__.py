"""Console output, report pages and charts. Imports neither engine."""
