"""Compare fast paths with slow ones, as the laws say: on the machine at hand with `check --laws`,
and in the tests of the laws.
"""
