"""Searches for layers, tensors and calls that the kernels get wrong: `make fuzz`.

    draw.py      draws a layer and a few cases of it from a seed and a number
    case.py      defines a case, and the line of text that repeats it
    families.py  counts the plans of each kernel family, and lifts the limits of some
    guards.py    places tensors between guard pages (emulator) or guard bytes (GPU)
    reference.py computes the expected values in float64, and the allowed errors
    run.py       runs one case, compares its results, and checks the guards
    workers.py   runs cases in processes, so that a crash or a hang is a failure like any other
    shrink.py    reduces a failing case to the simplest one that still fails
    search.py    runs many layers on many workers, and makes the summary

`tests` must be on the module path: `PYTHONPATH=.:tests python -m fuzz --help`.
"""
