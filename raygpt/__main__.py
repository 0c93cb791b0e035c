"""`python -m raygpt` is `raygpt`."""

from raygpt.cli import main

main()
