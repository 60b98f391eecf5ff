from __future__ import annotations

import warnings

import pytest

from parity.tiny_checkpoints import flux_dev
from parity.tiny_pipelines import write_dit, write_unconditional, write_unet

WRITERS = {
    "unet": write_unet,
    "unet-ancestral": lambda folder: write_unet(folder, ancestral=True),
    "unet-img2img": lambda folder: write_unet(folder, img2img=True),
    "dit": write_dit,
    "unconditional": write_unconditional,
    "native": lambda folder: flux_dev().write(folder),
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a tiny pipeline by name, written when first asked for."""
    root = tmp_path_factory.mktemp("pipelines")

    def folder(name):
        path = root / name
        if not path.exists():
            with warnings.catch_warnings():  # the libraries' own, about each other
                warnings.simplefilter("ignore")
                WRITERS[name](path)
        return path

    return folder
