"""Manifests, batch scripts and images that run a recipe on clusters.

Only text is made here: nothing is sent anywhere, and neither ray, jax nor torch is imported.
"""
