"""The laws: what each compares and with which bound, and `check --laws`, which compares a small
model's paths on the machine at hand. The tests of the laws use the same comparisons.
"""
