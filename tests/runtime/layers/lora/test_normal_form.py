import pytest
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from sglang.multimodal_gen.runtime.layers.lora.adapted_module import AdaptedModule
from sglang.multimodal_gen.runtime.layers.lora.low_rank import Term
from sglang.multimodal_gen.runtime.layers.lora.module_index import ModuleIndex
from sglang.multimodal_gen.runtime.layers.lora.normal_form import (
    AdapterConfig,
    to_normal_form,
)
from sglang.multimodal_gen.runtime.utils.errors import CheckpointError


def component():
    return ModuleIndex(nn.ModuleDict({"q": nn.Linear(4, 6), "k": nn.Linear(4, 2)}))


COMPONENTS = {"transformer": component(), "transformer_2": component(), "text_encoder": component()}


def pair(prefix, rank=2, width=4, rows=6):
    return {
        f"{prefix}.lora_A.weight": torch.randn(rank, width),
        f"{prefix}.lora_B.weight": torch.randn(rows, rank),
    }


def normal(tensors, **configs):
    return to_normal_form(tensors, COMPONENTS, configs, "file")


def test_a_name_without_component_means_every_denoiser():
    for style in ("", "diffusion_model.", "base_model.model."):
        assert set(normal(pair(style + "q")).layers) == {"transformer", "transformer_2"}


def test_a_name_with_a_component_means_that_one():
    assert set(normal(pair("transformer.q")).layers) == {"transformer"}
    assert set(normal(pair("transformer_2.q")).layers) == {"transformer_2"}
    assert set(normal(pair("text_encoder.q")).layers) == {"text_encoder"}


def test_scaling_comes_from_the_key_then_the_configuration_then_is_one():
    tensors = pair("q") | pair("k", rank=4, rows=2)
    config = AdapterConfig("file metadata", 6.0, {"k": 8.0})

    def scalings(tensors, **configs):
        form = normal(tensors, **configs)
        layers = form.layers["transformer"]
        return (layers["q"].scaling, layers["k"].scaling), form.alpha_sources

    assert scalings(tensors) == ((1.0, 1.0), ("none",))
    assert scalings(tensors, transformer=config) == ((3.0, 2.0), ("file metadata",))
    keyed = tensors | {"q.alpha": torch.tensor(1.0)}
    assert scalings(keyed, transformer=config) == ((0.5, 2.0), ("alpha keys", "file metadata"))
    stabilized = AdapterConfig("adapter_config.json", 8.0, rank_stabilized=True)
    assert scalings(tensors, **{"": stabilized})[0] == pytest.approx((8 / 2**0.5, 4.0))


def test_an_alpha_of_zero_is_a_value():
    assert (
        normal(pair("q") | {"q.alpha": torch.tensor(0.0)}).layers["transformer"]["q"].scaling == 0
    )


def test_leftovers_are_listed_and_the_rest_is_used():
    tensors = pair("q") | pair("v") | pair("text_encoder_2.q")
    tensors |= {"q.lora_B.bias": torch.zeros(6), "k.lora_A.weight": torch.randn(2, 4)}
    tensors |= {"x.alpha": torch.tensor(1.0), "q.diff_b": torch.zeros(6)}
    form = normal(tensors)
    assert list(form.layers["transformer"]) == ["q"]
    assert form.matched == ("q.lora_A.weight", "q.lora_B.weight")
    assert form.unsupported == ("k.lora_A.weight", "q.diff_b", "q.lora_B.bias")
    assert form.unmatched == (
        "text_encoder_2.q.lora_A.weight",
        "text_encoder_2.q.lora_B.weight",
        "v.lora_A.weight",
        "v.lora_B.weight",
        "x.alpha",
    )


def test_convolutions_are_listed():
    tensors = pair("q") | {
        "k.lora_down.weight": torch.zeros(2, 4, 3, 3),
        "k.lora_up.weight": torch.zeros(2, 2, 1, 1),
    }
    assert normal(tensors).unsupported == ("k.lora_down.weight", "k.lora_up.weight")


@pytest.mark.parametrize("sizes", [{"width": 5}, {"rows": 7}])
def test_another_models_shapes_are_refused(sizes):
    with pytest.raises(CheckpointError, match=r"\[6, 4\]. The adapter was made for another model"):
        normal(pair("q", **sizes))


def test_one_module_changed_twice_is_refused():
    with pytest.raises(CheckpointError, match="another key of the file changes too"):
        normal(pair("q") | pair("text_model.q"))
    with pytest.raises(CheckpointError, match="say the same thing"):
        normal(pair("q") | pair("diffusion_model.q"))


def test_values_that_are_no_numbers_are_refused():
    tensors = pair("q")
    tensors["q.lora_B.weight"][1, 1] = torch.nan
    with pytest.raises(CheckpointError, match=r"'q.lora_B.weight' holds NaN"):
        normal(tensors)


class Denoiser(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """What Diffusers can put adapters on."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 6)

    def forward(self, x):
        return self.q(x)


@pytest.mark.parametrize(
    "named", [["transformer"], ["transformer_2"], ["transformer", "transformer_2"]]
)
def test_two_denoisers_compute_what_diffusers_makes_of_the_file(named):
    torch.manual_seed(3)
    models = {name: Denoiser() for name in ("transformer", "transformer_2")}
    tensors = {}
    for name in named:
        tensors |= pair(f"{name}.q")
    x = torch.randn(5, 4)
    base = {name: model(x) for name, model in models.items()}
    form = to_normal_form(tensors, {n: ModuleIndex(m) for n, m in models.items()}, {}, "file")
    ours = {}
    for name, model in models.items():
        adapted = AdaptedModule(model)
        layers = form.layers.get(name, {})
        adapted.run_live({path: [Term(factors, 1.0)] for path, factors in layers.items()})
        ours[name] = model(x)
        adapted.clear()
        if name in named:
            model.load_lora_adapter(dict(tensors), prefix=name)
        torch.testing.assert_close(ours[name], model(x))
        assert torch.equal(ours[name], base[name]) == (name not in named)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_alpha_that_is_no_number_is_refused(value):
    with pytest.raises(CheckpointError, match=r"'q.alpha' holds NaN or infinity"):
        normal(pair("q") | {"q.alpha": torch.tensor(value)})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool])
def test_factors_of_other_kinds_are_refused(dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in pair("q").items()}
    with pytest.raises(CheckpointError, match=r"'q.lora_A.weight' is (complex64|bool)"):
        normal(tensors)


def test_eight_bit_factors_are_taken_as_the_numbers_that_they_are():
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in pair("q").items()}
    factors = normal(tensors).layers["transformer"]["q"]
    assert torch.equal(factors.down, tensors["q.lora_A.weight"].float())
    assert factors.norm() > 0


@pytest.mark.parametrize("alpha", [1e38, -1e38])
def test_a_change_that_no_weight_can_hold_is_refused_by_its_key(alpha):
    tensors = {name: 10 * tensor for name, tensor in pair("q").items()}
    with pytest.raises(CheckpointError, match=r"'q.alpha' makes a change of size .*float32 cannot"):
        normal(tensors | {"q.alpha": torch.tensor(alpha)})
    huge = {name: tensor * 1e30 for name, tensor in pair("q").items()}
    with pytest.raises(CheckpointError, match=r"'q.lora_B.weight' makes a change"):
        normal(huge)


def test_why_a_pair_is_not_applied_is_kept():
    low, high = torch.ones(2, 4), torch.ones(6, 3)
    cases = {
        "has no lora_B": {"q.lora_A.weight": low},
        "has no lora_A": {"q.lora_B.weight": high},
        "has rank 2, and 'q.lora_B.weight' rank 3": {
            "q.lora_A.weight": low,
            "q.lora_B.weight": high,
        },
        "has rank 0": {"q.lora_A.weight": low[:0], "q.lora_B.weight": high[:, :0]},
        "is no matrix, but of shape [2, 4, 1, 1]": {
            "q.lora_A.weight": low[..., None, None],
            "q.lora_B.weight": high[:, :2],
        },
        "is not one number": pair("q") | {"q.alpha": torch.ones(2)},
    }
    for reason, tensors in cases.items():
        form = normal(tensors)
        assert not form.layers
        ((name, said),) = form.reasons.items()
        assert name in tensors
        assert reason in said
