import pytest
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
from hypothesis import given
from hypothesis import strategies as st

from sglang.multimodal_gen.configs.picture_area import PictureArea


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_sizes_are_the_references_where_it_has_one(width, height):
    size = PictureArea(1024 * 1024).size_for(width, height)
    expected = calculate_dimensions(1024 * 1024, width / height)
    assert size == tuple(max(32, edge) for edge in expected)


@pytest.mark.parametrize(
    ("picture", "size"), [((90, 50), (1376, 768)), ((40, 61), (832, 1280)), ((7, 7), (1024, 1024))]
)
def test_a_picture_keeps_its_shape(picture, size):
    assert PictureArea(1024 * 1024).size_for(*picture) == size


def test_edges_are_never_nothing():
    assert PictureArea(64 * 64).size_for(10_000, 1)[1] == 32
