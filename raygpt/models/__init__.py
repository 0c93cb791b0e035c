"""A model's description, shared by both engines: parameters by name, axes, role and initial values; FLOPs.

Imports config and NumPy only. An engine uses a `Description` and has no list of parameters of its own.
"""

from raygpt.models.description import Description, describe, value_table_of
from raygpt.models.parameter import InitialValues, Parameter

__all__ = ["Description", "InitialValues", "Parameter", "describe", "value_table_of"]
