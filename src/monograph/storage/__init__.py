"""Open all files of the package: distrust files that a user gave, and make sure that written files
are on the disk.
"""
