"""Training on Ray: all that knows Ray Train. The rest of `training` imports no Ray."""
