"""The trainer: tokenizer, autoencoder, pool, text, denoiser; in pieces that resume one another.

One command (see README.md): ``python -m examples.train_demo_video --out DIR --state-dir DIR``.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.utils import logging as diffusers_logging

from examples.train_demo_model.checkpoint import pack_folder, unpack_archive
from examples.train_demo_model.clock import Clock, Log
from examples.train_demo_model.dit import DIT_SCHEDULE, TEXT_SCHEDULE, train_stage
from examples.train_demo_model.engine import CPU_MODES, GPU_MODES, Engine, Mode, Schedule
from examples.train_demo_model.models import count_parameters
from examples.train_demo_model.render import palette_on
from examples.train_demo_model.sampling import Score, Settings
from examples.train_demo_video.checkpoint import LIMIT_BYTES, read_weights, write_checkpoint
from examples.train_demo_video.clips import held_out_prompts
from examples.train_demo_video.grade import grade
from examples.train_demo_video.lessons import (
    Pool,
    Pupil,
    build_pool,
    dit_draw,
    dit_step,
    is_matrix,
    normalise,
    text_draw,
    text_step,
    vae_draw,
    vae_step,
)
from examples.train_demo_video.models import (
    FULL,
    TOY,
    DemoVideoModel,
    build_vae,
    decode,
    encode_clips,
    move,
)
from examples.train_demo_video.sampling import contact_sheet, score
from examples.train_demo_video.tracks import FRAMES, draw_tracks, render, to_device, to_uint8
from examples.train_demo_video.vocabulary import build_tokenizer, encode_prompts, load_tokenizer

VALIDATION_SEED, TEST_SEED = 1, 0
VAE_SCHEDULES = {
    # At 2e-3 nothing but the background was learnt in 1,200 steps; at this, a loss of 0.08 after
    # 60 s and 0.05 after 140 (H200).
    "vae_short": Schedule(peak=6e-4, warmup=100, decay_from=0.5),
    "vae": Schedule(peak=3e-4, warmup=50, decay_from=0.2),
}
VAE_FRAMES = {"vae_short": 5, "vae": FRAMES}
"""Of each stage of the autoencoder: the first two chunks of a clip cost a third of all five."""
LOOK_EVERY = 75.0
GUIDANCE = 1.5
"""Of 64 prompts 51 came out right at it, 44 at the pictures' 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much of everything."""

    vae_short_seconds: float = 140.0
    vae_short_steps: int | None = None
    vae_seconds: float = 120.0
    vae_steps: int | None = None
    vae_batch: int = 48
    pool_clips: int = 65_536
    text_seconds: float = 20.0
    text_steps: int | None = None
    dit_seconds: float = 330.0
    dit_steps: int | None = None
    dit_batch: int = 512
    validation: int = 64
    test: int = 100
    check: int = 64
    measured: int = 2048
    reserve_seconds: float = 30.0
    """Kept free of training at the end of a piece, to score and write."""


TOY_PLAN = Plan(
    vae_short_steps=1,
    vae_steps=2,
    vae_batch=1,
    pool_clips=8,
    text_steps=4,
    dit_steps=4,
    dit_batch=4,
    validation=2,
    test=2,
    check=2,
    measured=4,
    reserve_seconds=1.0,
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_demo_video", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("video_out"), help="what to keep")
    parser.add_argument("--state-dir", type=Path, default=Path("video_state"))
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="this piece's wall time")
    parser.add_argument("--finish", action="store_true", help="plan to end with this piece")
    parser.add_argument("--toy", action="store_true", help="tiny networks and few steps, on a CPU")
    for name, field in Plan.__dataclass_fields__.items():
        kind = float if "float" in str(field.type) else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.add_argument("--no-compile", action="store_true", help="do not try to compile")
    parser.add_argument("--no-graphs", action="store_true", help="do not try CUDA graphs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume-from", type=Path, help="an --out folder, if --state-dir is lost")
    parser.add_argument(
        "--refine-vae", action="store_true", help="train its autoencoder's last stage again"
    )
    parser.add_argument("--unpack", type=Path, help="only unpack this checkpoint.tar ...")
    parser.add_argument("--to", type=Path, help="... into this folder")
    return parser.parse_args(argv)


class Piece:
    """One run of the trainer: takes the stages up where the last piece left them."""

    def __init__(self, args: argparse.Namespace) -> None:
        fields = Plan.__dataclass_fields__
        given = {k: v for k, v in vars(args).items() if k in fields and v is not None}
        self.plan = replace(TOY_PLAN if args.toy else Plan(), **given)
        self.args, self.out, self.state = args, args.out, args.state_dir
        self.device = torch.device(args.device)
        self.state.mkdir(parents=True, exist_ok=True)
        self.log = Log(self.out / "log.jsonl")
        self.deadline = time.monotonic() + args.budget_seconds - self.plan.reserve_seconds
        self.settings = Settings(guidance=GUIDANCE)
        self.finished = False

    def run(self) -> bool:
        """All stages in order; True when the model is complete."""
        torch.set_float32_matmul_precision("high")
        # On an H200 with torch 2.11, cuDNN attention's backward gave NaN at sizes like these.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(self.state / "tokenizer")
        sizes = TOY if self.args.toy else FULL
        model, vae = DemoVideoModel(sizes, len(tokenizer)), build_vae(sizes)
        self.log(
            "start",
            vae=count_parameters(vae),
            text=count_parameters(model.text_encoder),
            dit=count_parameters(model.transformer),
            device=str(self.device),
        )
        self._restore_from_out(model, vae)
        if not self._vae(vae):
            return False
        pool = self._pool(vae)
        if pool is not None:
            self._learn(model, vae, pool)
        return self.finished

    def _restore_from_out(self, model: DemoVideoModel, vae: AutoencoderKLWan) -> None:
        """Weights of an earlier piece's ``checkpoint.tar``, where its state is gone."""
        source = self.args.resume_from
        if source is None or (self.state / "vae_done.pt").exists():
            return
        folder = self.state / "restored"
        unpack_archive(source / "checkpoint.tar", folder)
        read_weights(folder, model, vae)
        if not self.args.refine_vae:
            self._save_vae(vae)
        self.log("restored", source=str(source))

    def _modes(self) -> Sequence[Mode]:
        if self.device.type != "cuda":
            return CPU_MODES
        return tuple(
            mode
            for mode in GPU_MODES
            if not (mode.graph and self.args.no_graphs)
            and not (mode.compiled and self.args.no_compile)
        )

    def _clock(self, name: str) -> Clock:
        return Clock(
            total_seconds=getattr(self.plan, f"{name}_seconds"),
            total_steps=getattr(self.plan, f"{name}_steps"),
            deadline=self.deadline,
        )

    def _vae(self, vae: AutoencoderKLWan) -> bool:
        """True when the autoencoder is complete."""
        done = self.state / "vae_done.pt"
        move(vae, self.device)
        if done.exists():
            saved = torch.load(done, map_location=self.device, weights_only=True)
            vae.load_state_dict(saved["vae"])
            vae.register_to_config(**saved["config"])
            return True
        # A later stage that has begun took up what the one before it left.
        begun = (self.state / "vae.pt").exists() or self.args.refine_vae
        ended = (begun or self._train_vae(vae, "vae_short")) and self._train_vae(vae, "vae")
        self._check_vae(vae)
        if ended:
            normalise(vae, self.device, self.plan.measured)
            self._save_vae(vae)
        return ended

    def _train_vae(self, vae: AutoencoderKLWan, stage: str) -> bool:
        """One stage of it; True when that is complete."""
        palette, frames = palette_on(self.device), VAE_FRAMES[stage]
        engine = Engine(
            vae.train(),
            vae,
            draw=vae_draw(self.plan.vae_batch, 0, self.device, frames),
            loss=lambda work, batch: vae_step(work, batch, palette, frames),
        )
        return self._train(engine, stage, VAE_SCHEDULES[stage], (), finish=False)

    def _save_vae(self, vae: AutoencoderKLWan) -> None:
        config = {k: list(vae.config[k]) for k in ("latents_mean", "latents_std")}
        torch.save({"vae": vae.state_dict(), "config": config}, self.state / "vae_done.pt")

    @torch.no_grad()
    def _check_vae(self, vae: AutoencoderKLWan) -> None:
        """Share of held-out clips that the grader still finds right after the autoencoder."""
        copied = self._stored(vae)
        clips, _ = held_out_prompts(77, self.plan.check)
        tracks = draw_tracks(clips, np.random.default_rng(77))
        shown = render(to_device(tracks, self.device), palette_on(self.device))
        back = decode(copied, encode_clips(copied, shown)).float().clamp(-1, 1)
        right = sum(not grade(a, b) for a, b in zip(to_uint8(back), clips, strict=True))
        error = float((back - shown).abs().mean())
        self.log("vae check", right=right, of=len(clips), error=error)

    def _stored(self, vae: AutoencoderKLWan) -> AutoencoderKLWan:
        """A copy with the rounding of the stored weights."""
        copied = copy.deepcopy(vae).eval()
        move(copied, self.device, torch.bfloat16)
        if self.device.type != "cuda":
            copied.float()
        return copied

    def _pool(self, vae: AutoencoderKLWan) -> Pool | None:
        file = self.state / "pool.pt"
        if file.exists():
            return Pool(*torch.load(file, map_location=self.device, weights_only=True))
        if time.monotonic() > self.deadline:
            return None
        stored = self._stored(vae)
        pool = build_pool(stored, self.state, self.plan.pool_clips, 2, self.device)
        deviation = float(pool.latents[:4096].float().std())
        self.log("pool", clips=len(pool.latents), deviation=deviation)
        torch.save(tuple(pool), file)
        return pool

    def _train(
        self,
        engine: Engine,
        name: str,
        schedule: Schedule,
        looks: Sequence[tuple[float, Callable[[], None]]],
        *,
        finish: bool,
    ) -> bool:
        return train_stage(
            engine,
            self._clock(name),
            schedule,
            self.state / f"{name}.pt",
            self.log,
            stage=name,
            modes=self._modes(),
            finish=finish,
            looks=looks,
        )

    def _learn(self, model: DemoVideoModel, vae: AutoencoderKLWan, pool: Pool) -> None:
        """The text encoder alone, then with the denoiser; scores, and the model folder."""
        pupil = Pupil(model).to(self.device).train()
        average = copy.deepcopy(pupil).eval().requires_grad_(False)
        text = Engine(
            pupil,
            average,
            draw=text_draw(pool, self.plan.dit_batch, self.device),
            loss=text_step,
            trained=lambda name: not name.startswith("model.transformer."),
            is_matrix=is_matrix,
        )
        if not (self.state / "dit.pt").exists():
            if not self._train(text, "text", TEXT_SCHEDULE, (), finish=False):
                return
            read = average.read(pool.ids[:1024, 0].long(), pool.facts[:1024])
            self.log("text check", right=read)
        tokenizer = load_tokenizer(self.state)
        empty = torch.from_numpy(encode_prompts(tokenizer, [""])).to(self.device)
        engine = Engine(
            pupil,
            average,
            draw=dit_draw(pool, empty, self.plan.dit_batch, self.device),
            loss=dit_step,
            is_matrix=is_matrix,
            compile_blocks=lambda work: work.model.compile_blocks(),
        )
        stored = self._stored(vae)

        def look() -> None:
            self._score(average, stored, VALIDATION_SEED, self.plan.validation, "look")

        looks = ((LOOK_EVERY, look),)
        finish = self.args.finish
        self.finished = self._train(engine, "dit", DIT_SCHEDULE, looks, finish=finish)
        result = self._score(average, stored, TEST_SEED, self.plan.test, "test")
        self._write(average, vae, result)

    def _score(
        self, average: Pupil, vae: AutoencoderKLWan, seed: int, count: int, stage: str
    ) -> Score:
        model = copy.deepcopy(average.model).to(torch.bfloat16)
        if self.device.type != "cuda":
            model = model.float()
        tokenizer = load_tokenizer(self.state)
        result = score(model, vae, tokenizer, self.settings, seed=seed, count=count)
        self.log(stage, right=result.right, of=count, **result.table())
        return result

    def _write(self, average: Pupil, vae: AutoencoderKLWan, result: Score) -> None:
        """``checkpoint.tar``, ``progress.json``, the contact sheet."""
        folder = self.state / "checkpoint"
        size = write_checkpoint(folder, average.model, vae, self.state, self.settings)
        pack_folder(folder, self.out / "checkpoint.tar")
        contact_sheet(result).save(self.out / "samples.png")
        progress = {
            "finished": self.finished,
            "bytes": size,
            "sampling": asdict(self.settings),
            "right": result.right,
            "of": len(result.prompts),
            "faults": result.table(),
        }
        (self.out / "progress.json").write_text(json.dumps(progress, indent=1) + "\n")
        self.log("written", bytes=size, within_limit=int(size <= LIMIT_BYTES))


def main(argv: list[str] | None = None) -> int:
    """Runs one piece; exit status 0, whether finished or to be continued."""
    args = parse_arguments(argv)
    diffusers_logging.set_verbosity_error()
    if args.unpack is not None:
        unpack_archive(args.unpack, args.to)
        return 0
    piece = Piece(args)
    finished = piece.run()
    piece.log("end", finished=int(finished), wall=piece.log.seconds())
    print("FINISHED" if finished else "NOT FINISHED: run the same command again", flush=True)
    return 0
