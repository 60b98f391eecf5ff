import pytest

from sglang.multimodal_gen.runtime.platforms.device import DeviceFacts
from sglang.multimodal_gen.runtime.server_args import ServerArgs
from sglang.multimodal_gen.runtime.server_args.resolve import resolve
from sglang.multimodal_gen.runtime.utils.errors import InvalidArgument

CPU = DeviceFacts(cuda_available=False, device_count=0, name="x86_64", memory_bytes=2**34)
GPU = DeviceFacts(cuda_available=True, device_count=2, name="Fast 9000", memory_bytes=80 * 2**30)


@pytest.mark.parametrize(
    ("said", "facts", "device", "precision"),
    [
        ({}, CPU, "cpu", "fp32"),
        ({}, GPU, "cuda", "config"),
        ({"device": "cpu"}, GPU, "cpu", "fp32"),
        ({"device": "cuda"}, GPU, "cuda", "config"),
        ({"precision": "bf16"}, CPU, "cpu", "bf16"),
        ({"precision": "config"}, CPU, "cpu", "config"),
        ({"precision": "fp32"}, GPU, "cuda", "fp32"),
    ],
)
def test_what_was_left_open_is_chosen(said, facts, device, precision):
    resolved = resolve(ServerArgs.from_flat(**said), facts).args
    assert (resolved.platform.device, resolved.model.precision) == (device, precision)


def test_each_choice_is_explained_and_explicit_values_are_not():
    assert resolve(ServerArgs(), CPU).notes == (
        "device cpu: no usable CUDA GPU is visible",
        "precision fp32: the CPU computes bf16 slowly or not at all",
    )
    assert resolve(ServerArgs(), GPU).notes == ("device cuda: Fast 9000, 80 GiB",)
    assert resolve(ServerArgs.from_flat(device="cpu", precision="fp32"), GPU).notes == ()


@pytest.mark.parametrize("facts", [CPU, GPU])
def test_resolving_again_changes_and_says_nothing(facts):
    once = resolve(ServerArgs.from_flat(component_precisions={"vae": "bf16"}), facts)
    again = resolve(once.args, facts)
    assert again.args == once.args
    assert again.notes == ()
    assert once.args.model.component_precisions == {"vae": "bf16"}


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(InvalidArgument, match=r"^device='cuda': no usable CUDA GPU.*--device cpu"):
        resolve(ServerArgs.from_flat(device="cuda"), CPU)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quantization": "fp8"}, "--quantization"),
        ({"num_gpus": 2, "use_fsdp_inference": True}, "--use-fsdp-inference"),
        ({"num_gpus": 2, "tp_size": 2}, "--tp-size"),
        ({"num_gpus": 2, "ulysses_degree": 2}, "--ulysses-degree"),
        ({"backend": "diffusers"}, "backend=diffusers"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_a_model_is_looked_for(said, words):
    with pytest.raises(InvalidArgument, match=words):
        resolve(ServerArgs.from_flat(enable_torch_compile=True, **said), GPU)


def test_a_mode_of_compiling_needs_compiling():
    with pytest.raises(InvalidArgument, match="no effect without --enable-torch-compile"):
        ServerArgs.from_flat(torch_compile_mode="max-autotune-no-cudagraphs")
