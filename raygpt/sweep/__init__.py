"""Many runs with one question: which values of a recipe are best (`raygpt sweep`), and which loss a larger model will
come to (`raygpt scaling`). Each run is an ordinary run directory, in one folder with `trials.json`.
"""
