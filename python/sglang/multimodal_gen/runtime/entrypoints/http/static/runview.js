// How a run looks while it is at work, and after: its pictures as they come, a bar, a way to stop.

import { announce, el, seconds } from "./dom.js";

const WORDS = {
  waiting: "After your other requests", sent: "Sending", queued: "Waiting in the queue", running: "Making",
  done: "Done", failed: "Failed", cancelled: "Cancelled",
};

export class RunView {
  /** `act` has open(work), retry(run), dismiss(view). */
  constructor(act) {
    this.act = act;
    this.told = -1;
    this.tiles = el("div", { className: "tiles" });
    this.bar = el("div", { className: "progress", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": "Progress" }, el("i"));
    this.status = el("span", { className: "status" });
    this.clock = el("span", { className: "hint clock" });
    this.prompt = el("p", { className: "run-prompt" });
    this.facts = el("p", { className: "hint run-facts" });
    this.problem = el("p", { className: "error", role: "alert", hidden: true });
    this.warnings = el("ul", { className: "warnings" });
    this.buttons = el("div", { className: "run-buttons" });
    this.node = el("article", { className: "run" }, this.tiles,
      el("div", { className: "run-side" }, el("div", { className: "run-line" }, this.status, this.clock), this.bar,
        this.prompt, this.facts, this.problem, this.warnings, this.buttons));
    this.ticking = setInterval(() => this.tick(), 250);
  }

  show(run) {
    if (this.run !== run) this.begin(run);
    const { state } = run;
    this.node.dataset.state = state;
    const percent = state === "done" ? 100 : run.progress;
    this.status.textContent = state === "running" ? `${WORDS.running} · ${percent} %` : WORDS[state];
    const moving = state === "running" || state === "done";
    this.bar.classList.toggle("unknown", !moving && !run.over);
    if (moving) this.bar.setAttribute("aria-valuenow", String(percent));
    else this.bar.removeAttribute("aria-valuenow");
    this.bar.firstChild.style.width = `${percent}%`;
    this.paintTiles(run);
    this.tell(run, percent);
    if (run.over && !this.ended) this.end(run);
  }

  begin(run) {
    this.run = run;
    this.prompt.textContent = run.values.prompt || "";
    const { size, num_inference_steps: steps } = run.values;
    this.facts.textContent = [size?.replace("x", " × "), steps && `${steps} steps`].filter(Boolean).join(" · ");
    const [width, height] = (run.values.size || "1x1").split("x").map(Number);
    this.tiles.dataset.count = String(Math.min(run.count, 4));
    this.tiles.replaceChildren(...Array.from({ length: run.count }, (_, index) => {
      const tile = el("button", { type: "button", className: "tile", disabled: true, "aria-label": `Output ${index + 1}, not there yet` },
        el("span", { className: "shimmer" }));
      tile.style.aspectRatio = `${width} / ${height}`;
      return tile;
    }));
    this.buttons.replaceChildren(el("button", { type: "button", className: "cancel", onclick: () => run.cancel() },
      "Cancel", el("kbd", {}, "Esc")));
  }

  paintTiles(run) {
    run.pictures.forEach((url, index) => {
      const tile = this.tiles.children[index];
      const work = run.works.find((each) => each.id.endsWith(`-${index}`));
      const video = work?.kind === "video";
      if (tile.dataset.url !== url) {
        tile.dataset.url = url;
        const shown = video ? el("video", { src: url, muted: true, loop: true, autoplay: true, playsInline: true }) : el("img", { src: url, alt: "" });
        shown.onload = () => tile.replaceChildren(shown); // no blank between two previews
        if (video) tile.replaceChildren(shown);
      }
      tile.classList.toggle("preview", !work);
      if (work && tile.disabled) {
        tile.disabled = false;
        tile.setAttribute("aria-label", `Open: ${work.prompt.slice(0, 80)}, seed ${work.seed ?? "unknown"}`);
        tile.onclick = () => this.act.open(work);
      }
    });
  }

  /** Screen readers hear quarters, not every percent. */
  tell(run, percent) {
    const mark = run.state === "running" ? `${Math.floor(percent / 25) * 25} percent` : WORDS[run.state];
    if (mark === this.told) return;
    this.told = mark;
    announce(run.error ? `Failed. ${run.error.message}` : mark);
  }

  tick() {
    if (this.run && !this.run.over) this.clock.textContent = seconds((Date.now() - this.run.created) / 1000);
  }

  end(run) {
    this.ended = true;
    clearInterval(this.ticking);
    this.clock.textContent = seconds((Date.now() - run.created) / 1000);
    if (run.error) {
      const wait = run.error.retryAfter ? ` Try again in ${seconds(run.error.retryAfter)}.` : "";
      this.problem.textContent = run.error.message + wait;
      this.problem.hidden = false;
    }
    const warnings = [...new Set(run.works.flatMap((work) => work.warnings || []))];
    this.warnings.replaceChildren(...warnings.map((text) => el("li", {}, text)));
    const seeds = run.works.map((work) => work.seed).filter((seed) => seed !== undefined);
    if (seeds.length) this.facts.textContent += ` · seed ${seeds.join(", ")}`;
    const buttons = [];
    if (run.state !== "done") buttons.push(el("button", { type: "button", onclick: () => this.act.retry(run, this) }, "Try again"));
    buttons.push(el("button", { type: "button", className: "quiet", onclick: () => this.act.dismiss(this) }, "Dismiss"));
    const focused = this.buttons.contains(document.activeElement);
    this.buttons.replaceChildren(...buttons);
    if (focused) buttons[0].focus();
  }
}
