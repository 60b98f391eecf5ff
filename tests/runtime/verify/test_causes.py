"""Causes on records made by hand, and on a real port with one fault in its network."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.multimodal_gen.configs.pipeline_configs.base import ImagePipelineConfig
from sglang.multimodal_gen.runtime.verify import causes
from sglang.multimodal_gen.runtime.verify.evidence import Evidence, Failure
from sglang.multimodal_gen.runtime.verify.latent_map import measured_map
from sglang.multimodal_gen.runtime.verify.recorder import Call, Decode, SchedulerStep
from sglang.multimodal_gen.runtime.verify.run_record import RunRecord
from sglang.multimodal_gen.runtime.verify.sensitivity import _order

STEPS, TOKENS = 3, 4


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def calls(*, batched: bool, swapped: bool = False) -> list[Call]:
    """Two branches a step: in two calls, positive first, or in one, negative first."""
    made = []
    for step in range(STEPS):
        rows = [
            {
                "hidden_states": numbers(1, TOKENS, 8, seed=step),
                "timestep": torch.tensor([1.0 - step / STEPS]),
                "encoder_hidden_states": numbers(1, 6, 5, seed=100 + branch),
            }
            for branch in ((1, 0) if swapped else (0, 1))
        ]
        outputs = [numbers(1, TOKENS, 8, seed=200 + step), numbers(1, TOKENS, 8, seed=300 + step)]
        if batched:
            inputs = {name: torch.cat([rows[1][name], rows[0][name]]) for name in rows[0]}
            made.append(Call(inputs, torch.cat(outputs[::-1])))
        else:
            made += [Call(row, output) for row, output in zip(rows, outputs, strict=True)]
    return made


def record(*, batched: bool = False, swapped: bool = False, scale: float = 3.0) -> RunRecord:
    made = calls(batched=batched, swapped=swapped)
    steps = []
    for step in range(STEPS):
        positive = numbers(1, TOKENS, 8, seed=200 + step)
        negative = numbers(1, TOKENS, 8, seed=300 + step)
        guided = negative + scale * (positive - negative)
        steps.append(SchedulerStep(guided, numbers(1, TOKENS, 8, seed=400 + step)))
    order = (1, 0) if batched else (0, 1)
    return RunRecord(calls=made, steps=steps, order=order, guided=True, negative_embeds=True)


def evidence(port: RunRecord, reference: RunRecord, **config: object) -> Evidence:
    pipeline = SimpleNamespace(config=ImagePipelineConfig(), decoder=None)
    return Evidence(reference, port, SimpleNamespace(), pipeline)


def test_branches_of_one_batch_and_of_two_calls_are_the_same():
    one, two = record(batched=True), record()
    for step in (0, 1, -1):
        for a, b in zip(one.branches(step), two.branches(step), strict=True):
            assert torch.equal(a.prediction, b.prediction)
            assert {n: v.tolist() for n, v in a.inputs.items()} == {
                n: v.tolist() for n, v in b.inputs.items()
            }


@pytest.mark.parametrize("batched", [True, False])
def test_the_negative_branch_is_the_one_that_another_negative_prompt_changes(batched):
    base, other = record(batched=batched), record(batched=batched)
    base.order = other.order = (0, 1)
    place = 0 if batched else 1
    inputs = other.calls[0 if batched else place].inputs["encoder_hidden_states"]
    inputs[place if batched else 0] += 1
    assert _order(base, other) == ((1, 0) if batched else (0, 1))


def test_no_cause_where_both_sides_agree():
    same = evidence(record(), record(batched=True))
    for diagnose in (
        causes.missing_negative,
        causes.swapped_branches,
        causes.another_text,
        causes.another_guidance,
        causes.wrong_timesteps,
        causes.packed_decode,
    ):
        assert diagnose(same) is None, diagnose.__name__


def test_branches_that_change_places():
    cause = causes.swapped_branches(evidence(record(swapped=True), record()))
    assert "encoder_hidden_states of prompt and negative prompt change places" in str(cause)


def test_the_guidance_scale_is_found_in_what_the_scheduler_follows():
    cause = causes.another_guidance(evidence(record(scale=2.0), record(batched=True)))
    assert cause.failure is Failure.GUIDANCE
    assert "negative + 2 * (positive - negative), the reference 3" in cause.because


def test_one_forward_where_the_reference_makes_two():
    alone = record()
    alone.calls = alone.calls[::2]
    cause = causes.missing_negative(evidence(alone, record()))
    assert (cause.failure, "only the positive" in cause.because) == (Failure.NEGATIVE, True)


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (lambda t: t * 1000, "1000 times the reference's"),
        (lambda t: 1 - t, "counted from the other end (1 - t)"),
        (lambda t: t.double(), "torch.float64, the reference's torch.float32"),
    ],
)
def test_what_the_denoiser_takes_for_the_time(turn, words):
    port = record()
    for call in port.calls:
        call.inputs["timestep"] = turn(call.inputs["timestep"])
    cause = causes.wrong_timesteps(evidence(port, record()))
    assert cause.failure is Failure.TIMESTEPS
    assert words in cause.because
    assert "timestep=" in cause.because


def text_of(port: RunRecord, change) -> None:
    for call in port.calls:
        call.inputs["encoder_hidden_states"] = change(call.inputs["encoder_hidden_states"])


def test_where_the_text_parts():
    def padding(value):
        return torch.cat((value[:, :4], value[:, 4:] + 1), dim=1)

    for change, words in (
        (padding, "agrees in its first 4 tokens: look at padding and mask"),
        (lambda v: v + 1, "first 0 tokens: look at template, hidden state and norm"),
        (lambda v: v[:, :3], "is [1, 3, 5], the reference's [1, 6, 5]"),
    ):
        port = record()
        text_of(port, change)
        assert words in causes.another_text(evidence(port, record())).because


def decoded(latents: torch.Tensor) -> RunRecord:
    made = record()
    made.steps[-1] = SchedulerStep(made.steps[-1].prediction, numbers(1, 4, 8, seed=9))
    made.decodes = [Decode(latents)]
    made.raw_latent_shape = (1, 2, 4, 4)
    return made


def grid(packed: torch.Tensor) -> torch.Tensor:
    return packed.view(1, 2, 2, 2, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(1, 2, 4, 4)


@pytest.mark.parametrize(
    ("port", "words"),
    [
        ((2.0, 0.0), "the shift is left out"),
        ((2.0, -0.5), "the shift has the wrong sign"),
        ((0.5, 0.5), "the latents are multiplied by the scale"),
        ((2.0, 0.25), "the shift is added before the division"),
        ((3.0, 0.5), "the reference decodes latents / 2 + 0.5, the port latents / 3 + 0.5"),
    ],
)
def test_scale_and_shift_are_found_and_explained(port, words):
    packed = numbers(1, 4, 8, seed=9)
    theirs = decoded(grid(packed / 2 + 0.5))
    ours = decoded(packed / port[0] + port[1])  # still packed: the map is found all the same
    both = evidence(ours, theirs)
    assert measured_map(theirs, both).scale.item() == pytest.approx(2)
    cause = causes.wrong_scale(both)
    assert cause.failure is Failure.SCALE
    assert words in cause.because
    assert "with the reference's numbers the latents agree" in cause.because


def test_scales_by_channel_need_the_ports_unpacking():
    packed = numbers(1, 4, 8, seed=9)
    scale, shift = torch.tensor([2.0, 5.0]), torch.tensor([0.1, -0.3])
    theirs = decoded(grid(packed) / scale[:, None, None] + shift[:, None, None])
    both = evidence(decoded(grid(packed)), theirs)
    found = measured_map(theirs, both)
    torch.testing.assert_close(found.scale.float(), scale)
    torch.testing.assert_close(found.shift.float(), shift)


def test_right_numbers_in_another_order_are_latents_left_packed():
    packed = numbers(1, 4, 8, seed=9)
    cause = causes.packed_decode(
        evidence(decoded(packed.reshape(1, 2, 4, 4)), decoded(grid(packed)))
    )
    assert cause.failure is Failure.PACKED
    assert "in another order" in cause.because
