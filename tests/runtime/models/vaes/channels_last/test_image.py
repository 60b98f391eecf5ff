"""``AutoencoderKL`` on channels-last maps."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL as Reference
from torch import nn

from vae_cases import noise, relative, tiny_config, tiny_vae


def test_pictures_are_diffusers_and_stay_channels_last_throughout():
    vae = tiny_vae()
    reference = Reference(**tiny_config()).eval().requires_grad_(False)
    reference.load_state_dict(vae.state_dict())
    vae.wants_channels_last = True
    seen = []
    for module in vae.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _m, _x, out: seen.append(out))
    z, x = noise(2, 4, 9, 5), noise(2, 3, 72, 40)
    with torch.inference_mode():
        decoded, moments = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
        assert len(seen) > 20
        assert all(out.is_contiguous(memory_format=torch.channels_last) for out in seen)
        assert decoded.is_contiguous()
        assert vae._channels_last.calls > 20
        assert relative(decoded, reference.decode(z).sample) < 2e-6
        assert relative(moments, reference.encode(x).latent_dist.parameters) < 2e-6
        vae.wants_channels_last = None
        assert torch.equal(vae.decode(z).sample, reference.decode(z).sample)
