"""`python -m headsplit` is the command `headsplit`."""

from headsplit.cli import main

if __name__ == "__main__":
    main()
