import torch
from diffusers.models.embeddings import TimestepEmbedding, Timesteps

from sglang.multimodal_gen.runtime.layers.embeddings import EmbeddingMLP, sinusoid


def test_sinusoid_equals_the_reference():
    values = torch.tensor([0.0, 1.0, 348.4871, 1000.0, 3504.0])
    reference = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)(values)
    torch.testing.assert_close(sinusoid(values), reference)


def test_a_scale_inside_the_sinusoid_equals_the_references():
    values = torch.tensor([0.0, 0.02, 0.743626, 1.0])
    reference = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0, scale=1000)(values)
    assert torch.equal(sinusoid(values, scale=1000.0), reference)


def test_the_mlp_takes_the_references_weights():
    mlp, reference = EmbeddingMLP(256, 16), TimestepEmbedding(256, 16)
    mlp.load_state_dict(reference.state_dict())
    x = torch.randn(2, 256)
    torch.testing.assert_close(mlp(x), reference(x))
