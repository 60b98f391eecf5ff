"""``python -m examples.train_demo_model``: the trainer.

A file of this name on purpose: worker processes of the pool do not import it again, and so start
without torch.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from examples.train_demo_model.train import main

    sys.exit(main())
