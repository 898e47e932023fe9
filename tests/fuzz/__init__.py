"""A search for layers, tensors and calls that the kernels get wrong: `make fuzz`.

    draw.py      a seed and a number -> a layer and a few cases of it
    case.py      what a case is, and the line of text that repeats it
    guards.py    tensors between guard pages (emulator) or guard bytes (GPU)
    reference.py the expected values in float64, and how far from them a result may be
    run.py       one case: run, compared, its surroundings checked
    workers.py   processes that run cases, so that a crash or a hang is a finding and not the end
    shrink.py    a failing case -> the plainest one that still fails
    search.py    many layers on many workers, and the summary

`tests` must be on the module path: `PYTHONPATH=.:tests python -m fuzz --help`.
"""
