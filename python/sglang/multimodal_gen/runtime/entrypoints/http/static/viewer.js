// One work, large, with what it was made from and what can be done with it.

import { byId, el, seconds, when } from "./dom.js";

const NAMES = {
  negative_prompt: "Negative prompt", num_inference_steps: "Steps", guidance_scale: "Guidance", true_cfg_scale: "True CFG",
  lora: "Adapters", task_type: "Task", fps: "Frames per second", num_frames: "Frames", max_sequence_length: "Text tokens",
};
const HIDDEN = new Set(["prompt", "seed", "size", "n", "output_format", "width", "height"]);

const LARGEST = 5; // times its own size: more is blur

export class Viewer {
  /** `act` has reuse(work), useSeed(work), remove(work), next(work, by), closed(work). */
  constructor(act) {
    this.act = act;
    this.dialog = byId("viewer");
    byId("viewer-close").onclick = () => this.dialog.close();
    byId("viewer-reuse").onclick = () => this.leave(() => act.reuse(this.work));
    byId("viewer-seed").onclick = () => this.leave(() => act.useSeed(this.work));
    byId("viewer-previous").onclick = () => this.step(-1);
    byId("viewer-next").onclick = () => this.step(1);
    byId("viewer-delete").onclick = () => this.remove();
    this.dialog.addEventListener("close", () => this.closed());
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
    this.dialog.addEventListener("keydown", (event) => this.key(event));
  }

  open(work) {
    this.left = false;
    this.show(work);
    if (!this.dialog.open) this.dialog.showModal();
    byId("viewer-close").focus();
  }

  show(work) {
    this.free();
    this.work = work;
    this.url = URL.createObjectURL(work.blob);
    const video = work.kind === "video";
    const shown = video
      ? el("video", { src: this.url, controls: true, loop: true, autoplay: true, playsInline: true, "aria-label": work.prompt })
      : el("img", { src: this.url, alt: work.prompt });
    shown.style.maxWidth = `${LARGEST * (Number((work.size || "").split("x")[0]) || 4096)}px`;
    byId("viewer-stage").replaceChildren(shown);
    byId("viewer-title").textContent = video ? "Video" : "Picture";
    byId("viewer-prompt").textContent = work.prompt || "(no prompt)";
    byId("viewer-facts").replaceChildren(...facts(work).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
    byId("viewer-warnings").replaceChildren(...(work.warnings || []).map((text) => el("li", {}, text)));
    const link = byId("viewer-download");
    link.href = this.url;
    link.download = fileName(work);
    byId("viewer-seed").disabled = work.seed === undefined;
    byId("viewer-previous").disabled = !this.act.next(work, -1);
    byId("viewer-next").disabled = !this.act.next(work, 1);
  }

  step(by) {
    const work = this.act.next(this.work, by);
    if (work) this.show(work);
  }

  async remove() {
    const neighbour = this.act.next(this.work, 1) || this.act.next(this.work, -1);
    await this.act.remove(this.work);
    if (neighbour) this.show(neighbour);
    else this.dialog.close();
  }

  key(event) {
    if (event.target.tagName === "VIDEO") return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) {
      event.preventDefault();
      this.step(by);
    } else if (event.key === "Delete") {
      this.remove();
    }
  }

  /** Close, and go on elsewhere: the focus does not return to the gallery. */
  leave(then) {
    this.left = true;
    this.dialog.close();
    then();
  }

  closed() {
    const { work } = this;
    byId("viewer-stage").replaceChildren();
    this.free();
    if (!this.left) this.act.closed(work);
  }

  free() {
    if (this.url) URL.revokeObjectURL(this.url);
    this.url = null;
  }
}

function facts(work) {
  const said = Object.entries(work.settings || {}).filter(([name, value]) => !HIDDEN.has(name) && value !== undefined && value !== "");
  return [
    ["Seed", String(work.seed ?? "unknown")],
    ["Size", (work.size || "").replace("x", " × ")],
    ...said.map(([name, value]) => [NAMES[name] || name.replaceAll("_", " "), shown(value)]),
    ["Format", (work.format || "").toUpperCase()],
    ["Model", work.model],
    ["Made", `${when(work.created)}, in ${seconds(work.took || 0)}`],
  ].filter(([, value]) => value);
}

function shown(value) {
  if (Array.isArray(value)) return value.map((each) => (each.name ? `${each.name} ${each.weight}` : String(each))).join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** A name that any system takes, from the prompt's first words and the seed. */
function fileName(work) {
  const words = work.prompt.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  return `${words || work.kind}-${work.seed ?? work.id.slice(0, 8)}.${work.format === "jpeg" ? "jpg" : work.format}`;
}
