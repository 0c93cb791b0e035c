"""What a run will need before it is begun: memory, time, cost and loss, on hardware that need not be here.

Imports config, models and NumPy; neither Ray nor an engine. `training` cuts its batches by the same numbers.
"""
