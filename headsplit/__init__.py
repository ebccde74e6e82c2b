"""The command line: `headsplit compare`, `headsplit figure`."""
