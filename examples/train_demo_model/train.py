"""The trainer: tokenizers, autoencoder, pool, text, DiT; in pieces that resume one another.

One command (see README.md): ``python -m examples.train_demo_model --out DIR --state-dir DIR``.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from diffusers.utils import logging as diffusers_logging
from torch import Tensor
from transformers import CLIPTokenizer, T5Tokenizer

from examples.train_demo_model.build_pool import build_pool, load_pool, save_pool
from examples.train_demo_model.checkpoint import (
    LIMIT_BYTES,
    pack_folder,
    read_vae,
    read_weights,
    unpack_archive,
    write_checkpoint,
    write_tokenizers,
)
from examples.train_demo_model.clock import Clock, Log
from examples.train_demo_model.dit import (
    DIT_SCHEDULE,
    READ_EVERY,
    SCORE_EVERY,
    TEXT_SCHEDULE,
    Trainer,
    train_stage,
)
from examples.train_demo_model.engine import CPU_MODES, GPU_MODES, Mode, Schedule
from examples.train_demo_model.lessons import check_text
from examples.train_demo_model.models import FULL, TOY, DemoModel, build_vae, count_parameters, move
from examples.train_demo_model.pool import CLIP_KEPT, Pool, RowMaker
from examples.train_demo_model.sampling import Score, Settings, contact_sheet, score
from examples.train_demo_model.vae import POLISH, SCHEDULE, check_vae, normalise, vae_engine
from examples.train_demo_model.vocabulary import (
    build_clip_tokenizer,
    build_t5_tokenizer,
    encode_clip,
    encode_t5,
    load_tokenizers,
)

VALIDATION_SEED, TEST_SEED = 1, 0
GUIDANCES, SHIFTS = (3.0, 2.0, 4.5), (3.0, 2.0, 4.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much of everything."""

    vae_seconds: float = 130.0
    vae_steps: int | None = None
    vae_batch: int = 128
    pool_scenes: int = 655_360
    text_seconds: float = 30.0
    text_steps: int | None = None
    dit_seconds: float = 800.0
    dit_steps: int | None = None
    dit_batch: int = 512
    """Doubled where no CUDA graph can be had, since each step costs more then."""
    validation: int = 192
    test: int = 200
    check: int = 256
    measured: int = 4096
    """Scenes from which the latents' shift and scale are measured."""
    reserve_seconds: float = 35.0
    """Kept free of training at the end of a piece, to score and write."""


TOY_PLAN = Plan(
    vae_steps=12,
    vae_batch=8,
    pool_scenes=128,
    text_steps=10,
    dit_steps=12,
    dit_batch=8,
    validation=4,
    test=8,
    check=8,
    measured=64,
    reserve_seconds=1.0,
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_demo_model", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="what to keep")
    parser.add_argument("--state-dir", type=Path, default=Path("demo_state"), help="to resume from")
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="this piece's wall time")
    parser.add_argument("--finish", action="store_true", help="plan the DiT to end with this piece")
    parser.add_argument("--toy", action="store_true", help="tiny networks and few steps, on a CPU")
    parser.add_argument(
        "--vae-from",
        type=Path,
        help="model folder whose autoencoder to take; with --vae-seconds, to train on from",
    )
    parser.add_argument("--vae-seconds", type=float)
    parser.add_argument("--text-seconds", type=float)
    parser.add_argument("--dit-seconds", type=float)
    parser.add_argument("--vae-steps", type=int)
    parser.add_argument("--text-steps", type=int)
    parser.add_argument("--dit-steps", type=int)
    parser.add_argument("--vae-batch", type=int)
    parser.add_argument("--dit-batch", type=int)
    parser.add_argument("--pool-scenes", type=int)
    parser.add_argument("--reserve-seconds", type=float)
    parser.add_argument(
        "--workers", type=int, help="processes that write scenes (default: cores - 2)"
    )
    parser.add_argument("--no-compile", action="store_true", help="do not try to compile")
    parser.add_argument("--no-graphs", action="store_true", help="do not try CUDA graphs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resume-from", type=Path, help="an --out folder, if --state-dir is lost")
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
        begin = time.monotonic()
        self.deadline = begin + args.budget_seconds - self.plan.reserve_seconds
        self.tokenizer_folder = self.state / "tokenizers"
        self.settings = Settings()
        self.finished = False

    def run(self) -> bool:
        """All stages in order; True when the model is complete."""
        torch.set_float32_matmul_precision("high")
        # On an H200 with torch 2.11, cuDNN attention's backward gave NaN at these sizes.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cudnn.benchmark = True
        torch.manual_seed(0)
        clip, t5 = self._tokenizers()
        sizes = TOY if self.args.toy else FULL
        model, vae = DemoModel(sizes, len(clip), len(t5)), build_vae(sizes)
        self.log(
            "start",
            vae=count_parameters(vae),
            clip=count_parameters(model.text_encoder),
            t5=count_parameters(model.text_encoder_2),
            dit=count_parameters(model.transformer),
            device=str(self.device),
        )
        self._restore_from_out(model, vae)
        rows = RowMaker(
            self.plan.pool_scenes,
            self.tokenizer_folder,
            0 if (self.state / "pool.pt").exists() else self._workers(),
        )
        try:
            if not self._vae(vae):
                return False
            pool = self._pool(vae, rows)
        finally:
            rows.close()
        if pool is None:
            return False
        self._learn(model, vae, pool)
        return self.finished

    def _workers(self) -> int:
        if self.args.workers is not None:
            return self.args.workers
        return 0 if self.args.toy else max((os.cpu_count() or 1) - 2, 1)

    def _tokenizers(self) -> tuple[CLIPTokenizer, T5Tokenizer]:
        if not (self.tokenizer_folder / "tokenizer_2").exists():
            write_tokenizers(self.tokenizer_folder, build_clip_tokenizer(), build_t5_tokenizer())
        return load_tokenizers(self.tokenizer_folder)

    def _restore_from_out(self, model: DemoModel, vae: AutoencoderKL) -> None:
        """Weights of an earlier piece's ``checkpoint.tar``, where its state is gone."""
        source = self.args.resume_from
        self.restored: dict[str, float | int] | None = None
        if source is None or (self.state / "dit.pt").exists():
            return
        folder = self.state / "restored"
        unpack_archive(source / "checkpoint.tar", folder)
        read_weights(folder, model, vae)
        self.restored = json.loads((source / "progress.json").read_text())["clock"]
        config = {k: vae.config[k] for k in ("scaling_factor", "shift_factor")}
        torch.save({"vae": vae.state_dict(), "config": config}, self.state / "vae_done.pt")
        self.log("restored", source=str(source), vae="done")

    def _vae(self, vae: AutoencoderKL) -> bool:
        """Stage 2; True when the autoencoder is complete."""
        done = self.state / "vae_done.pt"
        if done.exists():
            saved = torch.load(done, map_location=self.device, weights_only=True)
            move(vae, self.device)
            vae.load_state_dict(saved["vae"])
            vae.register_to_config(**saved["config"])
            return True
        taken = self.args.vae_from is not None
        if taken:
            read_vae(self.args.vae_from, vae)
            move(vae, self.device)
        as_it_is = taken and self.args.vae_seconds is None and self.args.vae_steps is None
        if not as_it_is and not self._train_vae(vae, POLISH if taken else SCHEDULE):
            return False
        normalise(vae, self.device, self.plan.measured)
        config = {k: vae.config[k] for k in ("scaling_factor", "shift_factor")}
        torch.save({"vae": vae.state_dict(), "config": config}, done)
        check_vae(self._stored(vae), self.log, self.device, self.plan.check)
        return True

    def _train_vae(self, vae: AutoencoderKL, schedule: Schedule) -> bool:
        state_file = self.state / "vae.pt"
        # Other scenes in each piece.
        seed = time.time_ns() % 2**31 if state_file.exists() else 0
        return train_stage(
            vae_engine(vae, self.plan.vae_batch, seed, self.device),
            Clock(self.plan.vae_seconds, self.plan.vae_steps, self.deadline),
            schedule,
            state_file,
            self.log,
            stage="vae",
            modes=[mode for mode in self._modes() if not mode.compiled],
        )

    def _pool(self, vae: AutoencoderKL, rows: RowMaker) -> Pool | None:
        """Stage 3; None if this piece ended before the pool was complete."""
        file = self.state / "pool.pt"
        if file.exists():
            pool = load_pool(file, self.device)
            self.log("pool", loaded=len(pool.latents))
            return pool
        pool = build_pool(vae, rows, self.deadline, self.log, self.device)
        if pool is not None:
            # Gigabytes: written by a thread while training goes on; the interpreter waits for it.
            copied = Pool(*(tensor.cpu() for tensor in pool))
            threading.Thread(target=save_pool, args=(copied, file)).start()
        return pool

    def _modes(self) -> list[Mode]:
        """The ways to run a step that may be tried, the fastest first."""
        return [
            mode
            for mode in (GPU_MODES if self.device.type == "cuda" else CPU_MODES)
            if not (mode.compiled and self.args.no_compile)
            and not (mode.graph and self.args.no_graphs)
        ]

    def _learn(self, model: DemoModel, vae: AutoencoderKL, pool: Pool) -> None:
        """Stages 4 and 5, and the end of the piece: scores and writes the checkpoint."""
        tokenizers = load_tokenizers(self.tokenizer_folder)
        vae = self._stored(vae)
        trainer = Trainer(model, pool, self._empty(tokenizers), self.plan.dit_batch, self.device)
        if not self._text(trainer):
            return
        clock = Clock(self.plan.dit_seconds, self.plan.dit_steps, self.deadline)
        if self.restored is not None:
            clock.steps, clock.seconds = int(self.restored["steps"]), self.restored["seconds"]

        def quick_score() -> None:
            self._score(trainer, vae, VALIDATION_SEED, self.plan.validation // 2, "look")
            self._check_text(trainer)

        self.finished = train_stage(
            trainer.dit_engine(),
            clock,
            DIT_SCHEDULE,
            self.state / "dit.pt",
            self.log,
            stage="dit",
            modes=self._modes(),
            finish=self.args.finish,
            looks=[(SCORE_EVERY, quick_score)],
        )
        # Write first, choose settings afterwards: nothing is lost if time runs out.
        self._write(trainer, vae, clock, None)
        if self.finished:
            self._choose_settings(trainer, vae)
        self._write(
            trainer, vae, clock, self._score(trainer, vae, TEST_SEED, self.plan.test, "test")
        )

    def _text(self, trainer: Trainer) -> bool:
        """Stage 4; True when it is complete. The DiT's state, if there is one, holds its result."""
        if (self.state / "dit.pt").exists():
            return True
        done = self.state / "text_done.pt"
        if self.restored is None and not done.exists():
            clock = Clock(self.plan.text_seconds, self.plan.text_steps, self.deadline)
            if not train_stage(
                trainer.text_engine(),
                clock,
                TEXT_SCHEDULE,
                self.state / "text.pt",
                self.log,
                stage="text",
                # Short: compiling would take longer than it saves.
                modes=[mode for mode in self._modes() if not mode.compiled],
                looks=[(READ_EVERY, lambda: self._check_text(trainer))],
            ):
                return False
            torch.save(trainer.average.state_dict(), done)
        if self.restored is not None:
            heads = torch.load(self.args.resume_from / "heads.pt", weights_only=True)
            trainer.pupil.heads.load_state_dict(heads)
            trainer.average.heads.load_state_dict(heads)
        elif done.exists():
            weights = torch.load(done, map_location=self.device, weights_only=True)
            for network in (trainer.pupil, trainer.average):
                network.load_state_dict(weights)
        self._check_text(trainer)
        return True

    def _check_text(self, trainer: Trainer) -> None:
        tokenizers = load_tokenizers(self.tokenizer_folder)
        found = check_text(trainer.average, tokenizers, VALIDATION_SEED, 4 * self.plan.validation)
        self.log("text check", **found)

    def _empty(self, tokenizers: tuple[CLIPTokenizer, T5Tokenizer]) -> tuple[Tensor, Tensor]:
        clip, t5 = tokenizers
        t5_ids = torch.from_numpy(encode_t5(t5, [""])).long()
        clip_ids = torch.from_numpy(encode_clip(clip, [""])).long()[:, :CLIP_KEPT]
        return t5_ids.to(self.device), clip_ids.to(self.device)

    def _stored(self, vae: AutoencoderKL) -> AutoencoderKL:
        """A copy with the rounding of the stored weights, in the precision that scoring uses."""
        copied = copy.deepcopy(vae).eval()
        move(copied, self.device, torch.bfloat16)
        if self.device.type != "cuda":
            copied.float()
        return copied

    def _score(
        self, trainer: Trainer, vae: AutoencoderKL, seed: int, count: int, stage: str
    ) -> Score:
        average = copy.deepcopy(trainer.average.model).to(torch.bfloat16)
        if self.device.type == "cpu":
            average = average.float()
        tokenizers = load_tokenizers(self.tokenizer_folder)
        result = score(average, vae, tokenizers, self.settings, seed=seed, count=count)
        chosen = {"guidance": self.settings.guidance, "shift": self.settings.shift}
        self.log(stage, right=result.right, of=count, **chosen, **result.by_form())
        self.log(f"{stage} faults", **result.table())
        return result

    def _choose_settings(self, trainer: Trainer, vae: AutoencoderKL) -> None:
        """The guidance and shift with most right pictures on validation prompts."""
        best, best_right = self.settings, -1
        limit = self.deadline + 0.5 * self.plan.reserve_seconds
        for shift, guidance in itertools.product(SHIFTS, GUIDANCES):
            if time.monotonic() > limit:
                break
            self.settings = Settings(guidance=guidance, shift=shift)
            result = self._score(trainer, vae, VALIDATION_SEED, self.plan.validation, "choose")
            if result.right > best_right:
                best, best_right = self.settings, result.right
        self.settings = best

    def _write(
        self, trainer: Trainer, vae: AutoencoderKL, clock: Clock, result: Score | None
    ) -> None:
        """``checkpoint.tar``, ``progress.json``, the contact sheet."""
        folder = self.state / "checkpoint"
        size = write_checkpoint(
            folder, trainer.average.model, vae, self.tokenizer_folder, self.settings
        )
        pack_folder(folder, self.out / "checkpoint.tar")
        torch.save(trainer.average.heads.state_dict(), self.out / "heads.pt")
        progress: dict[str, object] = {"clock": clock.state(), "bytes": size}
        progress["finished"] = self.finished
        progress["sampling"] = asdict(self.settings)
        if result is not None:
            contact_sheet(result).save(self.out / "samples.png")
            progress |= {"right": result.right, "of": len(result.prompts)}
            progress |= {"faults": result.table(), "forms": result.by_form()}
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
