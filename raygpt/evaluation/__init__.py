"""How good a trained model is: on its own validation text, and on tasks that others publish scores of."""
