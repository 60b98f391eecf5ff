"""UniPC with its coefficients on the host: a step waits for nothing.

Zhao et al., "UniPC: A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models"
(2023). Schedule, prediction types and state are the reference class's, Diffusers'
``UniPCMultistepScheduler``; its two updates copy six numbers to the GPU and solve a small system
there, each of which waits for the whole forward before it, and the GPU then waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers.schedulers import scheduling_unipc_multistep as diffusers_unipc
from torch import Tensor


class Expansion(NamedTuple):
    """``x' = keep * x - drive * m - scale * (what the differences of earlier m's add)``.

    All on the host, in float32 as in the reference: a number on the host goes to the GPU with the
    operation that uses it. ``spacings`` are those of the earlier points (the paper's r), and
    ``matrix`` and ``moments`` are the system whose solution weighs the differences (R and b).
    """

    keep: Tensor
    drive: Tensor
    scale: Tensor
    spacings: list[Tensor]
    matrix: Tensor
    moments: Tensor


class UniPCMultistepScheduler(diffusers_unipc.UniPCMultistepScheduler):
    """The reference's results from operations on the samples alone."""

    def multistep_uni_p_bh_update(
        self,
        model_output: Tensor,
        *args: Any,
        sample: Tensor | None = None,
        order: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The sample at the next timestep, predicted; shapes as ``sample``."""
        if self.solver_p or args or kwargs or sample is None or order is None:
            # Another solver's step, or arguments as before 1.0: the reference knows them.
            theirs: Any = super().multistep_uni_p_bh_update
            return theirs(model_output, *args, sample=sample, order=order, **kwargs)
        parts = self._expansion(self.step_index, self.step_index + 1, order)
        if order <= 2:
            weights = torch.full((order - 1,), 0.5)  # order 2 as the paper simplifies it
        else:
            weights = torch.linalg.solve(parts.matrix[:-1, :-1], parts.moments[:-1])
        return self._advanced(sample, parts, weights.to(sample.dtype), None)

    def multistep_uni_c_bh_update(
        self,
        this_model_output: Tensor,
        *args: Any,
        last_sample: Tensor | None = None,
        this_sample: Tensor | None = None,
        order: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The sample at this timestep, corrected by what the model said of it."""
        if args or kwargs or last_sample is None or order is None:
            theirs: Any = super().multistep_uni_c_bh_update
            samples = {"last_sample": last_sample, "this_sample": this_sample}
            return theirs(this_model_output, *args, **samples, order=order, **kwargs)
        parts = self._expansion(self.step_index - 1, self.step_index, order)
        if order == 1:
            weights = torch.full((1,), 0.5)
        else:
            weights = torch.linalg.solve(parts.matrix, parts.moments)
        return self._advanced(last_sample, parts, weights.to(last_sample.dtype), this_model_output)

    def _expansion(self, origin: int, target: int, order: int) -> Expansion:
        """From the schedule's point ``origin`` to ``target``; earlier points lie before it."""
        alpha_0, sigma_0, lambda_0 = self._at(origin)
        alpha_1, sigma_1, lambda_1 = self._at(target)
        h = lambda_1 - lambda_0
        spacings = [(self._at(origin - i)[2] - lambda_0) / h for i in range(1, order)]
        signed = -h if self.predict_x0 else h
        first = torch.expm1(signed)
        config: Any = self.config
        scale = signed if config.solver_type == "bh1" else first

        moments, phi, factorial = [], first / signed - 1, 1
        for i in range(1, order + 1):
            moments.append(phi * factorial / scale)
            factorial *= i + 1
            phi = phi / signed - 1 / factorial
        points = torch.stack([*spacings, torch.ones(())])
        matrix = torch.stack([points**power for power in range(order)])
        if self.predict_x0:
            keep, amplitude = sigma_1 / sigma_0, alpha_1
        else:
            keep, amplitude = alpha_1 / alpha_0, sigma_1
        return Expansion(
            keep, amplitude * first, amplitude * scale, spacings, matrix, torch.stack(moments)
        )

    def _at(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """alpha, sigma and half the log of the signal-to-noise ratio; the table is on the host."""
        alpha, sigma = self._sigma_to_alpha_sigma_t(self.sigmas[index].cpu())
        return alpha, sigma, torch.log(alpha) - torch.log(sigma)

    def _advanced(
        self, x: Tensor, parts: Expansion, weights: Tensor, correction: Tensor | None
    ) -> Tensor:
        """One update of ``x``; the last weight is the correction's, where there is one."""
        outputs: Any = self.model_outputs
        m: Tensor = outputs[-1]
        earlier: Sequence[Tensor] = [outputs[-(i + 2)] for i in range(len(parts.spacings))]
        moved = parts.keep * x - parts.drive * m
        added: Tensor | None = None
        for weight, spacing, output in zip(weights, parts.spacings, earlier, strict=False):
            difference = weight * ((output - m) / spacing)
            added = difference if added is None else added + difference
        if correction is not None:
            difference = weights[-1] * (correction - m)
            added = difference if added is None else added + difference
        return moved if added is None else (moved - parts.scale * added).to(x.dtype)


EntryClass = UniPCMultistepScheduler
