from pathlib import Path

import pytest
from PIL import Image

from sglang.multimodal_gen.runtime.utils.image_file import read_metadata


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def write(generator, sglang):
    """Runs the command and returns the paths that it printed."""

    def run(*argv: str, prompts: int = 1) -> list[str]:
        outcome = sglang("generate", "--prompt", *["x"] * prompts, "--quiet", "--seed=5", *argv)
        assert outcome.code == 0, outcome.err
        return outcome.out.split("\n")[:-1]

    return run


@pytest.mark.parametrize(
    ("path", "format"),
    [("a.png", "PNG"), ("new/b.JPG", "JPEG"), ("c.jpeg", "JPEG"), ("d.webp", "WEBP")],
)
def test_a_path_with_a_suffix_names_the_file(write, path, format):
    assert write("--output-path", path) == [path]
    with Image.open(path) as image:
        assert image.format == format
    about = read_metadata(path)
    assert about is not None
    assert about.seed == 5


def test_a_name_is_put_into_the_folder(write):
    assert write("--output-path", "there", "--output-file-name", "a.webp") == ["there/a.webp"]
    assert write("--output-file-name", "v1.5") == ["outputs/v1.5.png"]


def test_a_file_is_never_overwritten_unless_asked(write):
    Path("a.png").write_bytes(b"precious")
    assert write("--output-path", "a.png") == ["a-2.png"]
    assert write("--output-path", "a.png") == ["a-3.png"]
    assert Path("a.png").read_bytes() == b"precious"
    assert write("--output-path", "a.png", "--overwrite") == ["a.png"]
    assert Path("a.png").read_bytes() != b"precious"


def test_several_pictures_of_one_name_are_numbered(write):
    argv = ["--output-file-name", "a", "--output-path", "there"]
    paths = ["there/a.png", "there/a-2.png", "there/a-3.png"]
    assert write(*argv, prompts=3) == paths
    assert write(*argv, "--overwrite", prompts=3) == paths
    assert write(*argv) == ["there/a-4.png"]
    assert len(names("there")) == 4


def test_a_folder_may_look_like_a_picture(write):
    Path("folder.png").mkdir()
    (path,) = write("--output-path", "folder.png")
    assert path.startswith("folder.png/")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--output-path", "a.gif"], "cannot write 'a.gif': '.gif' is no image format"),
        (["--output-file-name", "a.tiff"], "cannot write 'a.tiff': '.tiff' is no image format"),
        (
            ["--output-path", "a.png", "--num-outputs-per-prompt", "2"],
            "output_path='a.png': names one file, but 2 pictures are asked for. Give a folder.",
        ),
        (
            ["--output-path", "a.png", "--output-file-name", "b.png"],
            "output_path='a.png': names a file, and --output-file-name another.",
        ),
        (["--output-file-name", "../a.png"], "output_file_name='../a.png': must be a bare file"),
        (["--output-file-name", "/a.png"], "output_file_name='/a.png': must be a bare file name"),
        (["--output-file-name", ".."], "output_file_name='..': must be a bare file name"),
        (["--output-file-name", "."], "output_file_name='.': must be a bare file name"),
        (["--output-file-name", " "], "output_file_name=' ': must be a bare file name"),
        (["--output-file-name", "a\0b"], r"output_file_name='a\x00b': must be a bare file name"),
        (["--output-file-name", "é" * 126], "output_file_name='éééé"),
        (["--output-path", "x" * 300], "cannot use the output folder"),
        (["--output-path", "a\0b"], r"cannot use the output folder 'a\x00b'"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused_before_loading(generator, fails, argv, message):
    assert fails("generate", "--prompt", "x", *argv).startswith(message)
    assert generator.opened == 0
