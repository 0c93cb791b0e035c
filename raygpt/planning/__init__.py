"""What a run will need before it is begun: memory, time, cost and loss, on hardware that need not be here.

Imports neither Ray, nor JAX and PyTorch unless the compiler is asked. `training` cuts its batches by the same numbers.
"""
