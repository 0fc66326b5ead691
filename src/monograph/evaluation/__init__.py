"""Measures a model: bits per byte of text, log-probabilities of continuations, answers to multiple choice."""

from __future__ import annotations

from monograph.evaluation.choices import Accuracy as Accuracy
from monograph.evaluation.choices import Continuation as Continuation
from monograph.evaluation.choices import choose as choose
from monograph.evaluation.choices import score as score
from monograph.evaluation.comparison import compare as compare
from monograph.evaluation.text import Evaluation as Evaluation
from monograph.evaluation.text import evaluate as evaluate
from monograph.evaluation.text import evaluate_members as evaluate_members
