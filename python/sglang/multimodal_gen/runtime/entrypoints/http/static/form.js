// The form of a model: built from what /v1/models says of it, and nothing known about families.

import { adapterField } from "./adapters.js";
import { byId, el, showError } from "./dom.js";
import * as make from "./fields.js";
import { sizeField } from "./size.js";
import { uploadField } from "./uploads.js";

const LABELS = {
  num_inference_steps: "Steps", guidance_scale: "Guidance", true_cfg_scale: "True CFG", max_sequence_length: "Text tokens",
  num_frames: "Frames", fps: "Frames per second", seconds: "Seconds", n: "Outputs",
};
const FIRST = ["num_inference_steps", "guidance_scale", "true_cfg_scale", "num_frames", "fps"];
const OWN = new Set(["prompt", "negative_prompt", "seed", "num_outputs_per_prompt", "height", "width", "task_type", "lora"]);

export const FILES = ["image", "mask", "video"];

const spoken = (name) => LABELS[name] || (name[0].toUpperCase() + name.slice(1)).replaceAll("_", " ");

export class Form {
  /** `card` is the model's entry of /v1/models, `adapters` the names of /v1/loras. */
  constructor(card, adapters) {
    this.card = card;
    this.fields = new Map();
    this.settings = new Map(card.settings.map((setting) => [setting.name, setting]));
    this.key = `sglang-form:${card.id}`;
    this.build(adapters);
    const kept = localStorage.getItem(this.key);
    this.reset();
    this.restore(kept);
    byId("form").addEventListener("change", () => this.changed());
    byId("form").addEventListener("input", (event) => {
      this.forget(event.target);
      this.changed();
    });
  }

  /** What the chosen task makes and takes. */
  get task() {
    const name = this.fields.get("task_type")?.get();
    return this.card.tasks.find((task) => task.name === name) || this.card.tasks[0];
  }

  get makesVideo() {
    return this.task.makes === "video";
  }

  build(adapters) {
    const { card, settings } = this;
    const helpOf = (name) => settings.get(name)?.help || "";
    const limit = card.limits.prompt_characters;
    const main = [make.textArea("prompt", "Prompt", { rows: 4, limit, placeholder: "What to make", help: helpOf("prompt") })];
    if (settings.has("negative_prompt")) {
      main.push(make.textArea("negative_prompt", "Negative prompt", { rows: 1, limit, placeholder: "What to keep away from", help: helpOf("negative_prompt") }));
    }
    if (card.tasks.length > 1) main.push(this.taskField());
    main.push(...this.uploadFields());
    if (settings.has("width")) main.push(sizeField(card));
    const grid = FIRST.filter((name) => settings.has(name)).map((name) => this.generic(settings.get(name)));
    if (card.tasks.some((task) => task.makes === "video")) grid.push(this.secondsField());
    grid.push(this.countField(), make.seedField("seed", helpOf("seed")));
    grid.push(make.segments("output_format", "Format", [["png", "PNG"], ["jpeg", "JPEG"], ["webp", "WebP"]]));
    if (settings.has("lora") && adapters.length) main.push(adapterField(adapters));
    const rest = card.settings.filter(({ name }) => !OWN.has(name) && !FIRST.includes(name) && name !== "diffusers_kwargs");
    const more = [...rest.map((setting) => this.generic(setting)), make.numberField("output_compression", "Quality", {
      whole: true, min: 0, max: 100, placeholder: "95", help: "Of JPEG and WebP, 0 to 100.",
    })];
    for (const field of [...main, ...grid, ...more].filter(Boolean)) this.fields.set(field.name, field);
    byId("fields").replaceChildren(
      ...main.map((field) => field.node),
      el("div", { className: "grid" }, grid.filter(Boolean).map((field) => field.node)),
      el("details", { className: "more" }, el("summary", {}, "More settings"),
        el("div", { className: "grid" }, more.map((field) => field.node))),
    );
    byId("fields").removeAttribute("aria-busy");
    this.adapt();
  }

  taskField() {
    const words = { no: "text", may: "text, picture", must: "picture" };
    const choices = this.card.tasks.map((task) => [task.name, `${words[task.image]} → ${task.makes}`]);
    const short = choices.length <= 3;
    const field = short
      ? make.segments("task_type", "Task", choices, { wide: true })
      : make.selectField("task_type", "Task", choices);
    field.onChange(() => this.adapt());
    return field;
  }

  uploadFields() {
    const { card } = this;
    const maxBytes = card.limits.body_bytes;
    const fields = [];
    if (card.tasks.some((task) => task.image !== "no")) {
      fields.push(uploadField("image", "Pictures", {
        most: card.limits.input_images, maxBytes, required: () => this.task.image === "must",
      }));
      if (card.accepts_mask) fields.push(uploadField("mask", "Mask", { maxBytes }));
    }
    if (card.tasks.some((task) => task.video !== "no")) {
      fields.push(uploadField("video", "Video", { maxBytes, accept: "video/*", required: () => this.task.video === "must" }));
    }
    return fields;
  }

  countField() {
    return make.sliderField("n", LABELS.n, { min: 1, soft: this.card.limits.images, help: "Output k has seed + k." });
  }

  secondsField() {
    return make.numberField("seconds", LABELS.seconds, { min: 0, placeholder: "by frames", help: "In place of a count of frames." });
  }

  generic(setting) {
    const { name, kind, help, choices } = setting;
    const text = spoken(name);
    if (kind === "choice") return make.selectField(name, text, [["", "default"], ...choices.map((each) => [each, each])], { help });
    if (kind === "boolean") return make.checkField(name, text, { help });
    if (kind === "text") return make.lineField(name, text, { help });
    if (kind === "json") return make.lineField(name, text, { help, json: true });
    if (name === "num_inference_steps") {
      const soft = Math.max(50, 2 * (setting.default || 0));
      return make.sliderField(name, text, { min: 1, soft: Math.min(soft, this.card.limits.steps), help });
    }
    if (name === "guidance_scale" || name === "true_cfg_scale") {
      return make.sliderField(name, text, { whole: false, min: 0, soft: 15, step: 0.1, help });
    }
    return make.numberField(name, text, { whole: kind === "integer", help });
  }

  /** Show what the chosen task has a use for. */
  adapt() {
    const { task } = this;
    const shown = (name, yes) => {
      const field = this.fields.get(name);
      if (field) field.node.hidden = !yes;
    };
    for (const name of ["image", "mask"]) shown(name, task.image !== "no");
    shown("video", task.video !== "no");
    for (const name of ["output_format", "output_compression"]) shown(name, !this.makesVideo);
    for (const name of ["num_frames", "num_frames_round_down", "fps", "seconds"]) shown(name, this.makesVideo);
    byId("run").firstElementChild.textContent = this.makesVideo ? "Generate video" : "Generate";
  }

  /** The values that were said, by name; files are in them as File objects. Throws a FieldFault. */
  values() {
    const values = {};
    for (const field of this.fields.values()) {
      if (field.node.hidden) continue;
      const value = field.get();
      const idle = value === false && !this.defaultOf(field.name); // a box that nobody ticked
      if (value !== undefined && !idle) values[field.name] = value;
    }
    if (this.card.tasks.length < 2) delete values.task_type;
    if (values.seconds !== undefined) {
      values.seconds = String(values.seconds); // as OpenAI has it
      delete values.num_frames;
    }
    if (!values.output_format || values.output_format === "png") delete values.output_compression;
    return values;
  }

  set(values) {
    for (const [name, field] of this.fields) if (name in values) field.set(values[name]);
    this.adapt();
    this.changed();
  }

  /** Settings of an earlier work: what it does not say goes back to the default. */
  reuse(values) {
    this.reset({ keep: FILES });
    this.set(values);
  }

  reset({ keep = [] } = {}) {
    for (const [name, field] of this.fields) if (!keep.includes(name)) field.set(this.defaultOf(name));
    this.clearFaults();
    this.adapt();
    this.changed();
  }

  defaultOf(name) {
    if (name === "n") return 1;
    if (name === "size") return this.card.size;
    if (name === "seed" || name === "prompt") return null;
    if (name === "task_type") return this.card.task_type;
    return this.settings.get(name)?.default ?? null;
  }

  changed() {
    const values = {};
    for (const [name, field] of this.fields) {
      if (FILES.includes(name)) continue;
      try {
        values[name] = field.get() ?? null;
      } catch {
        values[name] = null; // half typed
      }
    }
    localStorage.setItem(this.key, JSON.stringify(values));
  }

  restore(kept) {
    try {
      this.set(JSON.parse(kept) || {});
    } catch {
      localStorage.removeItem(this.key);
    }
  }

  clearFaults() {
    for (const field of this.fields.values()) field.fault("");
    showError(byId("form-error"), "");
  }

  forget(target) {
    const holder = target.closest("[data-field]");
    this.fields.get(holder?.dataset.field)?.fault("");
  }

  /** Show an error by the field that it names, else above the button. */
  fault(error) {
    const name = { width: "size", height: "size", num_outputs_per_prompt: "n", "image[]": "image", input_reference: "image" }[error.param] || error.param;
    const field = this.fields.get(name);
    if (!field || field.node.hidden) {
      showError(byId("form-error"), error.message);
      return;
    }
    const text = error.message.replace(/^[\w.[\]]+(=("[^"]*"|'[^']*'|[^:]*))?: /, "");
    field.fault(text[0].toUpperCase() + text.slice(1));
    const folded = field.node.closest("details");
    if (folded) folded.open = true;
    field.focus();
    field.node.scrollIntoView({ block: "nearest" });
  }
}
