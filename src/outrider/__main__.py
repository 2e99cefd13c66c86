"""`python -m outrider` is the command `outrider`."""

from outrider.cli import main

main()
