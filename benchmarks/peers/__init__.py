"""The same Llama, the same weights and the same tokens through several trainers, turn by turn.

Files:

    spec.py      what every system is given: model shape, grid, recipe, folders   (no torch)
    inputs.py    the weights and the tokens, from a seed
    systems/     one row per system: the command of a rank, and how to read its records
    launch.py    one process group: start, watch memory, time limit, no leftovers (no torch)
    worker.py    the step loop of a rank, for the systems that have none of their own
    compare.py   do the curves agree?                                             (no torch)
    report.py    rounds -> JSON and a markdown table                              (no torch)
    profiled.py  one step of any system's rank under torch.profiler
"""
