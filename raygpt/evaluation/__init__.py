"""Evaluates a trained model: on its validation text, and on published tasks."""
