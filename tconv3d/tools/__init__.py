"""Holds the command line: the demonstration, the reference tasks, the benchmarks and the exports."""
