"""Measure a model: bits per byte of text, log-probabilities of continuations, answers to multiple
choice.
"""

from monograph.evaluation.comparison import compare as compare
from monograph.evaluation.text import Evaluation as Evaluation
from monograph.evaluation.text import evaluate as evaluate
