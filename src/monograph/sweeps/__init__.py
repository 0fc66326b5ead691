"""Train many runs that differ in a few settings: define them, choose how many train at once,
compare their results.
"""
