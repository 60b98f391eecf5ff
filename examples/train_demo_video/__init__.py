"""Trains the bundled miniature that makes clips of moving shapes; see README.md."""
