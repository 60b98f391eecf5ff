"""``python -m examples.train_demo_video``: the trainer."""

from __future__ import annotations

import sys

from examples.train_demo_video.train import main

sys.exit(main())
