"""The commands, each in its own file that reads from top to bottom. No arithmetic of training is
here.
"""
