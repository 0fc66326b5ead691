"""Train many runs that differ in a few settings, and compare their results.

The files, in the order of a sweep: `spec` defines its members, `folder` keeps it on disk, `concurrency`
decides how many members train at once, `cohort` trains them, and `results` and `advice` compare them.
"""
