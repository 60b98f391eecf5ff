import torch
from diffusers.models.attention import FeedForward as Reference

from sglang.multimodal_gen.runtime.layers.feed_forward import FeedForward


def test_equals_the_reference_under_its_names():
    layer, reference = FeedForward(8), Reference(8, 8, activation_fn="gelu-approximate")
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(layer(x), reference(x))
