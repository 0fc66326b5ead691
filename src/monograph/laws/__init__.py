"""Compare fast paths with slow ones, as the laws of docs/laws.md demand: on the machine at hand with
`monograph check --laws`, and in the tests of the laws.
"""
