"""The command line: demo, reference tasks, benchmarks and exports."""
