"""Trainer of the bundled miniature model: scenes, grader, training and evaluation."""
