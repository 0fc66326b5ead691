"""Opens all files of the package: distrusts files that a user gave, and sees that written ones are on the disk."""
