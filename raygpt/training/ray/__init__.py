"""Training on Ray: everything that uses Ray Train. The rest of `training` does not import Ray."""
