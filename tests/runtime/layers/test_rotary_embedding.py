import pytest
import torch

from sglang.multimodal_gen.runtime.layers.rotary_embedding import axial_rotary, rotate_pairs


def ids(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def test_position_zero_does_not_rotate():
    rotary = axial_rotary(ids((0, 0)), (4, 4), 10_000.0)
    x = torch.randn(1, 1, 2, 8)
    assert torch.equal(rotate_pairs(x, rotary), x)


def test_each_axis_turns_its_own_channels_by_its_own_position():
    rotary = axial_rotary(ids((0, 3)), (4, 4), 10_000.0)
    x = torch.ones(1, 1, 1, 8)
    out = rotate_pairs(x, rotary)[0, 0, 0]
    assert torch.equal(out[:4], torch.ones(4))
    for pair, frequency in enumerate((1.0, 10_000.0**-0.5)):
        angle = torch.tensor(3 * frequency, dtype=torch.float64)
        expected = torch.stack((angle.cos() - angle.sin(), angle.cos() + angle.sin())).float()
        torch.testing.assert_close(out[4 + 2 * pair : 6 + 2 * pair], expected)


def test_scores_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8).unbind()

    def score(a, b):
        turned_q = rotate_pairs(q, axial_rotary(ids((a, a)), (4, 4), 100.0))
        turned_k = rotate_pairs(k, axial_rotary(ids((b, b)), (4, 4), 100.0))
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(2, 5), score(7, 10))
    assert not torch.isclose(score(2, 5), score(2, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compilers_form_equals_the_eager_one(dtype, monkeypatch):
    rotary = axial_rotary(torch.randint(0, 50, (6, 2)).float(), (4, 4), 10_000.0)
    x = torch.randn(2, 6, 3, 8).to(dtype)
    eager = rotate_pairs(x, rotary)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(rotate_pairs(x, rotary), eager)
