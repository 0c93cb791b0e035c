"""Tools for tests of raygpt, and of what is built on it."""
