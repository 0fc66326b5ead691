"""`python -m monograph` is the command `monograph`."""

from monograph.cli import main

main()
