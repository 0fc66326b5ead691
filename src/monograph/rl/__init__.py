"""Reinforcement learning: answers drawn from the weights in training, their rewards, and the loss
that follows.
"""
