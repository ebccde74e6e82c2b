"""The command line: `headsplit compare`, `stages`, `bayes`, `sweep`, and `headsplit figure` of each."""
